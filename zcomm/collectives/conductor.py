"""Carries the calls of one communicator out, in order: settle, compare, begin, complete.

What a call needs is settled from facts that all ranks share, so every rank settles alike. Calls are done one after
another; an asynchronous one sends its first messages at once and goes on in the communicator's own thread.

[Note: deferred calls] Ranks compare a call that is new before its bytes move, and that waits for the slowest rank; so
does a node's swap of counts before an all-to-all in two hops. An asynchronous call that must wait begins in the worker,
and so do all calls after it until it has begun: tags are taken in the order of calls on every rank, whichever of them
happened to wait. So does a call whose residual an earlier call still uses, or that would need more scratch beside those
in flight than the plan allows: that is decided on each rank alone, as it changes when bytes move, not which.
"""

from __future__ import annotations

import json
import threading
import weakref
import zlib
from collections import OrderedDict
from functools import lru_cache

import numpy as np

from zcomm.buffers import DType, copy_memory
from zcomm.collectives.agreement import agree_on_settings, compare, compare_splits, exchange, swap
from zcomm.collectives.context import CallContext
from zcomm.collectives.request import Request
from zcomm.collectives.run import RANK_SHIFT, SEED_BITS, Run
from zcomm.collectives.scratch import ScratchPool
from zcomm.collectives.settle import Rows, Settled, Settler
from zcomm.collectives.stats import CollectiveStats, Stats
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.engines.select import engine_for
from zcomm.errors import BufferError, GroupError, MismatchError, TransportError
from zcomm.plan import Check, Plan
from zcomm.reduce_op import ReduceOp
from zcomm.streams import lane_for
from zcomm.topology import Topology
from zcomm.transports.tags import TAGS_PER_COMMUNICATOR
from zcomm.transports.transport import Transport
from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec as parse_codec
from zcomm.work import Gate, Work, Worker

FINGERPRINT_BITS = 10  # of a tag; the chance that two different calls are not told apart is 2^-10
_KEPT_AGREEMENTS = 4096
_STEPS = TAGS_PER_COMMUNICATOR >> (FINGERPRINT_BITS + 1)  # tags of collectives
POINT_TO_POINT_STEPS = _STEPS  # and as many of messages between two ranks


