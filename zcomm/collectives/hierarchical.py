"""All-gather, reduce-scatter and all-reduce in two hops, so that data crosses between nodes once per node.

Reduce-scatter (ZeRO++'s qgZ): a node first adds up its own ranks' contributions, then sends one partial sum per shard
to the shard's owner. All-gather: a shard goes once to each other node, whose porter hands it round. Who carries what is
`Topology.porter`; a piece is encoded where it lies in the caller's array and decoded where it belongs, which is the
slice reordering of the paper without a pass over memory. Quantized twice in a reduce-scatter, once more in an
all-reduce, once in an all-gather. Partial sums are formed in rank order, then added in node order.

Source: Wang et al., ZeRO++ (arXiv 2306.10209), section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zcomm.collectives.schedule import Hop, Job, Layout, Message, Piece, Route, Schedule, Steps, Sum
from zcomm.wire.codec import Codec


class _Gather(NamedTuple):
    codec: Codec
    own: Piece
    across: Route
    around: Route
    shards: list[Piece]

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode the own shard; send it to the node's other ranks and to one porter on every other node. 2. Hand
        round inside the node what came from others. 3. Decode everybody's shard, the own one too."""
        run.encode(self.codec, (self.own,))
        run.send(self.across)
        yield self.across
        run.send(self.around)
        yield self.around
        run.decode(self.codec, self.shards)


class _ReduceScatter(NamedTuple):
    codec: Codec
    intra_codec: Codec
    finish_early: bool
    sent: list[Piece]  # contributions to shards that other ranks of the node carry
    inside: Route
    own: list[Piece]  # contributions to shards that this rank carries
    partial: list[Sum]
    across: Route
    total: Sum

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode a contribution to every shard and send it to the shard's porter on this node. 2. Encode those to
        the shards that this rank carries itself; add them and what came, in rank order, encode the partial sums and
        send each to its shard's owner. 3. Add the nodes' partial sums, in node order."""
        run.encode(self.intra_codec, self.sent)
        run.send(self.inside)
        yield self.inside
        run.encode(self.intra_codec, self.own)
        run.reduce_encode(self.intra_codec, self.partial, self.codec, finish=self.finish_early)
        run.send(self.across)
        yield self.across
        run.reduce(self.codec, (self.total,), finish=not self.finish_early)


class _AllReduce(NamedTuple):
    scatter: _ReduceScatter
    across: Route
    around: Route
    shards: list[Piece]

    def steps(self, run: Steps) -> Iterator[Route]:
        """1.-2. As reduce-scatter. 3. Add the nodes' partial sums, in node order, encode the sum again; send it to the
        node's other ranks and to one porter on every other node. 4. Hand round inside the node what came from others.
        5. Decode everybody's sums, the own one too."""
        first = self.scatter
        run.encode(first.intra_codec, first.sent)
        run.send(first.inside)
        yield first.inside
        run.encode(first.intra_codec, first.own)
        run.reduce_encode(first.intra_codec, first.partial, first.codec, finish=first.finish_early)
        run.send(first.across)
        yield first.across
        run.reduce_encode(first.codec, (first.total,), first.codec, finish=not first.finish_early)
        run.send(self.across)
        yield self.across
        run.send(self.around)
        yield self.around
        run.decode(first.codec, self.shards)


def all_gather(job: Job) -> Schedule:
    """Schedule of an all-gather of job.shards."""
    layout = Layout(job.rank, job.topology, job.itemsize)
    chunks = []
    for number in range(len(job.cuts)):
        across, around, shards = _gather(layout, job, number)
        own = shards[job.rank]._replace(start=shards[job.rank].start - job.shards[job.rank].start)
        chunks.append(_Gather(job.codec, own, across, around, shards))
    return layout.schedule(chunks)


def reduce_scatter(job: Job) -> Schedule:
    """Schedule of a reduce-scatter onto job.shards."""
    layout = Layout(job.rank, job.topology, job.itemsize)
    return layout.schedule([_scatter(layout, job, number) for number in range(len(job.cuts))])


def all_reduce(job: Job) -> Schedule:
    """Schedule of an all-reduce: a reduce-scatter onto job.shards whose sums are gathered as they are encoded."""
    layout = Layout(job.rank, job.topology, job.itemsize)
    chunks = []
    for number in range(len(job.cuts)):
        scatter = _scatter(layout, job, number)
        across, around, shards = _gather(layout, job, number)
        total = scatter.total._replace(wire=shards[job.rank].wire)
        chunks.append(_AllReduce(scatter._replace(total=total), across, around, shards))
    return layout.schedule(chunks)


