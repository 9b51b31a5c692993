"""The order of one communicator's calls: which begins when and where, which tags it has, whether it is compared.

Calls are done one after another, each by itself (call.py); an asynchronous one sends its first messages at once and
goes on in the communicator's own thread.

[Note: deferred calls] Ranks compare a call that is new before its bytes move, and that waits for the slowest rank; so
does a node's swap of counts before an all-to-all in two hops. An asynchronous call that must wait begins in the worker,
and so do all calls after it until it has begun: tags are taken in the order of calls on every rank, whichever of them
happened to wait. So does a call whose residual an earlier call still uses, or that would need more scratch beside those
in flight than the plan allows: that is decided on each rank alone, as it changes when bytes move, not which. And so
does one that would begin while calls in flight have half of the tags: they are used again and again, and its first
messages must not be taken for the last ones of a call before.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict
from functools import partial

from zcomm.buffers import copy_memory
from zcomm.collectives.agreement import agree_on_call, agree_on_settings
from zcomm.collectives.call import Call, deliver
from zcomm.collectives.context import CallContext
from zcomm.collectives.kind import Kinds, finish_of
from zcomm.collectives.request import Request
from zcomm.collectives.run import RANK_SHIFT, SEED_BITS
from zcomm.collectives.scratch import ScratchPool
from zcomm.collectives.settle import Settler
from zcomm.collectives.stats import CollectiveStats, Stats
from zcomm.engines.select import engine_for
from zcomm.errors import BufferError, GroupError, TransportError
from zcomm.plan import Check, Plan
from zcomm.streams import lane_for
from zcomm.topology import Topology
from zcomm.transports.tags import TAGS_PER_COMMUNICATOR
from zcomm.transports.transport import Transport
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
        self.stats: Stats = defaultdict(CollectiveStats)
        self.lane = lane_for(transport.device)
        self.scratch = ScratchPool(transport, plan.scratch_bytes)
        self.hang_up = getattr(transport, "hang_up", None) if getattr(transport, "hangs_up", False) else None  # gloo's
        self._worker = Worker(f"zcomm worker of rank {transport.rank}, {transport.group_name}", self.hang_up)
        self._lock = threading.Lock()  # one call is settled and begun at a time
        self._agreed: OrderedDict[int, None] = OrderedDict()  # fingerprints of calls that were compared
        self._calls = 0
        self._next_step = 1  # the first step's tags are for cards of new communicators
        self.steps_begun = 0  # in total, by all calls so far
        self.steps_ended = 0  # those up to the last call that is complete
        self._deferred = 0  # calls that have yet to begin in the worker
        self._closed = False
        weakref.finalize(self, self._worker.stop)
        with CallContext(transport, "making a communicator", 0, None), self.lane.entered():
            self.topology, self._first_tag, salt = agree_on_settings(transport, plan, topology)
        self.seed = (plan.seed + salt) % (1 << SEED_BITS) | transport.rank << RANK_SHIFT
        self._give_back_tags = weakref.finalize(self, transport.tags.give_back, self._first_tag)
        self.point_to_point_tag = self._first_tag + (_STEPS << FINGERPRINT_BITS)
        self._settler = Settler(plan, self.topology, transport.rank, transport.device)
        self.kinds = Kinds(self._settler, transport.size)

    def call(self, request: Request, async_op: bool) -> Work | None:
        """Do a call: here, or in the worker if it is asynchronous or others are before it."""
        self._check_callable(request, async_op)
        with self._lock:
            self.check_open()
            if self.transport.size == 1:
                return self._alone(request, async_op)
            call = Call(self, request, self.kinds.of(request), self._calls + 1)
            self._calls += 1
            self.lane.follow(request.source.owner, request.target.owner)
            if self.transport.queued:  # on the GPU; nothing is left for the worker
                call.begin()
                return done_or_queued(call.complete(), async_op)
            idle = self._worker.idle  # then no call is in flight
            if self._must_wait(call, async_op, idle):
                self._deferred += 1
                work = Work(partial(self._begin_and_complete, call))
            else:
                call.begin()
                if idle and not async_op:
                    return done_or_queued(call.complete(), async_op)
                work = Work(call.complete)
            self._worker.submit(work)
        if async_op:
            return work
        work.wait()
        return None

    def _must_wait(self, call: Call, async_op: bool, idle: bool) -> bool:
        """Whether a call begins in the worker. See [Note: deferred calls]."""
        if self._deferred or not call.has_turn or not (idle or call.has_room):
            return True
        if not idle and self.steps_begun - self.steps_ended > _STEPS // 2:
            return True
        return async_op and (bool(call.kind.tellers) or self._is_new(call.kind.fingerprint))

    def _begin_and_complete(self, call: Call) -> Gate | None:
        try:
            call.begin()
        finally:
            self._deferred -= 1
        return call.complete()

    def agree(self, request: Request, number: int, fingerprint: int) -> None:
        """Compare a call with other ranks' if it is new. Raises MismatchError on every rank if they differ."""
        if self._is_new(fingerprint):
            agree_on_call(self.transport, request, number, self.take_tags(1, 0)[0], self.plan.timeout_s)
            self._agreed[fingerprint] = None  # only now: ranks that disagreed must compare again
            if len(self._agreed) > _KEPT_AGREEMENTS:
                self._agreed.popitem(last=False)

    def take_tags(self, count: int, fingerprint: int) -> range:
        """Tags of count steps: equal on ranks that made the same calls so far and make the same one now."""
        if self._next_step + count > _STEPS:
            self._next_step = 1
        first = self._first_tag + (self._next_step << FINGERPRINT_BITS)
        self._next_step += count
        self.steps_begun += count
        low = fingerprint & ((1 << FINGERPRINT_BITS) - 1)
        return range(first + low, first + (count << FINGERPRINT_BITS), 1 << FINGERPRINT_BITS)

    def _check_callable(self, request: Request, async_op: bool) -> None:
        """Raise what says why a call cannot be made, before the lock, which may be held for it for ever."""
        self._worker.check_not_forked()  # where a thread of the parent may have held the lock
        if async_op:
            self.check_asynchronous(request.name)
        elif self.runs_here:
            raise GroupError(
                f"{request.name} was called from a callback of this communicator's own worker and would wait for "
                "itself; pass async_op=True"
            )
        if request.feedback is not None and not hasattr(request.feedback, "turn"):
            raise BufferError(
                f"feedback must be the residual of a tensor, Feedback().of(key), got {request.feedback!r}"
            )

    def check_open(self) -> None:
        """Raise GroupError after close, after the end of the group, and in the child of a fork."""
        self._worker.check_not_forked()
        if self._closed:
            raise GroupError(f"this communicator over {self.transport.group_name} is closed; make a new one")
        _ = self.transport.group

    def check_asynchronous(self, name: str) -> None:
        """Raise TransportError where a call cannot go on in a thread of its own."""
        if self.transport.why_synchronous is not None:
            raise TransportError(f"{name}: {self.transport.why_synchronous}")

    @property
    def runs_here(self) -> bool:
        """Whether this is its worker's thread, in a callback."""
        return self._worker.runs_here

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
        self.kinds.clear()

    def _alone(self, request: Request, async_op: bool) -> Work | None:
        """World of one rank: the input itself, times PREMUL_SUM's factor; nothing is encoded."""
        source, target, finish = request.source, request.target, finish_of(request.operator, 1)
        stats = self.stats[request.name]
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
            gate = deliver(request, self.lane)
        return done_or_queued(gate, async_op)

    def _is_new(self, fingerprint: int) -> bool:
        """Whether the plan asks for this call to be compared; alike on ranks that have made the same calls."""
        check = self.plan.check
        return check is Check.ALWAYS or (check is Check.FIRST and fingerprint not in self._agreed)


def done_or_queued(gate: Gate | None, async_op: bool) -> Work | None:
    """What the caller of a call gets that is done, or on a GPU is queued: a Work, or a stream that waits for it."""
    if async_op:
        return Work(None, gate)
    if gate is not None:
        gate.lead()
    return None