class Conductor:
    """One communicator's calls, from the request to the result."""

    def __init__(self, transport: Transport, plan: Plan, topology: Topology | None) -> None:
        self.transport = transport
        self.plan = plan
        self.stats: Stats = {}
        self.lane = lane_for(transport.device)
        self.scratch = ScratchPool(transport, plan.scratch_bytes)
        self._worker = Worker(f"zcomm worker of rank {transport.rank}, {transport.group_name}")
        self._lock = threading.Lock()  # one call is settled and begun at a time
        self._agreed: OrderedDict[int, None] = OrderedDict()  # fingerprints of calls that were compared
        self._calls = 0
        self._steps_taken = 1  # the first step's tags are for cards of new communicators
        self._deferred = 0  # calls that have yet to begin in the worker
        self._closed = False
        weakref.finalize(self, self._worker.stop)
        with CallContext(transport, "making a communicator", 0, None), self.lane.entered():
            self.topology, self._first_tag, salt = agree_on_settings(transport, plan, topology)
        self.seed = (plan.seed + salt) % (1 << SEED_BITS) | transport.rank << RANK_SHIFT
        self._give_back_tags = weakref.finalize(self, transport.tags.give_back, self._first_tag)
        self.point_to_point_tag = self._first_tag + (_STEPS << FINGERPRINT_BITS)
        self._settler = Settler(plan, self.topology, transport.rank, transport.device)

    def call(self, request: Request, async_op: bool) -> Work | None:
        """Do a call: here, or in the worker if it is asynchronous or others are before it."""
        transport, plan = self.transport, self.plan
        self._worker.check_not_forked()  # before the lock, which a thread of the parent may have held
        if not async_op and self._worker.runs_here:
            raise GroupError(
                f"{request.name} was called from a callback of this communicator's own worker and would wait for "
                "itself; pass async_op=True"
            )
        if async_op:
            self.check_asynchronous(request.name)
        name, source, feedback = request.name, request.source, request.feedback
        if feedback is not None and not hasattr(feedback, "turn"):
            raise BufferError(f"feedback must be the residual of a tensor, Feedback().of(key), got {feedback!r}")
        finish = _finish(request.operator, transport.size)
        with self._lock:
            self.check_open()
            if transport.size == 1:
                return self._alone(request, finish, async_op)
            tellers = self._settler.ranks_that_tell(request)
            settled = None if tellers else self._settler.settle(request, {})
            turn = feedback.turn(source, self.lane) if feedback is not None else None
            self._calls += 1
            number = self._calls
            stats = self.stats.setdefault(name, CollectiveStats())
            stats.calls += 1
            if settled is not None:
                _count(stats, settled)
            context = CallContext(transport, name, number, (source.n_elems, source.dtype, request.codec))
            run = Run(source, request.target, finish, self.seed, number)
            fingerprint = _fingerprint(name, request.shared, source.dtype, request.codec, request.operator)

            def begin() -> None:
                try:
                    with context, self.lane.entered():
                        self._agree(request, number, fingerprint)
                        found = settled
                        if found is None:
                            found = self._settler.settle(request, self._swap_counts(request, tellers, stats))
                            _count(stats, found)
                        engine = found.engine if turn is None else turn.take(found.engine, source)
                        tags = self._take_tags(found.schedule.n_tags, fingerprint)
                        run.begin(found.schedule, engine, self.scratch, transport, tags, plan.timeout_s)
                except BaseException:
                    if turn is not None:
                        turn.end()
                    raise

            def complete() -> Gate | None:
                try:
                    with context, self.lane.entered():
                        run.complete()
                finally:
                    if turn is not None:
                        turn.end()
                stats.codec_s += run.codec_s
                stats.wait_s += run.wait_s
                return self._deliver(request)

            def begin_and_complete() -> Gate | None:
                try:
                    begin()
                finally:
                    self._deferred -= 1
                return complete()

            self.lane.follow(source.owner, request.target.owner)
            if transport.queued:  # on the GPU; nothing is left for the worker
                begin()
                return done_or_queued(complete(), async_op)
            behind = turn is not None and not turn.is_free
            behind |= settled is not None and not self.scratch.has_room(settled.schedule.scratch_bytes)
            waits = bool(tellers) or self._is_new(fingerprint)
            if self._deferred or behind or (async_op and waits):  # see [Note: deferred calls]
                self._deferred += 1
                work = Work(begin_and_complete)
            else:
                in_order = self._worker.idle
                begin()
                if in_order and not async_op:
                    return done_or_queued(complete(), async_op)
                work = Work(complete)
            self._worker.submit(work)
        if async_op:
            return work
        work.wait()
        return None

    def check_open(self) -> None:
        """Raise GroupError after close, and in the child of a fork."""
        self._worker.check_not_forked()
        if self._closed:
            raise GroupError(f"this communicator over {self.transport.group_name} is closed; make a new one")

    def check_asynchronous(self, name: str) -> None:
        """Raise TransportError where a call cannot go on in a thread of its own."""
        if self.transport.why_synchronous is not None:
            raise TransportError(f"{name}: {self.transport.why_synchronous}")

    def close(self) -> None:
        """Finish what is under way, free scratch and thread. In the child of a fork nothing is: all is the parent's."""
        if self._worker.is_forked:
            return
        with self._lock:
            self._closed = True
        self._worker.close()
        if not self.transport.tags.frozen:  # else a call has failed, and what it queued may never be done
            self.lane.close(self.plan.timeout_s)
        self.scratch.clear()
        self._give_back_tags()
        self._settler.clear()

    def _alone(self, request: Request, finish: Finish, async_op: bool) -> Work | None:
        """World of one rank: the input itself, times PREMUL_SUM's factor; nothing is encoded."""
        source, target = request.source, request.target
        stats = self.stats.setdefault(request.name, CollectiveStats())
        stats.calls += 1
        stats.uncompressed["a world of one rank"] = stats.calls
        self.lane.follow(source.owner, target.owner)
        with self.lane.entered():
            if finish.factor == 1.0:
                copy_memory(source, target)
            else:
                raw = parse_codec("raw").for_dtype(source.dtype)
                wire = self.transport.address(memory := self.transport.empty(raw.nbytes(source.n_elems)))
                engine = engine_for(self.transport.device, raw)
                engine.encode(raw, source.address, source.n_elems, source.dtype, wire)
                engine.reduce(raw, [wire], source.n_elems, finish, target.address, target.dtype)
                del memory
        return done_or_queued(self._deliver(request), async_op)

    def _deliver(self, request: Request) -> Gate | None:
        """Bring the result into the caller's arrays; the point of the lane where it is there."""
        with self.lane.entered():
            if request.deliver is not None:
                request.deliver()
            return self.lane.gate(request.source.owner, request.target.owner, behind=request.deliver)

    def _swap_counts(self, request: Request, ranks: tuple[int, ...], stats: CollectiveStats) -> Rows:
        """What each rank of this node sends to every rank."""
        own = np.array(request.counts, np.int64)
        stats.wire_bytes_intra += own.nbytes * (len(ranks) - 1)
        rows = swap(self.transport, own, ranks, self._take_tags(1, 0)[0], self.plan.timeout_s)
        sends = {rank: tuple(row) for rank, row in zip(ranks, rows.tolist(), strict=True)}
        me = self.transport.rank
        for rank, row in sends.items():
            if row[me] != request.counts_in[rank]:
                raise MismatchError(
                    f"{request.name} of {self.transport.group_name}: rank {rank} sends {row[me]} elements to rank "
                    f"{me}, which expects {request.counts_in[rank]}; give splits that match"
                )
        return sends

    def _is_new(self, fingerprint: int) -> bool:
        """Whether the plan asks for this call to be compared; alike on ranks that have made the same calls."""
        check = self.plan.check
        return check is Check.ALWAYS or (check is Check.FIRST and fingerprint not in self._agreed)

    def _agree(self, request: Request, number: int, fingerprint: int) -> None:
        """Raise MismatchError, on every rank, unless all ranks are making this same call."""
        if not self._is_new(fingerprint):
            return
        counts = () if request.counts_differ else request.counts
        equal = len(set(counts)) == 1
        card = {
            "call number": str(number),
            "collective": request.name,
            "count": str(counts[0] if equal else counts),
            "dtype": request.source.dtype.spelling,
            "codec": str(request.codec),
            "op": str(request.operator),
            "root": str(request.root),
        }
        if request.counts_differ:
            card |= {"sends": json.dumps(request.counts), "receives": json.dumps(request.counts_in)}
        cards = exchange(self.transport, card, self._take_tags(1, 0)[0], self.plan.timeout_s)
        where = f"call {number} of {self.transport.group_name}"
        compare(cards, ("call number", "collective", "count", "dtype", "codec", "op", "root"), where)
        if request.counts_differ:
            compare_splits(cards, where)
        self._agreed[fingerprint] = None  # only now: ranks that disagreed must compare again
        if len(self._agreed) > _KEPT_AGREEMENTS:
            self._agreed.popitem(last=False)

    def _take_tags(self, count: int, fingerprint: int) -> range:
        """Tags of count steps: equal on ranks that made the same calls so far and make the same one now."""
        if self._steps_taken + count > _STEPS:
            self._steps_taken = 1
        first = self._steps_taken
        self._steps_taken += count
        low = fingerprint & ((1 << FINGERPRINT_BITS) - 1)
        return range(
            self._first_tag + (first << FINGERPRINT_BITS) + low,
            self._first_tag + ((first + count) << FINGERPRINT_BITS),
            1 << FINGERPRINT_BITS,
        )


