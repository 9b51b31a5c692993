"""A schedule carried out: bound to scratch, to the caller's arrays, to an engine and a transport, chunk after chunk.

[Note: pipeline] At every tick the next chunk starts, then each older chunk, newest first, waits for its exchange and
takes its next step. While a slow exchange of an old chunk is awaited, those of newer chunks are already posted, so the
slow link always has bytes queued and coding hides behind it. All ranks tick alike, so no wait can be circular.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from zcomm.buffers import Span
from zcomm.collectives.schedule import Hop, Message, Move, Piece, Route, Schedule, Sum
from zcomm.collectives.scratch import ScratchPool
from zcomm.engines.engine import NO_FINISH, Engine, Finish
from zcomm.transports.transport import Exchange, Parcel, Transport
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw

SEED_BITS, HOP_BITS = 32, 2  # of a draw's 64: the plan's seed, then the hop, then the rank
HOP_SHIFT, RANK_SHIFT = SEED_BITS, SEED_BITS + HOP_BITS


class Bound(NamedTuple):
    """A route's parcels in one slab."""

    outgoing: list[Parcel]
    incoming: list[Parcel]


class Run:
    """One call of a collective. `begin` posts its first messages, `complete` does the rest."""

    __slots__ = (
        "_call",
        "_chunks",
        "_engine",
        "_exchanges",
        "_finish",
        "_scratch",
        "_seed",
        "_slab",
        "_source",
        "_target",
        "_under_way",
        "codec_s",
        "wait_s",
    )

    def __init__(
        self,
        source: Span,
        target: Span,
        finish: Finish,
        seed: int,  # of this rank's random bits
        call: int,  # its number
    ) -> None:
        self._source = source
        self._target = target
        self._finish = finish
        self._seed = seed
        self._call = call
        self.codec_s = 0.0
        self.wait_s = 0.0

    def begin(
        self,
        schedule: Schedule,
        engine: Engine,
        scratch: ScratchPool,
        transport: Transport,
        tags: range,  # schedule.n_tags of them
        timeout_s: float | None,
    ) -> None:
        """Take scratch, open every exchange, start the first chunk."""
        self._engine = engine
        self._scratch = scratch
        self._slab = slab = scratch.take(schedule.scratch_bytes)
        bound: list[Bound] = slab.views(schedule, _bind)
        self._exchanges: list[Exchange] = [
            transport.open(outgoing, incoming, tag, timeout_s)
            for (outgoing, incoming), tag in zip(bound, tags, strict=False)
        ]
        self._chunks = iter(schedule.chunks)
        self._under_way: list[tuple[Iterator[Route], Route]] = []  # newest first
        self._start_next_chunk()

    def complete(self) -> None:
        """Tick until every chunk is done, then return the scratch. See [Note: pipeline]."""
        exchanges = self._exchanges
        while self._under_way:
            older = self._under_way
            self._under_way = []
            self._start_next_chunk()
            for steps, route in older:
                started = perf_counter()
                exchanges[route.number].wait()
                self.wait_s += perf_counter() - started
                following = next(steps, None)
                if following is not None:
                    self._under_way.append((steps, following))
        started = perf_counter()
        for exchange in exchanges:
            exchange.close()
        self.wait_s += perf_counter() - started
        self._scratch.give_back(self._slab)  # only now: after an error, messages may still be on their way
        del self._source, self._target, self._slab

    def _start_next_chunk(self) -> None:
        for chunk in self._chunks:
            steps = chunk.steps(self)
            route = next(steps, None)
            if route is not None:
                self._under_way.append((steps, route))
                return

    def encode(self, codec: Codec, pieces: Sequence[Piece]) -> None:
        """Encode elements of the caller's input into scratch."""
        started = perf_counter()
        base, (address, _, dtype, _, _) = self._slab.address, self._source
        together = getattr(self._engine, "encode_pieces", None)
        if together is not None:
            together(codec, address, dtype, base, pieces, self._draw(codec, Hop.SENT, 0))
        else:
            for start, n_elems, wire in pieces:
                if n_elems:
                    source, draw = address + start * dtype.itemsize, self._draw(codec, Hop.SENT, start)
                    self._engine.encode(codec, source, n_elems, dtype, base + wire, draw)
        self.codec_s += perf_counter() - started

    def decode(self, codec: Codec, pieces: Sequence[Piece]) -> None:
        """Decode scratch into elements of the caller's output."""
        started = perf_counter()
        base, (address, _, dtype, _, _) = self._slab.address, self._target
        together = getattr(self._engine, "decode_pieces", None)
        if together is not None:
            together(codec, base, address, dtype, pieces)
        else:
            for start, n_elems, wire in pieces:
                if n_elems:
                    self._engine.decode(codec, base + wire, n_elems, address + start * dtype.itemsize, dtype)
        self.codec_s += perf_counter() - started

    def reduce(self, codec: Codec, sums: Sequence[Sum], finish: bool) -> None:
        """Add contributions and store them in the caller's output."""
        started = perf_counter()
        base, target = self._slab.address, self._target
        itemsize = target.dtype.itemsize
        how = self._finish if finish else NO_FINISH
        for wires, n_elems, start, _, _, _ in sums:
            if n_elems:
                at = target.address + start * itemsize
                self._engine.reduce(codec, [base + wire for wire in wires], n_elems, how, at, target.dtype)
        self.codec_s += perf_counter() - started

    def reduce_encode(self, codec: Codec, sums: Sequence[Sum], codec_out: Codec, finish: bool) -> None:
        """Add contributions and encode the sums again."""
        started = perf_counter()
        base = self._slab.address
        how = self._finish if finish else NO_FINISH
        for wires, n_elems, _, wire_out, first, hop in sums:
            if n_elems:
                contributions, out = [base + wire for wire in wires], base + wire_out
                draw = self._draw(codec_out, hop, first)
                self._engine.reduce_encode(codec, contributions, n_elems, how, codec_out, out, draw)
        self.codec_s += perf_counter() - started

    def _draw(self, codec: Codec, hop: Hop, first: int) -> Draw | None:
        return Draw(self._seed | hop << HOP_SHIFT, self._call, first) if codec.by_chance else None

    def move(self, moves: Sequence[Move]) -> None:
        """Bring wire bytes from one place in scratch to another."""
        memory: Any = self._slab.memory
        for source, target, nbytes in moves:
            memory[target : target + nbytes] = memory[source : source + nbytes]

    def send(self, route: Route) -> None:
        """Start an exchange."""
        self._exchanges[route.number].start()


def _bind(schedule: Schedule, memory: Any) -> list[Bound]:
    """Slice one slab's memory into the parcels of every route."""
    return [
        Bound(
            [_parcel(message, memory) for message in route.outgoing],
            [_parcel(message, memory) for message in route.incoming],
        )
        for route in schedule.routes
    ]


def _parcel(message: Message, memory: Any) -> Parcel:
    return Parcel(message.peer, memory[message.offset : message.offset + message.nbytes], message.mark)
