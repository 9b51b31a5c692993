"""A collective worked out beforehand: what is encoded where, sent to whom, summed in which order.

Built once for a shape, dtype and codec (flat.py, two_nodes.py, hierarchical.py, all_to_all.py), then carried out for
every call (run.py). Offsets count bytes in the call's scratch slab, so a schedule holds no memory and may be used by
several calls at once.

[Note: scratch] Everything received has its place from the start, because receives are posted before the first send.
Everything sent has its place until the call ends. What never leaves the rank is not kept for every chunk: the rank's
own contribution is encoded in the step that adds it, in the same place for every chunk; its node's partial sum waits
for one step, in one of two places. Together that is at most twice the wire bytes plus one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from zcomm.collectives.shards import Extent
from zcomm.topology import Topology
from zcomm.wire.codec import Codec


class Job(NamedTuple):
    """What a schedule is built for."""

    rank: int
    topology: Topology
    shards: list[Extent]  # of the whole array, by rank
    cuts: list[list[Extent]]  # cuts[chunk][rank]: that chunk of that rank's shard
    codec: Codec
    intra_codec: Codec  # of a reduction's first hop, inside the node
    itemsize: int  # bytes per element of the caller's array, to count what compression saves


class Hop(IntEnum):
    """How far an element has come when it is rounded. Each hop of each rank draws random bits of its own."""

    SENT = 0  # a rank's contribution
    PARTIAL = 1  # a node's sum
    TOTAL = 2  # the sum; rounded by its owner alone, so that all ranks receive the same bits
    MESSAGE = 3  # from one rank to another, outside a collective


class Piece(NamedTuple):
    """Elements of the caller's array, and the wire bytes that carry them."""

    start: int  # first element
    n_elems: int
    wire: int  # offset in scratch


class Move(NamedTuple):
    """Wire bytes to be brought from one place in scratch to another."""

    source: int  # offset in scratch
    target: int
    nbytes: int


class Sum(NamedTuple):
    """Encoded contributions of equal length, to be added in the order given."""

    wires: tuple[int, ...]  # offsets in scratch
    n_elems: int
    start: int  # first element of the caller's array, where the sum is stored
    wire: int  # offset in scratch, where the sum is encoded again
    first: int  # index of its first element in the whole array
    hop: Hop


class Message(NamedTuple):
    """Bytes to or from one peer."""

    peer: int
    offset: int  # in scratch
    nbytes: int
    mark: int = 0  # of its parcel; 0 where the call's fingerprint tells the counts already


class Route(NamedTuple):
    """One exchange of one chunk."""

    number: int  # among the schedule's routes; part of the tag
    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]


class Steps(Protocol):
    """What a chunk's steps may do; implemented by run.Run."""

    def encode(self, codec: Codec, pieces: Sequence[Piece]) -> None:
        """Encode elements of the caller's input into scratch."""
        ...

    def decode(self, codec: Codec, pieces: Sequence[Piece]) -> None:
        """Decode scratch into elements of the caller's output."""
        ...

    def reduce(self, codec: Codec, sums: Sequence[Sum], finish: bool) -> None:
        """Add contributions, finish (AVG's division, PREMUL_SUM's factor), store in the caller's output."""
        ...

    def reduce_encode(self, codec: Codec, sums: Sequence[Sum], codec_out: Codec, finish: bool) -> None:
        """Add contributions and encode the sums again."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Bring wire bytes from one place in scratch to another."""
        ...

    def send(self, route: Route) -> None:
        """Start an exchange."""
        ...


class Chunk(Protocol):
    """One chunk's way through the collective."""

    def steps(self, run: Steps) -> Iterator[Route]:
        """Do the steps in order, yielding each exchange that must be complete before going on."""
        ...


class Schedule(NamedTuple):
    """A collective, ready to be carried out any number of times."""

    chunks: tuple[Chunk, ...]
    routes: tuple[Route, ...]
    scratch_bytes: int
    wire_bytes_intra: int  # sent by this rank to ranks of its own node
    wire_bytes_inter: int  # sent by this rank to other nodes
    raw_bytes: int  # what the same messages would hold uncompressed
    n_tags: int  # that the call takes, the same on all ranks; one for each route, and some may be left over


class Layout:
    """Places bytes in scratch and collects the routes while a schedule is built."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        itemsize: int,  # bytes per element of the caller's array
    ) -> None:
        self._node_of_rank = topology.node_of_rank
        self._rank = rank
        self._itemsize = itemsize
        self._end = 0
        self._reused: dict[str, int] = {}
        self._routes: list[Route] = []
        self._intra = 0
        self._inter = 0
        self._raw = 0

    def take(self, nbytes: int) -> int:
        """Offset of bytes of their own."""
        offset = self._end
        self._end += nbytes
        return offset

    def reuse(self, name: str, nbytes: int) -> int:
        """Offset of bytes that whoever takes the same name shares; the first taker is the largest."""
        if name not in self._reused:
            self._reused[name] = self.take(nbytes)
        return self._reused[name]

    def route(
        self,
        outgoing: Sequence[Message],
        incoming: Sequence[Message],
        n_elems_out: int,  # elements that the outgoing bytes stand for
    ) -> Route:
        """An exchange; empty messages are left out on both sides."""
        for peer, _, nbytes, _ in outgoing:
            if self._node_of_rank[peer] == self._node_of_rank[self._rank]:
                self._intra += nbytes
            else:
                self._inter += nbytes
        self._raw += n_elems_out * self._itemsize
        route = Route(
            len(self._routes),
            tuple(message for message in outgoing if message.nbytes),
            tuple(message for message in incoming if message.nbytes),
        )
        self._routes.append(route)
        return route

    def schedule(
        self,
        chunks: Sequence[Chunk],
        n_tags: int | None = None,  # None: one for each route
    ) -> Schedule:
        """What has been laid out."""
        tags = len(self._routes) if n_tags is None else n_tags
        return Schedule(tuple(chunks), tuple(self._routes), self._end, self._intra, self._inter, self._raw, tags)