def _gather(layout: Layout, job: Job, number: int) -> tuple[Route, Route, list[Piece]]:
    """The exchanges that take every rank's encoded shard across nodes, then around each node."""
    me, topology, cut = job.rank, job.topology, job.cuts[number]
    node = topology.node_of_rank[me]
    neighbours = [rank for rank in topology.ranks_of_node[node] if rank != me]
    carried = _from_other_nodes(job, me)
    size = [job.codec.nbytes(extent.n_elems) for extent in cut]
    # Shards handed round by one porter lie side by side, so that they travel as one message.
    wire = {me: layout.take(size[me])}
    for rank in [*neighbours, *carried]:
        wire[rank] = layout.take(size[rank])
    for neighbour in neighbours:
        for rank in _from_other_nodes(job, neighbour):
            wire[rank] = layout.take(size[rank])
    porters = [topology.porter(other, me) for other in range(topology.nodes) if other != node]
    across = layout.route(
        [Message(peer, wire[me], size[me]) for peer in [*neighbours, *porters]],
        [Message(peer, wire[peer], size[peer]) for peer in [*neighbours, *carried]],
        n_elems_out=cut[me].n_elems * (len(neighbours) + len(porters)),
    )
    bundle = {rank: _bundle(wire, size, _from_other_nodes(job, rank)) for rank in (me, *neighbours)}
    around = layout.route(
        [Message(peer, *bundle[me]) for peer in neighbours],
        [Message(peer, *bundle[peer]) for peer in neighbours],
        n_elems_out=sum(cut[rank].n_elems for rank in carried) * len(neighbours),
    )
    return across, around, [Piece(start, n, wire[rank]) for rank, (start, n) in enumerate(cut)]


def _scatter(layout: Layout, job: Job, number: int) -> _ReduceScatter:
    """The exchanges that take contributions to porters inside the node, then partial sums to owners."""
    me, topology, cut = job.rank, job.topology, job.cuts[number]
    node = topology.node_of_rank[me]
    locals_ = topology.ranks_of_node[node]
    neighbours = [rank for rank in locals_ if rank != me]
    mine = topology.carried_by(me)
    first = [job.intra_codec.nbytes(extent.n_elems) for extent in cut]
    second = [job.codec.nbytes(extent.n_elems) for extent in cut]

    sent: dict[int, int] = {}  # shard -> offset of this rank's contribution
    for neighbour in neighbours:
        for shard in topology.carried_by(neighbour):
            sent[shard] = layout.take(first[shard])
    own = {shard: layout.reuse(f"own contribution to {shard}", first[shard]) for shard in mine}
    came = {me: own}  # rank of the node -> shard -> offset of its contribution
    for neighbour in neighbours:
        came[neighbour] = {rank: layout.take(first[rank]) for rank in mine}
    inside = layout.route(
        [Message(peer, *_bundle(sent, first, topology.carried_by(peer))) for peer in neighbours],
        [Message(peer, *_bundle(came[peer], first, mine)) for peer in neighbours],
        n_elems_out=sum(cut[rank].n_elems for peer in neighbours for rank in topology.carried_by(peer)),
    )
    partial = [
        Sum(
            tuple(came[rank][shard] for rank in locals_),
            cut[shard].n_elems,
            start=-1,
            wire=layout.reuse(f"own partial sum {number % 2}", second[me])
            if shard == me
            else layout.take(second[shard]),
            first=cut[shard].start,
            hop=Hop.PARTIAL,
        )
        for shard in mine
    ]
    own_partial = partial[mine.index(me)].wire
    porters = {other: topology.porter(other, me) for other in range(topology.nodes) if other != node}
    arrived = [own_partial if other == node else layout.take(second[me]) for other in range(topology.nodes)]
    across = layout.route(
        [Message(shard, total.wire, second[shard]) for shard, total in zip(mine, partial, strict=True) if shard != me],
        [Message(peer, arrived[other], second[me]) for other, peer in porters.items()],
        n_elems_out=sum(cut[shard].n_elems for shard in mine if shard != me),
    )
    total = Sum(tuple(arrived), cut[me].n_elems, cut[me].start - job.shards[me].start, -1, cut[me].start, Hop.TOTAL)
    # A wire that cannot hold every node's partial sum of a mean it can hold: divide before the second hop, not after.
    finish_early = not job.codec.holds_sums
    return _ReduceScatter(
        job.codec,
        job.intra_codec,
        finish_early,
        [Piece(*cut[shard], wire) for shard, wire in sent.items()],
        inside,
        [Piece(*cut[shard], wire) for shard, wire in own.items()],
        partial,
        across,
        total,
    )


def _from_other_nodes(job: Job, porter: int) -> list[int]:
    """The ranks of other nodes whose data porter carries."""
    return [
        rank
        for rank in job.topology.carried_by(porter)
        if job.topology.node_of_rank[rank] != job.topology.node_of_rank[porter]
    ]


def _bundle(
    wire: dict[int, int],  # rank -> offset
    size: list[int],  # bytes, by rank
    ranks: tuple[int, ...] | list[int],  # that lie side by side
) -> tuple[int, int]:
    """Offset and bytes of neighbouring pieces sent as one message."""
    return (wire[ranks[0]], sum(size[rank] for rank in ranks)) if ranks else (0, 0)
