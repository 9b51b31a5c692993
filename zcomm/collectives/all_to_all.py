"""All-to-all: every rank sends every other a part of its own; in one hop, or in two with fewer messages across.

In two hops a rank hands what it sends to another node to its own node's porter for the receiver (`Topology.porter`),
and the porter sends the receiver one message from the whole node: between two nodes of m ranks, m messages in place of
m x m, with the same bytes. Where the node's parts for a receiver come to more than BUNDLE_BYTES they go directly, as
bytes then cost more than messages. A part is encoded once, by its sender, in `codec` or, where it stays in the node, in
`intra_codec`; porters pass bytes on. So under one codec both forms give the same bits.

A rank knows what it sends and what comes to it. A porter must also know what its neighbours send, so the ranks of a
node swap their counts before each call (conductor.py). Messages are marked with the counts of what they hold: where
sender and receiver differ, the receiver waits in vain, though the bytes may be as many.

[Note: parts in chunks] Counts differ between pairs, and no rank knows all of them, so each part is cut by itself, by a
rule that its sender, its porter and its receiver all follow. A chunk takes the next cut of every part that has one
left. Ranks may have different numbers of chunks; tags are taken for the largest possible number.

Source: two-step all-to-all as in DeepSpeed-MoE (arXiv 2201.05596, section 5.2).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zcomm.collectives.schedule import Layout, Message, Move, Piece, Route, Schedule, Steps
from zcomm.collectives.shards import SHARD_ALIGNMENT, Extent, shards_of
from zcomm.topology import Topology
from zcomm.wire.codec import Codec

BUNDLE_BYTES = 1 << 16  # of one node's parts for one receiver
MOST_CHUNKS = 16  # of a call in two hops
_ROUTES = 3  # of a chunk in two hops


class Parts(NamedTuple):
    """What a schedule is built for."""

    rank: int
    topology: Topology
    sends: tuple[int, ...]  # elements to each rank
    receives: tuple[int, ...]  # elements from each rank
    rows: Mapping[int, tuple[int, ...]]  # in two hops: what each rank of this node sends to each rank
    chunk_elems: int  # of all parts together
    codec: Codec
    intra_codec: Codec  # of parts that stay inside a node, in two hops
    itemsize: int  # bytes per element of the caller's array, to count what compression saves


class _OneHop(NamedTuple):
    codec: Codec
    sent: list[Piece]  # of the input, by rank; the own part too
    exchange: Route
    came: list[Piece]  # of the output, by rank

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode every rank's part and send it. 2. Decode what came, the own part too."""
        run.encode(self.codec, self.sent)
        run.send(self.exchange)
        yield self.exchange
        run.decode(self.codec, self.came)