@lru_cache(maxsize=4096)
def _fingerprint(name: str, counts: tuple[int, ...], dtype: DType, codec: Codec, operator: ReduceOp | None) -> int:
    """Goes into the tags of a call: ranks that call differently never receive each other's bytes, they time out."""
    return zlib.crc32(repr((name, counts, dtype, codec, operator)).encode())


def done_or_queued(gate: Gate | None, async_op: bool) -> Work | None:
    """What the caller of a call gets that is done, or on a GPU is queued: a Work, or a stream that waits for it."""
    if async_op:
        return Work(None, gate)
    if gate is not None:
        gate.lead()
    return None


def _count(stats: CollectiveStats, settled: Settled) -> None:
    schedule, reason = settled.schedule, settled.uncompressed
    stats.raw_bytes += schedule.raw_bytes
    stats.wire_bytes_intra += schedule.wire_bytes_intra
    stats.wire_bytes_inter += schedule.wire_bytes_inter
    if reason:
        stats.uncompressed[reason] = stats.uncompressed.get(reason, 0) + 1


def _finish(operator: ReduceOp | None, size: int) -> Finish:
    if operator is None or operator.name == "SUM":
        return NO_FINISH
    if operator.name == "AVG":
        return Finish(divisor=float(size))
    return Finish(factor=operator.factor)
