"""The collectives of one group, by torch.distributed's names: arguments checked here, carried out by the conductor.

Every call is collective: all ranks of the group make the same calls in the same order with the same codec, operator and
counts. Arguments are checked before any byte moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from zcomm.buffers import Span, copy_back
from zcomm.collectives.arguments import check_output, check_overlap, check_writable, flattened
from zcomm.collectives.conductor import Conductor, Request
from zcomm.collectives.feedback import Residual
from zcomm.collectives.packing import Packed
from zcomm.collectives.point_to_point import PointToPoint
from zcomm.collectives.stats import CollectiveStats, Stats
from zcomm.errors import BufferError, GroupError, TopologyError
from zcomm.plan import Plan, plan_of
from zcomm.reduce_op import ReduceOp, reduce_op
from zcomm.topology import Topology
from zcomm.transports.open import open_transport
from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec as parse_codec
from zcomm.work import Work


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
        self._transport = open_transport(group)
        self._owns_transport = self._transport is not group
        self.rank = self._transport.rank
        self.size = self._transport.size
        if topology is not None:
            if not isinstance(topology, Topology):
                raise TopologyError(f"topology must be a zcomm.Topology, got {topology!r}")
            topology.check_size(self.size)
        self._conductor = Conductor(self._transport, self.plan, topology)
        self._point_to_point = PointToPoint(self._conductor)
        self.topology = self._conductor.topology

    def all_reduce(
        self,
        tensor: Any,  # any shape, float32, bfloat16, float16 or float64; overwritten with the result
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
        *,
        feedback: Residual | None = None,  # Feedback.of(key): adds what the last call with this key lost
    ) -> Work | None:
        """Sum or average tensor over all ranks, in place; bit-identical everywhere.

        Quantized once per hop: twice flat, three times in two hops (flat.py, hierarchical.py number the steps); once
        for small tensors (Plan.one_shot_elems).
        """
        operator = reduce_op(op)
        span = self._written(tensor, "tensor")
        wanted = self._codecs(codec)
        deliver, counts = self._deliver(span, tensor), (span.n_elems,)
        request = Request("all_reduce", "all_reduce", span, span, deliver, *wanted, counts, (), operator, feedback)
        return self._conductor.call(request, async_op)

    def all_gather_single(
        self,
        output: Any,  # the elements of all ranks' inputs, same dtype; written
        input: Any,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
        *,
        counts: Sequence[int] | None = None,  # elements of each rank's input, zero allowed; None: all equal
    ) -> Work | None:
        """Gather every rank's input into output, in rank order; bit-identical everywhere.

        Quantized once. The own part of output too is what its bytes decode to. input may be that part of output.
        """
        source = self._read(input, "input")
        target = self._written(output, "output")
        shards = self._counts(counts, source.n_elems, "input")
        check_output(target, source, sum(shards), _sum_of(shards))
        check_overlap(source, target, sum(shards[: self.rank]))
        return self._conductor.call(
            Request(
                "all_gather", "all_gather", source, target, self._deliver(target, output), *self._codecs(codec), shards
            ),
            async_op,
        )

    def reduce_scatter_single(
        self,
        output: Any,  # this rank's part of input's elements, same dtype; written
        input: Any,
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
        *,
        counts: Sequence[int] | None = None,  # elements of each rank's part, zero allowed; None: all equal
        feedback: Residual | None = None,  # Feedback.of(key): adds what the last call with this key lost
    ) -> Work | None:
        """Sum or average input over all ranks and keep this rank's part, in rank order, in output.

        Quantized once per hop: once flat, twice in two hops. output may be this rank's part of input.
        """
        operator = reduce_op(op)
        source = self._read(input, "input")
        target = self._written(output, "output")
        if counts is None and source.n_elems % self.size:
            raise BufferError(
                f"input has {source.n_elems} elements, which {self.size} ranks cannot share equally; "
                f"pad it to a multiple of {self.size}, or say counts="
            )
        shards = self._counts(counts, target.n_elems if counts is not None else source.n_elems // self.size, "output")
        check_output(target, source, shards[self.rank], f"this rank's part of {source.n_elems}")
        if sum(shards) != source.n_elems:
            raise BufferError(f"input has {source.n_elems} elements; expected {_sum_of(shards)} = {sum(shards)}")
        check_overlap(target, source, sum(shards[: self.rank]))
        wanted = self._codecs(codec)
        deliver = self._deliver(target, output)
        request = Request(
            "reduce_scatter", "reduce_scatter", source, target, deliver, *wanted, shards, (), operator, feedback
        )
        return self._conductor.call(request, async_op)

    def all_to_all_single(
        self,
        output: Any,  # written
        input: Any,
        output_splits: Sequence[int] | None = None,  # elements from each rank; None: equal parts
        input_splits: Sequence[int] | None = None,  # elements to each rank; None: equal parts
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Send each rank its part of input; output holds, in rank order, the parts that came.

        Quantized once; the own part too is what its bytes decode to. Splits are counted in elements of the flat
        tensors. What one rank sends to another must be what that rank expects from it.
        """
        source = self._read(input, "input")
        target = self._written(output, "output")
        sends = self._splits(input_splits, source.n_elems, "input")
        receives = self._splits(output_splits, target.n_elems, "output")
        check_output(target, source, sum(receives), _sum_of(receives))
        check_overlap(target, source, None)
        if sends[self.rank] != receives[self.rank]:
            raise BufferError(
                f"rank {self.rank} sends itself {sends[self.rank]} elements but expects {receives[self.rank]}"
            )
        wanted = self._codecs(codec)
        deliver = self._deliver(target, output)
        request = Request("all_to_all", "all_to_all", source, target, deliver, *wanted, sends, receives)
        return self._conductor.call(request, async_op)

    def broadcast(
        self,
        tensor: Any,  # rank src's is read, all others are overwritten; src's own is what its bytes decode to
        src: int = 0,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Give every rank src's tensor; bit-identical everywhere, on src too. Quantized once."""
        span = self._written(tensor, "tensor")
        shards = self._only(src, span.n_elems, "src")
        source = span if self.rank == src else span.part(0, 0)
        return self._conductor.call(
            Request("broadcast", "all_gather", source, span, self._deliver(span, tensor), *self._codecs(codec), shards),
            async_op,
        )

    def reduce(
        self,
        tensor: Any,  # rank dst's is overwritten with the result, others are only read
        dst: int = 0,
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Sum or average tensor over all ranks, on rank dst. Quantized once per hop."""
        operator = reduce_op(op)
        span = self._written(tensor, "tensor")
        shards = self._only(dst, span.n_elems, "dst")
        target = span if self.rank == dst else span.part(0, 0)
        deliver = self._deliver(span, tensor) if self.rank == dst else None
        wanted = self._codecs(codec)
        request = Request("reduce", "reduce_scatter", span, target, deliver, *wanted, shards, (), operator)
        return self._conductor.call(request, async_op)

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Any],  # any shapes and float dtypes; overwritten with the results
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """All-reduce many tensors as one message. Blocks of the codec may span tensors."""
        operator = reduce_op(op)
        packed = Packed(tensors, "tensors", written=True)
        span = self._read(packed.fill(), "tensors")
        wanted = self._codecs(codec)
        return self._conductor.call(
            Request("all_reduce", "all_reduce", span, span, packed.spread, *wanted, (span.n_elems,), (), operator),
            async_op,
        )

    def all_gather(
        self,
        outputs: Sequence[Any],  # one for each rank, as many elements as that rank's input; written
        input: Any,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Gather every rank's input, each into its own output; they may differ in size."""
        packed = Packed(self._one_each(outputs, "outputs"), "outputs", written=True)
        source, target = self._read(input, "input"), self._read(packed.flat, "outputs")
        shards = self._counts(packed.counts, source.n_elems, "input")
        check_output(target, source, sum(shards), _sum_of(shards))
        wanted = self._codecs(codec)
        return self._conductor.call(
            Request("all_gather", "all_gather", source, target, packed.spread, *wanted, shards), async_op
        )

    def reduce_scatter(
        self,
        output: Any,  # as many elements as this rank's input; written
        inputs: Sequence[Any],  # one for each rank
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Sum or average each rank's input over all ranks and keep this rank's; they may differ in size."""
        packed = Packed(self._one_each(inputs, "inputs"), "inputs", written=False)
        return self.reduce_scatter_single(output, packed.fill(), op, codec, async_op, counts=packed.counts)

    def all_to_all(
        self,
        outputs: Sequence[Any],  # one from each rank; written
        inputs: Sequence[Any],  # one for each rank
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Send each rank its input; outputs[r] is what rank r sent to this one."""
        sent = Packed(self._one_each(inputs, "inputs"), "inputs", written=False)
        came = Packed(self._one_each(outputs, "outputs"), "outputs", written=True)
        source, target = self._read(sent.fill(), "inputs"), self._read(came.flat, "outputs")
        check_output(target, source, target.n_elems, "")
        wanted = self._codecs(codec)
        request = Request("all_to_all", "all_to_all", source, target, came.spread, *wanted, sent.counts, came.counts)
        return self._conductor.call(request, async_op)

    def send(
        self,
        tensor: Any,
        dst: int,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Send tensor to rank dst, which calls recv with as many elements, the same dtype and codec."""
        span = self._read(tensor, "tensor")
        return self._point_to_point.send(span, self._peer(dst, "dst"), self._codec(codec), async_op)

    def recv(
        self,
        tensor: Any,  # written
        src: int,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Receive what rank src sends to this one."""
        span = self._written(tensor, "tensor")
        deliver = self._deliver(span, tensor)
        return self._point_to_point.receive(span, self._peer(src, "src"), self._codec(codec), async_op, deliver)

    def stats(self) -> Stats:
        """Calls, bytes and seconds of each collective on this rank so far."""
        return {name: stats + CollectiveStats() for name, stats in list(self._conductor.stats.items())}

    def reset_stats(self) -> None:
        """Count anew from here."""
        self._conductor.stats.clear()

    def close(self) -> None:
        """Finish what is under way, free scratch and thread. The group stays as it is."""
        self._point_to_point.close()
        self._conductor.close()
        if self._owns_transport:
            self._transport.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self._transport.group_name}, {self._transport.name}, {self.plan}>"

    def _codec(self, codec: Codec | str | None) -> Codec:
        return parse_codec(self.plan.codec if codec is None else codec)

    def _codecs(self, codec: Codec | str | None) -> tuple[Codec, Codec]:
        """Of a call, between and inside nodes: the plan's two, or the one that the call itself asks for at both."""
        chosen = self._codec(codec)
        if codec is None and self.plan.intra_codec is not None:
            return chosen, parse_codec(self.plan.intra_codec)
        return chosen, chosen

    def _read(self, array: Any, role: str) -> Span:
        return flattened(array, role, self._transport.device)

    def _written(self, array: Any, role: str) -> Span:
        span = flattened(array, role, self._transport.device)
        check_writable(array, role)
        return span

    def _deliver(self, span: Span, array: Any) -> Callable[[], None] | None:
        """What copies a result into a strided array; None where the span is the array itself."""
        return None if span.owner is array else lambda: copy_back(span.owner, array)

    def _one_each(self, arrays: Sequence[Any], role: str) -> Sequence[Any]:
        if not isinstance(arrays, Sequence) or len(arrays) != self.size:
            came = f"{len(arrays)}" if isinstance(arrays, Sequence) else f"a {type(arrays).__name__}"
            raise BufferError(f"{role} must be a list of {self.size} tensors, one for each rank, got {came}")
        return arrays

    def _peer(self, rank: int, role: str) -> int:
        self._only(rank, 0, role)
        if rank == self.rank:
            raise GroupError(f"{role}={rank} is this rank itself; expected another")
        return rank

    def _counts(self, counts: Sequence[int] | None, own: int, role: str) -> tuple[int, ...]:
        """Elements of each rank's shard. Raises BufferError unless there is one for each rank and own is this one's."""
        if counts is None:
            return (own,) * self.size
        shards = self._checked(counts, "counts")
        if shards[self.rank] != own:
            raise BufferError(f"{role} of rank {self.rank} has {own} elements; counts says {shards[self.rank]}")
        return shards

    def _splits(self, splits: Sequence[int] | None, n_elems: int, role: str) -> tuple[int, ...]:
        if splits is None:
            if n_elems % self.size:
                raise BufferError(
                    f"{role} has {n_elems} elements, which {self.size} ranks cannot share equally; say {role}_splits="
                )
            return (n_elems // self.size,) * self.size
        parts = self._checked(splits, f"{role}_splits")
        if sum(parts) != n_elems:
            raise BufferError(f"{role} has {n_elems} elements; expected {_sum_of(parts)} = {sum(parts)}")
        return parts

    def _checked(self, counts: Sequence[int], role: str) -> tuple[int, ...]:
        try:
            shards = tuple(index(count) for count in counts)
        except TypeError:
            shards = ()
        if len(shards) != self.size or any(count < 0 for count in shards):
            raise BufferError(f"{role} must be {self.size} whole numbers of elements, one for each rank, got {counts}")
        return shards

    def _only(self, rank: int, n_elems: int, role: str) -> tuple[int, ...]:
        """All elements on one rank."""
        if isinstance(rank, bool) or not hasattr(rank, "__index__") or not 0 <= index(rank) < self.size:
            raise GroupError(
                f"{role}={rank!r} is not a rank of {self._transport.group_name}; expected 0 to {self.size - 1}"
            )
        return tuple(n_elems if each == rank else 0 for each in range(self.size))


def _sum_of(counts: Sequence[int]) -> str:
    """How errors show counts: "4 ranks x 10", "10 + 0 + 7"."""
    if len(set(counts)) == 1:
        return f"{len(counts)} ranks x {counts[0]}"
    return " + ".join(map(str, counts))
