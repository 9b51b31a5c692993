"""The collectives of one group: where codec, engine, transport and schedule meet.

Every call is collective: all ranks of the group make the same calls in the same order with the same codec, operator and
counts. Arguments are checked before any byte moves. Calls on one communicator are done in order; an asynchronous call
posts its first messages at once and goes on in the communicator's own thread.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

from zcomm.buffers import DType, Span, copy_back, copy_memory
from zcomm.collectives import flat, hierarchical
from zcomm.collectives.agreement import agree_on_settings, compare, exchange
from zcomm.collectives.arguments import check_output, check_overlap, check_writable, flattened
from zcomm.collectives.run import Run
from zcomm.collectives.schedule import Job, Schedule
from zcomm.collectives.scratch import ScratchPool
from zcomm.collectives.shards import balanced_shards, chunks, equal_shards
from zcomm.collectives.stats import CollectiveStats, Stats
from zcomm.engines.engine import NO_FINISH, Engine, Finish
from zcomm.engines.select import engine_for
from zcomm.errors import BufferError, GroupError, TransportError
from zcomm.plan import Plan, plan_of
from zcomm.reduce_op import ReduceOp, reduce_op
from zcomm.topology import Topology
from zcomm.transports.open import open_transport
from zcomm.transports.transport import TAGS_PER_COMMUNICATOR, Transport
from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec as parse_codec
from zcomm.work import Work, Worker

FINGERPRINT_BITS = 10  # of a tag; the chance that two different calls are not told apart is 2^-10
_KEPT_SCHEDULES = 512
_KEPT_AGREEMENTS = 4096
_BUILDERS: dict[tuple[str, bool], Callable[[Job], Schedule]] = {
    ("all_gather", False): flat.all_gather,
    ("all_gather", True): hierarchical.all_gather,
    ("reduce_scatter", False): flat.reduce_scatter,
    ("reduce_scatter", True): hierarchical.reduce_scatter,
    ("all_reduce", False): flat.all_reduce,
    ("all_reduce", True): hierarchical.all_reduce,
}


class _Settled(NamedTuple):
    """Which schedule and engine serve a call, and why it sends raw bytes where another codec was asked for."""

    schedule: Schedule
    engine: Engine
    uncompressed: str | None


class Communicator:
    """Collectives over the ranks of one group.

    Steps of construction: 1. open a transport over the group; 2. compare version, plan and topology, so that ranks that
    disagree fail here, on every rank, with the odd rank and field named; 3. learn the topology.
    """

    def __init__(
        self,
        group: Any = None,  # a torch ProcessGroup or 1-D DeviceMesh, a zcomm transport; None: torch's default group
        plan: Plan | Codec | str = Plan(),  # noqa: B008 - a frozen value
        topology: Topology | None = None,  # None: the launcher's node numbers and the host names tell
    ) -> None:
        self.plan = plan_of(plan)
        self._transport: Transport = open_transport(group)
        self.rank = self._transport.rank
        self.size = self._transport.size
        if topology is not None:
            topology.check_size(self.size)
        self._scratch = ScratchPool(self._transport, self.plan.scratch_bytes)
        self._worker = Worker(f"zcomm worker of rank {self.rank}, {self._transport.group_name}")
        self._lock = threading.Lock()  # one call is settled and begun at a time
        self._schedules: OrderedDict[tuple[Any, ...], _Settled] = OrderedDict()
        self._stats: Stats = {}
        self._calls = 0
        self._first_tag = self._transport.new_tags()
        self._steps_taken = 0
        self._closed = False
        self._agreed: OrderedDict[int, None] = OrderedDict()  # fingerprints of calls that were compared
        with _Context(self, "greeting", 0, None, None):
            self.topology = agree_on_settings(self._transport, self.plan, topology, self._take_tags(1, 0)[0])

    def all_reduce(
        self,
        tensor: Any,  # any shape, float32, bfloat16, float16 or float64; overwritten with the result
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Sum or average tensor over all ranks, in place; bit-identical everywhere.

        Quantized once per hop: twice flat, three times in two hops (flat.py, hierarchical.py number the steps).
        """
        operator = reduce_op(op)
        span = flattened(tensor, "tensor", self._transport.device)
        check_writable(tensor, "tensor")
        return self._call("all_reduce", span, span, operator, codec, async_op, tensor)

    def all_gather_single(
        self,
        output: Any,  # size x input's elements, same dtype; written
        input: Any,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Gather every rank's input into output, in rank order; bit-identical everywhere.

        Quantized once. The own part of output too is what its bytes decode to. input may be that part of output.
        """
        source = flattened(input, "input", self._transport.device)
        target = flattened(output, "output", self._transport.device)
        check_writable(output, "output")
        check_output(target, source, self.size * source.n_elems, f"{self.size} ranks x {source.n_elems}")
        check_overlap(source, target, self.rank)
        return self._call("all_gather", source, target, None, codec, async_op, output)

    def reduce_scatter_single(
        self,
        output: Any,  # input's elements / size, same dtype; written
        input: Any,
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Sum or average input over all ranks and keep this rank's part, in rank order, in output.

        Quantized once per hop: once flat, twice in two hops. output may be this rank's part of input.
        """
        operator = reduce_op(op)
        source = flattened(input, "input", self._transport.device)
        target = flattened(output, "output", self._transport.device)
        check_writable(output, "output")
        if source.n_elems % self.size:
            raise BufferError(
                f"input has {source.n_elems} elements, which {self.size} ranks cannot share equally; "
                f"pad it to a multiple of {self.size}"
            )
        check_output(target, source, source.n_elems // self.size, f"{source.n_elems} / {self.size} ranks")
        check_overlap(target, source, self.rank)
        return self._call("reduce_scatter", source, target, operator, codec, async_op, output)

    def stats(self) -> Stats:
        """Calls, bytes and seconds of each collective on this rank so far."""
        return {name: stats + CollectiveStats() for name, stats in self._stats.items()}

    def reset_stats(self) -> None:
        """Count anew from here."""
        self._stats.clear()

    def close(self) -> None:
        """Finish what is under way, free scratch and thread. The group stays as it is."""
        self._closed = True
        self._worker.close()
        self._scratch.clear()
        self._schedules.clear()
        self._transport.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self._transport.group_name}, {self._transport.name}, {self.plan}>"

    def _call(
        self,
        name: str,
        source: Span,
        target: Span,
        operator: ReduceOp | None,
        codec: Codec | str | None,
        async_op: bool,
        output: Any,  # the caller's array; target is a copy of it where it is strided
    ) -> Work | None:
        """Settle how the call is done, begin it, and complete it here or in the worker."""
        if self._closed:
            raise GroupError(f"this communicator over {self._transport.group_name} is closed; make a new one")
        wanted = parse_codec(self.plan.codec if codec is None else codec)
        finish = _finish(operator, self.size)
        with self._lock:
            self._calls += 1
            context = _Context(self, name, self._calls, wanted, source)
            stats = self._stats.setdefault(name, CollectiveStats())
            stats.calls += 1
            if self.size == 1:
                stats.uncompressed["a world of one rank"] = stats.calls
                self._alone(source, target, finish)
                if target.owner is not output:
                    copy_back(target.owner, output)
                return Work(None) if async_op else None
            schedule, engine, uncompressed = self._settle(name, source, wanted)
            stats.raw_bytes += schedule.raw_bytes
            stats.wire_bytes_intra += schedule.wire_bytes_intra
            stats.wire_bytes_inter += schedule.wire_bytes_inter
            if uncompressed:
                stats.uncompressed[uncompressed] = stats.uncompressed.get(uncompressed, 0) + 1
            run = Run(schedule, engine, source, target, finish)

            def complete() -> None:
                with context:
                    run.complete()
                stats.codec_s += run.codec_s
                stats.wait_s += run.wait_s
                if target.owner is not output:
                    copy_back(target.owner, output)

            fingerprint = _fingerprint(name, source.n_elems, source.dtype, wanted, operator)
            in_order = self._worker.idle
            with context:
                if self._must_compare(fingerprint):
                    self._compare_call(name, source, wanted, operator)
                run.begin(
                    self._scratch,
                    self._transport,
                    self._take_tags(len(schedule.routes), fingerprint),
                    self.plan.timeout_s,
                )
            if in_order and not async_op:
                complete()
                return None
            work = Work(complete)
            self._worker.submit(work)
        if async_op:
            return work
        work.wait()
        return None

    def _alone(self, source: Span, target: Span, finish: Finish) -> None:
        """World of one rank: the input itself, times PREMUL_SUM's factor; nothing is encoded."""
        if finish.factor == 1.0:
            copy_memory(source, target)
            return
        raw = parse_codec("raw").for_dtype(source.dtype)
        wire = self._transport.address(memory := self._transport.empty(raw.nbytes(source.n_elems)))
        engine = engine_for(self._transport.device, raw)
        engine.encode(raw, source.address, source.n_elems, source.dtype, wire)
        engine.reduce(raw, [wire], source.n_elems, finish, target.address, target.dtype)
        del memory

    def _settle(self, name: str, source: Span, wanted: Codec) -> _Settled:
        """The schedule of a call, from facts that all ranks share: count, dtype, codec, plan and topology."""
        key = (name, source.n_elems, source.dtype, wanted)
        settled = self._schedules.get(key)
        if settled is None:
            settled = self._schedules[key] = self._build(name, source.n_elems, source.dtype, wanted)
            if len(self._schedules) > _KEPT_SCHEDULES:
                self._schedules.popitem(last=False)
        return settled

    def _build(self, name: str, n_elems: int, dtype: DType, wanted: Codec) -> _Settled:
        plan, uncompressed = self.plan, None
        codec = wanted.for_dtype(dtype)
        intra = codec if plan.intra_codec is None else parse_codec(plan.intra_codec).for_dtype(dtype)
        if n_elems < plan.min_elems and str(wanted) != "raw":
            codec = intra = parse_codec("raw").for_dtype(dtype)
            uncompressed = f"fewer than min_elems={plan.min_elems} elements"
        if name == "all_gather":
            shards = equal_shards(n_elems, self.size)
        elif name == "reduce_scatter":
            shards = equal_shards(n_elems // self.size, self.size)
        else:
            shards = balanced_shards(n_elems, self.size)
        cuts = chunks(shards, plan.chunk_elems, [getattr(one, "block", 1) for one in (codec, intra)])
        two_hops = plan.hierarchical and self.topology.has_two_levels
        job = Job(self.rank, self.topology, shards, cuts, codec, intra, dtype.itemsize)
        engine = engine_for(self._transport.device, codec, intra)
        return _Settled(_BUILDERS[name, two_hops](job), engine, uncompressed)

    def _must_compare(self, fingerprint: int) -> bool:
        """Whether the plan asks for this call to be compared; the same on ranks that have made the same calls."""
        if self.plan.check == "never" or (self.plan.check == "first" and fingerprint in self._agreed):
            return False
        self._agreed[fingerprint] = None
        if len(self._agreed) > _KEPT_AGREEMENTS:
            self._agreed.popitem(last=False)
        return True

    def _compare_call(self, name: str, source: Span, codec: Codec, operator: ReduceOp | None) -> None:
        """Raise MismatchError, on every rank, unless all ranks are making this same call."""
        card = {
            "call number": str(self._calls),
            "collective": name,
            "count": str(source.n_elems),
            "dtype": source.dtype.spelling,
            "codec": str(codec),
            "op": str(operator),
        }
        cards = exchange(self._transport, card, self._take_tags(1, 0)[0], self.plan.timeout_s)
        compare(cards, tuple(card), f"call {self._calls} of {self._transport.group_name}")

    def _take_tags(self, count: int, fingerprint: int) -> range:
        """Tags of count steps: equal on ranks that made the same calls so far and make the same one now."""
        steps = TAGS_PER_COMMUNICATOR >> FINGERPRINT_BITS
        if self._steps_taken + count > steps:
            self._steps_taken = 0
        first = self._steps_taken
        self._steps_taken += count
        low = fingerprint & ((1 << FINGERPRINT_BITS) - 1)
        return range(
            self._first_tag + (first << FINGERPRINT_BITS) + low,
            self._first_tag + ((first + count) << FINGERPRINT_BITS),
            1 << FINGERPRINT_BITS,
        )


@lru_cache(maxsize=4096)
def _fingerprint(name: str, n_elems: int, dtype: DType, codec: Codec, operator: ReduceOp | None) -> int:
    """Goes into the tags of a call: ranks that call differently never receive each other's bytes, they time out."""
    return zlib.crc32(repr((name, n_elems, dtype, codec, operator)).encode())


def _finish(operator: ReduceOp | None, size: int) -> Finish:
    if operator is None or operator.name == "SUM":
        return NO_FINISH
    if operator.name == "AVG":
        return Finish(divisor=float(size))
    return Finish(factor=operator.factor)


class _Context:
    """Adds to an error of the transport which call it befell: collective, number, rank, group, codec, count."""

    __slots__ = ("_codec", "_communicator", "_name", "_number", "_source")

    def __init__(
        self, communicator: Communicator, name: str, number: int, codec: Codec | None, source: Span | None
    ) -> None:
        self._communicator = communicator
        self._name = name
        self._number = number
        self._codec = codec
        self._source = source and source._replace(owner=None)  # arrays are not kept alive by it

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, TransportError):
            us = self._communicator
            what = f", {self._source.n_elems} {self._source.dtype.spelling} as {self._codec}" if self._source else ""
            where = f"{self._name} number {self._number} on rank {us.rank} of {us._transport.group_name}{what}"
            advice = "; check that every rank is alive and made the same call" if self._source else ""
            raise type(error)(f"{where}: {error}{advice}") from error.__cause__
