"""One call of a collective on its way: begun when its turn among the calls has come, completed here or in the worker.

To begin is to compare the call with other ranks', if it is new, to settle how it is done, to take its tags and to post
its first messages; to complete, to do the rest and bring the result into the caller's arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zcomm.collectives.agreement import swap
from zcomm.collectives.context import CallContext
from zcomm.collectives.kind import Kind
from zcomm.collectives.request import Request
from zcomm.collectives.run import Run
from zcomm.collectives.settle import Rows, Settled
from zcomm.collectives.stats import CollectiveStats
from zcomm.errors import MismatchError
from zcomm.streams import Lane, NoLane
from zcomm.work import Gate

if TYPE_CHECKING:
    from zcomm.collectives.conductor import Conductor


class Call:
    """A call that all ranks make. Keeps the caller's arrays, the group, and its conductor with tags and scratch, until
    dropped: other ranks wait for what this one has promised to send, though it may have destroyed the group since."""

    __slots__ = (
        "_conductor",
        "_context",
        "_group",
        "_request",
        "_run",
        "_stats",
        "_steps",
        "_turn",
        "kind",
        "number",
    )

    def __init__(
        self,
        conductor: Conductor,
        request: Request,
        kind: Kind,
        number: int,  # among the communicator's calls
    ) -> None:
        source, feedback = request.source, request.feedback
        self._turn = None if feedback is None else feedback.turn(source, conductor.lane)
        self._conductor = conductor
        self._group = conductor.transport.group
        self._request = request
        self.kind = kind
        self.number = number
        self._context = CallContext(
            conductor.transport, request.name, number, (source.n_elems, source.dtype, request.codec)
        )
        self._run = Run(source, request.target, kind.finish, conductor.seed, number)
        self._stats = stats = conductor.stats[request.name]
        stats.calls += 1
        if kind.settled is not None:
            _count(stats, kind.settled)

    @property
    def has_turn(self) -> bool:
        """Whether no earlier call uses its residual."""
        return self._turn is None or self._turn.is_free

    @property
    def has_room(self) -> bool:
        """Whether there is room for its scratch beside that of calls in flight."""
        settled = self.kind.settled
        return settled is None or self._conductor.scratch.has_room(settled.schedule.scratch_bytes)

    def begin(self) -> None:
        """Compare, settle, take tags, post the first messages. To be done in the order of the calls."""
        conductor, kind, turn = self._conductor, self.kind, self._turn
        try:
            with self._context, conductor.lane.entered():
                conductor.agree(self._request, self.number, kind.fingerprint)
                settled = kind.settled
                if settled is None:
                    settled = conductor.kinds.settle(self._request, self._swap_counts())
                    _count(self._stats, settled)
                schedule, engine, _ = settled
                if turn is not None:
                    engine = turn.take(engine, self._request.source)
                tags = conductor.take_tags(schedule.n_tags, kind.fingerprint)
                self._steps = conductor.steps_begun
                self._run.begin(
                    schedule, engine, conductor.scratch, conductor.transport, tags, conductor.plan.timeout_s
                )
        except BaseException:
            self._end_turn()
            raise

    def complete(self) -> Gate | None:
        """Do the rest and bring the result into the caller's arrays; the point of the lane where it is there."""
        run, stats, lane = self._run, self._stats, self._conductor.lane
        try:
            with self._context, lane.entered():
                run.complete()
                stats.codec_s += run.codec_s
                stats.wait_s += run.wait_s
                self._conductor.steps_ended = self._steps
                return deliver(self._request, lane)
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end()

    def _swap_counts(self) -> Rows:
        """What each rank of this node sends to every rank."""
        conductor, request, ranks = self._conductor, self._request, self.kind.tellers
        transport = conductor.transport
        own = np.array(request.counts, np.int64)
        self._stats.wire_bytes_intra += own.nbytes * (len(ranks) - 1)
        rows = swap(transport, own, ranks, conductor.take_tags(1, 0)[0], conductor.plan.timeout_s)
        sends = {rank: tuple(row) for rank, row in zip(ranks, rows.tolist(), strict=True)}
        me = transport.rank
        for rank, row in sends.items():
            if row[me] != request.counts_in[rank]:
                raise MismatchError(
                    f"{request.name} of {transport.group_name}: rank {rank} sends {row[me]} elements to rank "
                    f"{me}, which expects {request.counts_in[rank]}; give splits that match"
                )
        return sends


def deliver(
    request: Request,
    lane: Lane | NoLane,  # entered
) -> Gate | None:
    """Bring the result into the caller's arrays; the point of the lane where it is there."""
    if request.deliver is not None:
        request.deliver()
    return lane.gate(request.source.owner, request.target.owner, behind=request.deliver)


def _count(stats: CollectiveStats, settled: Settled) -> None:
    schedule, reason = settled.schedule, settled.uncompressed
    stats.raw_bytes += schedule.raw_bytes
    stats.wire_bytes_intra += schedule.wire_bytes_intra
    stats.wire_bytes_inter += schedule.wire_bytes_inter
    if reason:
        stats.uncompressed[reason] = stats.uncompressed.get(reason, 0) + 1
