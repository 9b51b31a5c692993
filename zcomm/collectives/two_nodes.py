"""All-reduce between two nodes of equal size in three exchanges, one fewer than in two hops, for short messages.

Each rank of a node carries one slice of the array. It adds up its node's contributions to that slice, swaps the sum
with the rank that carries the slice on the other node, and hands both sums to its neighbours; everybody adds the two.
As many bytes cross between the nodes as in two hops, since a node sends its sum once; inside a node half as many more
travel, and every rank decodes both sums. Quantized twice, where two hops quantize three times. Partial sums are formed
in rank order, then added in node order, as in two hops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zcomm.collectives.schedule import Hop, Job, Layout, Message, Piece, Route, Schedule, Steps, Sum
from zcomm.collectives.shards import balanced_shards
from zcomm.wire.codec import Codec


class _Swap(NamedTuple):
    codec: Codec
    intra_codec: Codec
    finish_early: bool
    sent: list[Piece]  # contributions to the slices that neighbours carry
    inside: Route
    own: Piece  # contribution to the slice that this rank carries
    partial: Sum  # the node's, of that slice
    across: Route
    around: Route
    totals: list[Sum]  # of both nodes, by slice

    def steps(self, run: Steps) -> Iterator[Route]:
        """1. Encode a contribution to every slice and send it to the slice's carrier on this node. 2. Encode that to
        the own slice; add it and what came, in rank order, encode the sum and send it to the carrier on the other node.
        3. Hand both nodes' sums to the neighbours. 4. Add them, in node order."""
        run.encode(self.intra_codec, self.sent)
        run.send(self.inside)
        yield self.inside
        run.encode(self.intra_codec, (self.own,))
        run.reduce_encode(self.intra_codec, (self.partial,), self.codec, finish=self.finish_early)
        run.send(self.across)
        yield self.across
        run.send(self.around)
        yield self.around
        run.reduce(self.codec, self.totals, finish=not self.finish_early)


def all_reduce(job: Job) -> Schedule:
    """Schedule of an all-reduce of the elements of job.shards together, in one chunk."""
    layout, topology = Layout(job.rank, job.topology, job.itemsize), job.topology
    node = topology.node_of_rank[job.rank]
    carriers, far_carriers = topology.ranks_of_node[node], topology.ranks_of_node[1 - node]
    mine = carriers.index(job.rank)
    others = [index for index in range(len(carriers)) if index != mine]
    slices = balanced_shards(sum(extent.n_elems for extent in job.shards), len(carriers))
    start, n_elems = slices[mine]
    first = [job.intra_codec.nbytes(extent.n_elems) for extent in slices]
    second = [job.codec.nbytes(extent.n_elems) for extent in slices]

    sent = {index: Piece(*slices[index], layout.take(first[index])) for index in others}
    came = [layout.take(first[mine]) for _ in carriers]
    inside = layout.route(
        [Message(carriers[index], sent[index].wire, first[index]) for index in others],
        [Message(carriers[index], came[index], first[mine]) for index in others],
        n_elems_out=sum(slices[index].n_elems for index in others),
    )
    # A slice's two sums lie side by side, so that they travel as one message.
    sums = [(at := layout.take(2 * nbytes), at + nbytes) for nbytes in second]
    across = layout.route(
        [Message(far_carriers[mine], sums[mine][node], second[mine])],
        [Message(far_carriers[mine], sums[mine][1 - node], second[mine])],
        n_elems_out=n_elems,
    )
    around = layout.route(
        [Message(carriers[index], sums[mine][0], 2 * second[mine]) for index in others],
        [Message(carriers[index], sums[index][0], 2 * second[index]) for index in others],
        n_elems_out=2 * n_elems * len(others),
    )
    swap = _Swap(
        job.codec,
        job.intra_codec,
        not job.codec.holds_sums,  # as in two hops: divide before what cannot hold a sum of all ranks
        list(sent.values()),
        inside,
        Piece(start, n_elems, came[mine]),
        Sum(tuple(came), n_elems, -1, sums[mine][node], start, Hop.PARTIAL),
        across,
        around,
        [Sum(pair, n, at, -1, at, Hop.TOTAL) for pair, (at, n) in zip(sums, slices, strict=True)],
    )
    return layout.schedule([swap])
