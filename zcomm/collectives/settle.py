"""Which schedule and engine serve a call: worked out once for each shape, from facts that all its ranks share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zcomm.collectives import all_to_all, flat, hierarchical, two_nodes
from zcomm.collectives.choice import Way, choose, way_of
from zcomm.collectives.request import Pattern, Request
from zcomm.collectives.schedule import Job, Schedule
from zcomm.collectives.shards import balanced_shards, chunks, shards_of
from zcomm.engines.engine import Engine
from zcomm.engines.select import engine_for
from zcomm.plan import Plan
from zcomm.topology import Topology

MOST_CHUNKS = 256  # of one call: their steps must not use up the tags
_KEPT_SCHEDULES = 512
_BUILDERS: dict[tuple[Pattern, Way], Callable[[Job], Schedule]] = {
    (Pattern.ALL_GATHER, Way.ONE_EXCHANGE): flat.all_gather,
    (Pattern.ALL_GATHER, Way.ONE_HOP): flat.all_gather,
    (Pattern.ALL_GATHER, Way.TWO_HOPS): hierarchical.all_gather,
    (Pattern.REDUCE_SCATTER, Way.ONE_EXCHANGE): flat.reduce_scatter,
    (Pattern.REDUCE_SCATTER, Way.ONE_HOP): flat.reduce_scatter,
    (Pattern.REDUCE_SCATTER, Way.TWO_HOPS): hierarchical.reduce_scatter,
    (Pattern.ALL_REDUCE, Way.ONE_EXCHANGE): flat.one_shot_all_reduce,
    (Pattern.ALL_REDUCE, Way.ONE_HOP): flat.all_reduce,
    (Pattern.ALL_REDUCE, Way.TWO_NODES): two_nodes.all_reduce,
    (Pattern.ALL_REDUCE, Way.TWO_HOPS): hierarchical.all_reduce,
}

Rows = Mapping[int, tuple[int, ...]]  # rank of this node -> elements that it sends to each rank


class Settled(NamedTuple):
    """How a call is done, and why it sends raw bytes where another codec was asked for."""

    schedule: Schedule
    engine: Engine
    uncompressed: str | None


class Settler:
    """The schedules of one communicator."""

    def __init__(self, plan: Plan, topology: Topology, rank: int, device: str) -> None:
        self._plan = plan
        self._topology = topology
        self._rank = rank
        self._device = device
        self._two_hops = plan.hierarchical and topology.has_two_levels
        self._kept: OrderedDict[tuple[Any, ...], Settled] = OrderedDict()

    def ranks_that_tell(self, request: Request) -> tuple[int, ...]:
        """The ranks that swap their counts before a call can be settled, this one among them; mostly none."""
        if request.pattern is Pattern.ALL_TO_ALL and self._two_hops:
            return self._topology.ranks_of_node[self._topology.node_of_rank[self._rank]]
        return ()

    def settle(
        self,
        request: Request,
        rows: Rows,  # of ranks_that_tell
    ) -> Settled:
        """How a call is done."""
        key = (
            request.pattern,
            request.counts,
            request.counts_in,
            tuple(rows.values()),
            request.source.dtype,
            request.codec,
            request.intra_codec,
        )
        settled = self._kept.get(key)
        if settled is None:
            settled = self._kept[key] = self._build(request, rows)
            if len(self._kept) > _KEPT_SCHEDULES:
                self._kept.popitem(last=False)
        return settled

    def clear(self) -> None:
        """Forget all schedules."""
        self._kept.clear()

    def _build(self, request: Request, rows: Rows) -> Settled:
        plan, topology, counts = self._plan, self._topology, request.counts
        codec, intra_codec, uncompressed = choose(plan, topology, request)
        itemsize = request.source.dtype.itemsize
        if request.counts_differ:
            parts = all_to_all.Parts(
                self._rank, topology, counts, request.counts_in, rows, plan.chunk_elems, codec, intra_codec, itemsize
            )
            schedule = all_to_all.two_hops(parts) if rows else all_to_all.one_hop(parts)
        else:
            all_reduce = request.pattern is Pattern.ALL_REDUCE
            shards = balanced_shards(counts[0], topology.size) if all_reduce else shards_of(counts)
            at_least = -(-sum(extent.n_elems for extent in shards) // MOST_CHUNKS)
            blocks = [codec.block, intra_codec.block]
            cuts = chunks(shards, max(plan.chunk_elems, at_least), blocks)
            build = _BUILDERS[request.pattern, way_of(plan, topology, request.pattern, codec, counts)]
            schedule = build(Job(self._rank, topology, shards, cuts, codec, intra_codec, itemsize))
        return Settled(schedule, engine_for(self._device, codec, intra_codec), uncompressed)
