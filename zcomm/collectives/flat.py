"""All-gather, reduce-scatter and all-reduce in one hop: every rank exchanges directly with every other.

Quantized once per hop whatever the world's size: reduce-scatter and all-gather once, all-reduce twice. Contributions
are added in rank order in fp32 by the rank that owns the result. Every rank, the owner too, decodes the bytes that
were sent, so a replicated result is the same everywhere, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zcomm.collectives.schedule import Hop, Job, Layout, Message, Piece, Route, Schedule, Steps, Sum
from zcomm.collectives.shards import Extent
from zcomm.wire.codec import Codec


class _Gather(NamedTuple):
    codec: Codec
    own: Piece  # of the input
    exchange: Route
    shards: list[Piece]  # of the output, by rank

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode the own shard and send it to every rank. 2. Decode everybody's, the own one too."""
        run.encode(self.codec, (self.own,))
        run.send(self.exchange)
        yield self.exchange
        run.decode(self.codec, self.shards)


class _ReduceScatter(NamedTuple):
    codec: Codec
    sent: list[Piece]  # of the input: contributions to other ranks' shards
    exchange: Route
    own: Piece  # of the input: the contribution to this rank's shard
    total: Sum

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode a contribution to every other rank's shard and send it there. 2. Encode the own one; add it and
        what came, in rank order."""
        run.encode(self.codec, self.sent)
        run.send(self.exchange)
        yield self.exchange
        run.encode(self.codec, (self.own,))
        run.reduce(self.codec, (self.total,), finish=True)


class _AllReduce(NamedTuple):
    codec: Codec
    scatter: _ReduceScatter
    gather: Route
    shards: list[Piece]

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode a contribution to every other rank's shard and send it there. 2. Encode the own one; add it and
        what came, in rank order, encode the sum again and send it to every rank. 3. Decode everybody's sums, the own
        one too."""
        first = self.scatter
        run.encode(self.codec, first.sent)
        run.send(first.exchange)
        yield first.exchange
        run.encode(self.codec, (first.own,))
        run.reduce_encode(self.codec, (first.total,), self.codec, finish=True)
        run.send(self.gather)
        yield self.gather
        run.decode(self.codec, self.shards)


class _OneShot(NamedTuple):
    codec: Codec
    own: Piece
    exchange: Route
    total: Sum

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode everything and send it to every rank. 2. Add what came and the own, in rank order."""
        run.encode(self.codec, (self.own,))
        run.send(self.exchange)
        yield self.exchange
        run.reduce(self.codec, (self.total,), finish=True)


def all_gather(job: Job) -> Schedule:
    """Schedule of an all-gather of job.shards."""
    layout = Layout(job.rank, job.topology, job.itemsize)
    chunks = []
    for cut in job.cuts:
        shards, exchange = _gather(layout, job, cut)
        own = shards[job.rank]._replace(start=cut[job.rank].start - job.shards[job.rank].start)
        chunks.append(_Gather(job.codec, own, exchange, shards))
    return layout.schedule(chunks)


def reduce_scatter(job: Job) -> Schedule:
    """Schedule of a reduce-scatter onto job.shards."""
    layout = Layout(job.rank, job.topology, job.itemsize)
    return layout.schedule([_scatter(layout, job, cut) for cut in job.cuts])


def all_reduce(job: Job) -> Schedule:
    """Schedule of an all-reduce: a reduce-scatter onto job.shards whose sums are gathered as they are encoded."""
    layout = Layout(job.rank, job.topology, job.itemsize)
    chunks = []
    for cut in job.cuts:
        scatter = _scatter(layout, job, cut)
        shards, gather = _gather(layout, job, cut)
        total = scatter.total._replace(wire=shards[job.rank].wire)
        chunks.append(_AllReduce(job.codec, scatter._replace(total=total), gather, shards))
    return layout.schedule(chunks)


def one_shot_all_reduce(job: Job) -> Schedule:
    """Schedule of an all-reduce in one exchange: size times the bytes, half the steps and one quantization."""
    layout = Layout(job.rank, job.topology, job.itemsize)
    n_elems = sum(extent.n_elems for extent in job.shards)
    nbytes = job.codec.nbytes(n_elems)
    wires = [layout.take(nbytes) for _ in job.shards]
    peers = [rank for rank in range(len(wires)) if rank != job.rank]
    route = layout.route(
        [Message(peer, wires[job.rank], nbytes) for peer in peers],
        [Message(peer, wires[peer], nbytes) for peer in peers],
        n_elems_out=n_elems * len(peers),
    )
    own = Piece(0, n_elems, wires[job.rank])
    return layout.schedule([_OneShot(job.codec, own, route, Sum(tuple(wires), n_elems, 0, -1, 0, Hop.TOTAL))])


def _gather(layout: Layout, job: Job, cut: list[Extent]) -> tuple[list[Piece], Route]:
    """Every rank's shard, and the exchange in which each sends its own, encoded, to all others."""
    me = job.rank
    peers = [rank for rank in range(len(cut)) if rank != me]
    sizes = [job.codec.nbytes(n) for _, n in cut]
    shards = [Piece(start, n, layout.take(size)) for (start, n), size in zip(cut, sizes, strict=True)]
    route = layout.route(
        [Message(peer, shards[me].wire, sizes[me]) for peer in peers],
        [Message(peer, shards[peer].wire, sizes[peer]) for peer in peers],
        n_elems_out=shards[me].n_elems * len(peers),
    )
    return shards, route


def _scatter(layout: Layout, job: Job, cut: list[Extent]) -> _ReduceScatter:
    """The exchange in which every rank sends its contribution to each shard to the shard's owner."""
    me = job.rank
    nbytes = job.codec.nbytes
    peers = [rank for rank in range(len(cut)) if rank != me]
    sent = {peer: Piece(*cut[peer], layout.take(nbytes(cut[peer].n_elems))) for peer in peers}
    n_elems = cut[me].n_elems
    own = Piece(*cut[me], layout.reuse("own contribution", nbytes(n_elems)))
    came = [own.wire if rank == me else layout.take(nbytes(n_elems)) for rank in range(len(cut))]
    route = layout.route(
        [Message(peer, sent[peer].wire, nbytes(cut[peer].n_elems)) for peer in peers],
        [Message(peer, came[peer], nbytes(n_elems)) for peer in peers],
        n_elems_out=sum(cut[peer].n_elems for peer in peers),
    )
    total = Sum(tuple(came), n_elems, cut[me].start - job.shards[me].start, -1, cut[me].start, Hop.TOTAL)
    return _ReduceScatter(job.codec, list(sent.values()), route, own, total)