class _TwoHops(NamedTuple):
    codec: Codec
    intra_codec: Codec
    staying: list[Piece]  # of the input: parts for this node, the own one too
    leaving: list[Piece]  # of the input: parts for other nodes that neighbours carry
    inside: Route
    alone: list[Piece]  # of the input: parts for other nodes that go directly
    directly: Route
    carried: list[Piece]  # of the input: parts for other nodes that this rank carries itself
    relayed: list[Move]  # parts of neighbours, into the bundles that this rank sends
    across: Route
    near: list[Piece]  # of the output: from this node, the own part too
    came_alone: list[Piece]  # of the output: directly from other nodes
    far: list[Piece]  # of the output: from other nodes' porters

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode the parts for this node, and those for others that neighbours carry; send each neighbour its own.
        2. Encode what goes directly to other nodes, and send it. 3. Put what neighbours handed over beside the own
        parts, and send each receiver its bundle. 4. Decode."""
        run.encode(self.intra_codec, self.staying)
        run.encode(self.codec, self.leaving)
        run.send(self.inside)
        run.encode(self.codec, self.alone)
        run.send(self.directly)
        run.encode(self.codec, self.carried)
        yield self.inside
        run.move(self.relayed)
        run.send(self.across)
        run.decode(self.intra_codec, self.near)
        yield self.directly
        run.decode(self.codec, self.came_alone)
        yield self.across
        run.decode(self.codec, self.far)


def one_hop(parts: Parts) -> Schedule:
    """Schedule of an all-to-all in which every rank sends to every other directly."""
    layout = Layout(parts.rank, parts.topology, parts.itemsize)
    nbytes = parts.codec.nbytes
    sent = [Piece(start, n, layout.take(nbytes(n))) for start, n in shards_of(parts.sends)]
    came = [
        Piece(start, n, sent[rank].wire if rank == parts.rank else layout.take(nbytes(n)))
        for rank, (start, n) in enumerate(shards_of(parts.receives))
    ]
    peers = [rank for rank in range(len(sent)) if rank != parts.rank]
    route = layout.route(
        [Message(peer, sent[peer].wire, nbytes(sent[peer].n_elems), sent[peer].n_elems) for peer in peers],
        [Message(peer, came[peer].wire, nbytes(came[peer].n_elems), came[peer].n_elems) for peer in peers],
        n_elems_out=sum(sent[peer].n_elems for peer in peers),
    )
    return layout.schedule([_OneHop(parts.codec, sent, route, came)])


def two_hops(parts: Parts) -> Schedule:
    """Schedule of an all-to-all through porters. See [Note: parts in chunks]."""
    layout = Layout(parts.rank, parts.topology, parts.itemsize)
    unit = math.lcm(SHARD_ALIGNMENT, parts.codec.block, parts.intra_codec.block)
    usual = max(unit, parts.chunk_elems // len(parts.sends))
    every = {n_elems for row in (*parts.rows.values(), parts.receives) for n_elems in row}
    most = max(len(_cuts(0, n_elems, usual, unit)) for n_elems in every)  # a longer part may have fewer, longer ones
    chunks = [_chunk(layout, _Slice(parts, at, usual, unit)) for at in range(most)]
    return layout.schedule(chunks, _ROUTES * MOST_CHUNKS)


class _Slice:
    """What one chunk of a rank takes of every part, and which way each part goes."""

    def __init__(self, parts: Parts, number: int, usual: int, unit: int) -> None:
        topology = self._topology = parts.topology
        self.me = parts.rank
        self.codec, self.intra_codec = parts.codec, parts.intra_codec
        self.node = topology.ranks_of_node[topology.node_of_rank[self.me]]
        self.neighbours = [rank for rank in self.node if rank != self.me]

        def cut(start: int, n_elems: int) -> Extent:
            cuts = _cuts(start, n_elems, usual, unit)
            return cuts[number] if number < len(cuts) else Extent(start + n_elems, 0)

        self.inputs = [cut(*extent) for extent in shards_of(parts.sends)]
        self.outputs = [cut(*extent) for extent in shards_of(parts.receives)]
        self.rows = {rank: [cut(0, n).n_elems for n in parts.rows[rank]] for rank in self.node}

        other_nodes = [ranks for ranks in topology.ranks_of_node if ranks != self.node]
        far = [to for ranks in other_nodes for to in ranks]
        self.bundled = [to for to in far if self._is_bundle([parts.rows[rank][to] for rank in self.node])]
        self.alone = [to for to in far if to not in self.bundled]
        bundling = [ranks for ranks in other_nodes if self._is_bundle([parts.receives[rank] for rank in ranks])]
        self.bundles_from = {topology.porter(topology.node_of_rank[ranks[0]], self.me): ranks for ranks in bundling}
        self.alone_from = [rank for ranks in other_nodes if ranks not in bundling for rank in ranks]

    def _is_bundle(self, counts: list[int]) -> bool:
        return sum(map(self.codec.nbytes, counts)) <= BUNDLE_BYTES

    def carried_by(self, porter: int) -> list[int]:
        """The ranks of other nodes whose bundles a rank of this node sends."""
        return [to for to in self._topology.carried_by(porter) if to in self.bundled]

    def through(self, porter: int) -> list[int]:
        """The receivers of what a rank hands to porter, its neighbour."""
        return [porter, *self.carried_by(porter)]

    def nbytes(self, rank: int, to: int) -> int:
        """Wire bytes of what a rank of this node sends to any rank."""
        return (self.intra_codec if to in self.node else self.codec).nbytes(self.rows[rank][to])


def _chunk(layout: Layout, cut: _Slice) -> _TwoHops:
    """The exchanges of one chunk. A message holds its parts in the order of senders, then receivers."""
    me, node, neighbours, rows, inputs, outputs = cut.me, cut.node, cut.neighbours, cut.rows, cut.inputs, cut.outputs

    # Hop 1: to each neighbour its own part, then those that it carries.
    own = layout.take(cut.nbytes(me, me))
    sent = {porter: {to: layout.take(cut.nbytes(me, to)) for to in cut.through(porter)} for porter in neighbours}
    handed = {rank: {to: layout.take(cut.nbytes(rank, to)) for to in cut.through(me)} for rank in neighbours}
    inside = layout.route(
        [Message(porter, wire[porter], sum(cut.nbytes(me, to) for to in wire)) for porter, wire in sent.items()],
        [Message(rank, wire[me], sum(cut.nbytes(rank, to) for to in wire)) for rank, wire in handed.items()],
        n_elems_out=sum(rows[me][to] for wire in sent.values() for to in wire),
    )

    # Beside the hops: what is too large for a bundle.
    alone = {to: layout.take(cut.nbytes(me, to)) for to in cut.alone}
    came_alone = {rank: layout.take(cut.codec.nbytes(outputs[rank].n_elems)) for rank in cut.alone_from}
    directly = layout.route(
        [_message(to, wire, [rows[me][to]], cut.codec) for to, wire in alone.items()],
        [_message(rank, wire, [outputs[rank].n_elems], cut.codec) for rank, wire in came_alone.items()],
        n_elems_out=sum(rows[me][to] for to in alone),
    )

    # Hop 2: to each receiver on another node that this rank carries for, the whole node's parts.
    bundles = {to: {rank: layout.take(cut.nbytes(rank, to)) for rank in node} for to in cut.carried_by(me)}
    came = {
        porter: {rank: layout.take(cut.codec.nbytes(outputs[rank].n_elems)) for rank in ranks}
        for porter, ranks in cut.bundles_from.items()
    }
    across = layout.route(
        [_message(to, wire[node[0]], [rows[rank][to] for rank in node], cut.codec) for to, wire in bundles.items()],
        [
            _message(porter, min(wire.values()), [outputs[rank].n_elems for rank in wire], cut.codec)
            for porter, wire in came.items()
        ],
        n_elems_out=sum(rows[rank][to] for to in bundles for rank in node),
    )

    return _TwoHops(
        cut.codec,
        cut.intra_codec,
        [Piece(*inputs[me], own), *(Piece(*inputs[porter], wire[porter]) for porter, wire in sent.items())],
        [Piece(*inputs[to], at) for porter, wire in sent.items() for to, at in wire.items() if to != porter],
        inside,
        [Piece(*inputs[to], wire) for to, wire in alone.items()],
        directly,
        [Piece(*inputs[to], wire[me]) for to, wire in bundles.items()],
        [Move(wire[to], bundles[to][rank], cut.nbytes(rank, to)) for rank, wire in handed.items() for to in bundles],
        across,
        [Piece(*outputs[me], own), *(Piece(*outputs[rank], wire[me]) for rank, wire in handed.items())],
        [Piece(*outputs[rank], wire) for rank, wire in came_alone.items()],
        [Piece(*outputs[rank], at) for wire in came.values() for rank, at in wire.items()],
    )


def _message(peer: int, offset: int, counts: list[int], codec: Codec) -> Message:
    """Parts of these counts, marked by them: a porter's own count is not what the receiver may have been told."""
    return Message(peer, offset, sum(map(codec.nbytes, counts)), zlib.crc32(repr(counts).encode()))


def _cuts(
    start: int,
    n_elems: int,  # of one part
    usual: int,  # elements of a cut
    unit: int,  # what cuts are a multiple of, so that blocks stay whole
) -> list[Extent]:
    """A part cut for the chunks, at most MOST_CHUNKS of them; one of nothing, at least."""
    step = max(usual, -(-n_elems // MOST_CHUNKS))
    step = -(-step // unit) * unit
    return [Extent(start + at, min(step, n_elems - at)) for at in range(0, max(n_elems, 1), step)]
