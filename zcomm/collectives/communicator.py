"""The collectives of one group, by torch.distributed's names: arguments checked here, carried out by the conductor.

Every call is collective: all ranks of the group make the same calls in the same order with the same codec, operator and
counts. Arguments are checked before any byte moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zcomm.buffers import Span
from zcomm.collectives.arguments import Arguments, check_dtype, check_output, check_overlap, check_whole, deliver
from zcomm.collectives.conductor import Conductor
from zcomm.collectives.feedback import Residual
from zcomm.collectives.packing import Packed
from zcomm.collectives.point_to_point import PointToPoint
from zcomm.collectives.request import Pattern, Request
from zcomm.collectives.stats import CollectiveStats, Stats
from zcomm.errors import BufferError, GroupError, TopologyError
from zcomm.graphs import outside_graphs
from zcomm.keywords import known_keywords
from zcomm.plan import Plan, plan_of
from zcomm.reduce_op import ReduceOp, reduce_op
from zcomm.topology import Topology
from zcomm.transports.open import open_transport
from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec as parse_codec
from zcomm.work import Work


@outside_graphs
@known_keywords
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
        device: str | None = None,  # where arrays will be: "cpu", "cuda:0"; None: where the group moves bytes
    ) -> None:
        self.plan = plan_of(plan)
        self._transport = open_transport(group, device)
        self._owns_transport = self._transport is not group
        self.rank = self._transport.rank
        self.size = self._transport.size
        self._arguments = Arguments(self._transport)
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
        output: Any = None,  # as many elements, same dtype: the result goes there, and tensor is only read
        feedback: Residual | None = None,  # Feedback.of(key): adds what the last call with this key lost
    ) -> Work | None:
        """Sum or average tensor over all ranks, in place; bit-identical everywhere.

        Quantized once per hop: twice flat, three times in two hops (flat.py, hierarchical.py number the steps); less
        often where it is short (choice.way_of).
        """
        operator = reduce_op(op)
        source, target, output = self._source_and_target(tensor, output)
        pattern, copy_out = Pattern.ALL_REDUCE, deliver(target, output)
        counts, codecs = (source.n_elems,), self._codecs(codec)
        request = Request("all_reduce", pattern, source, target, copy_out, *codecs, counts, (), operator, feedback)
        return self._call(request, async_op)

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
        source, target = self._arguments.read(input, "input"), self._arguments.written(output, "output")
        shards = self._arguments.counts(counts, source.n_elems, "input")
        check_whole(target, source, shards)
        check_overlap(source, target, sum(shards[: self.rank]))
        copy_out, codecs = deliver(target, output), self._codecs(codec)
        request = Request("all_gather", Pattern.ALL_GATHER, source, target, copy_out, *codecs, shards)
        return self._call(request, async_op)

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
        source, target = self._arguments.read(input, "input"), self._arguments.written(output, "output")
        shards = self._arguments.parts(counts, source.n_elems, "input", "counts")
        check_output(target, source, shards[self.rank], f"this rank's part of {source.n_elems}")
        check_overlap(target, source, sum(shards[: self.rank]))
        pattern, copy_out, codecs = Pattern.REDUCE_SCATTER, deliver(target, output), self._codecs(codec)
        request = Request("reduce_scatter", pattern, source, target, copy_out, *codecs, shards, (), operator, feedback)
        return self._call(request, async_op)

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
        source, target = self._arguments.read(input, "input"), self._arguments.written(output, "output")
        sends = self._arguments.parts(input_splits, source.n_elems, "input", "input_splits")
        receives = self._arguments.parts(output_splits, target.n_elems, "output", "output_splits")
        check_whole(target, source, receives)
        check_overlap(target, source, None)
        if sends[self.rank] != receives[self.rank]:
            raise BufferError(
                f"rank {self.rank} sends itself {sends[self.rank]} elements but expects {receives[self.rank]}"
            )
        copy_out, codecs = deliver(target, output), self._codecs(codec)
        request = Request("all_to_all", Pattern.ALL_TO_ALL, source, target, copy_out, *codecs, sends, receives)
        return self._call(request, async_op)

    def broadcast(
        self,
        tensor: Any,  # rank src's is read, all others are overwritten; src's own is what its bytes decode to
        src: int = 0,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Give every rank src's tensor; bit-identical everywhere, on src too. Quantized once."""
        span = self._arguments.written(tensor, "tensor")
        src = self._arguments.root(src, "src")
        source, shards = span if self.rank == src else span.part(0, 0), self._arguments.only(src, span.n_elems)
        copy_out, codecs = deliver(span, tensor), self._codecs(codec)
        request = Request("broadcast", Pattern.ALL_GATHER, source, span, copy_out, *codecs, shards)
        return self._call(request, async_op)

    def reduce(
        self,
        tensor: Any,  # rank dst's is overwritten with the result, others are only read
        dst: int = 0,
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
        *,
        output: Any = None,  # on rank dst: as many elements, same dtype; the result goes there; not looked at elsewhere
    ) -> Work | None:
        """Sum or average tensor over all ranks, on rank dst. Quantized once per hop."""
        operator, dst = reduce_op(op), self._arguments.root(dst, "dst")
        if self.rank == dst:
            source, target, output = self._source_and_target(tensor, output)
            copy_out = deliver(target, output)
        else:
            source = self._arguments.read(tensor, "tensor")
            target, copy_out = source.part(0, 0), None
        shards, codecs = self._arguments.only(dst, source.n_elems), self._codecs(codec)
        pattern = Pattern.REDUCE_SCATTER
        request = Request("reduce", pattern, source, target, copy_out, *codecs, shards, (), operator, root=dst)
        return self._call(request, async_op)

    def gather_single(
        self,
        output: Any,  # on rank dst, the elements of all ranks' inputs, written; not looked at elsewhere
        input: Any,
        dst: int = 0,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
        *,
        counts: Sequence[int] | None = None,  # on rank dst: elements of each rank's input; None: all equal
    ) -> Work | None:
        """Gather every rank's input on rank dst, in rank order. Quantized once; dst's own part too."""
        dst = self._arguments.root(dst, "dst")
        source = self._arguments.read(input, "input")
        target, copy_out, shards = source.part(0, 0), None, self._arguments.only(self.rank, 0)
        if self.rank == dst:
            target = self._arguments.written(output, "output")
            copy_out, shards = deliver(target, output), self._arguments.counts(counts, source.n_elems, "input")
            check_whole(target, source, shards)
            check_overlap(source, target, sum(shards[: self.rank]))
        sends, codecs = self._arguments.only(dst, source.n_elems), self._codecs(codec)
        request = Request("gather", Pattern.DIRECT, source, target, copy_out, *codecs, sends, shards, root=dst)
        return self._call(request, async_op)

    def scatter_single(
        self,
        output: Any,  # written
        input: Any,  # on rank src, the elements of all ranks' outputs; not looked at elsewhere
        src: int = 0,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
        *,
        counts: Sequence[int] | None = None,  # on rank src: elements of each rank's output; None: all equal
    ) -> Work | None:
        """Give every rank its part of rank src's input, in rank order. Quantized once; src's own part too."""
        src = self._arguments.root(src, "src")
        target = self._arguments.written(output, "output")
        source, shards = target.part(0, 0), self._arguments.only(self.rank, 0)
        if self.rank == src:
            source = self._arguments.read(input, "input")
            shards = self._arguments.parts(counts, source.n_elems, "input", "counts")
            check_output(target, source, shards[self.rank], f"this rank's part of {source.n_elems}")
            check_overlap(target, source, sum(shards[: self.rank]))
        copy_out, codecs = deliver(target, output), self._codecs(codec)
        receives = self._arguments.only(src, target.n_elems)
        request = Request("scatter", Pattern.DIRECT, source, target, copy_out, *codecs, shards, receives, root=src)
        return self._call(request, async_op)

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
        span, codecs = self._arguments.read(packed.fill(), "tensors"), self._codecs(codec)
        counts = (span.n_elems,)
        request = Request("all_reduce", Pattern.ALL_REDUCE, span, span, packed.spread, *codecs, counts, (), operator)
        return self._call(request, async_op)

    def all_gather(
        self,
        outputs: Sequence[Any],  # one for each rank, as many elements as that rank's input; written
        input: Any,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Gather every rank's input, each into its own output; they may differ in size."""
        packed = Packed(self._arguments.one_each(outputs, "outputs"), "outputs", written=True)
        source, target = self._arguments.read(input, "input"), self._arguments.read(packed.flat, "outputs")
        shards = self._arguments.counts(packed.counts, source.n_elems, "input")
        check_whole(target, source, shards)
        codecs = self._codecs(codec)
        request = Request("all_gather", Pattern.ALL_GATHER, source, target, packed.spread, *codecs, shards)
        return self._call(request, async_op)

    def reduce_scatter(
        self,
        output: Any,  # as many elements as this rank's input; written
        inputs: Sequence[Any],  # one for each rank
        op: ReduceOp | str | Any = "sum",
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Sum or average each rank's input over all ranks and keep this rank's; they may differ in size."""
        packed = Packed(self._arguments.one_each(inputs, "inputs"), "inputs", written=False)
        return self.reduce_scatter_single(output, packed.fill(), op, codec, async_op, counts=packed.counts)

    def all_to_all(
        self,
        outputs: Sequence[Any],  # one from each rank; written
        inputs: Sequence[Any],  # one for each rank
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Send each rank its input; outputs[r] is what rank r sent to this one."""
        sent = Packed(self._arguments.one_each(inputs, "inputs"), "inputs", written=False)
        came = Packed(self._arguments.one_each(outputs, "outputs"), "outputs", written=True)
        source, target = self._arguments.read(sent.fill(), "inputs"), self._arguments.read(came.flat, "outputs")
        check_dtype(target, source)
        pattern, codecs = Pattern.ALL_TO_ALL, self._codecs(codec)
        request = Request("all_to_all", pattern, source, target, came.spread, *codecs, sent.counts, came.counts)
        return self._call(request, async_op)

    def gather(
        self,
        tensor: Any,
        outputs: Sequence[Any] | None = None,  # on rank dst, one for each rank, written; not looked at elsewhere
        dst: int = 0,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Gather every rank's tensor on rank dst, each into its own output; they may differ in size."""
        if self.rank != self._arguments.root(dst, "dst"):
            return self.gather_single(None, tensor, dst, codec, async_op)
        outputs = self._arguments.one_each(() if outputs is None else outputs, "outputs")
        packed = Packed(outputs, "outputs", written=True)
        source, target = self._arguments.read(tensor, "tensor"), self._arguments.read(packed.flat, "outputs")
        shards = self._arguments.counts(packed.counts, source.n_elems, "tensor")
        check_whole(target, source, shards)
        sends, codecs = self._arguments.only(dst, source.n_elems), self._codecs(codec)
        request = Request("gather", Pattern.DIRECT, source, target, packed.spread, *codecs, sends, shards, root=dst)
        return self._call(request, async_op)

    def scatter(
        self,
        tensor: Any,  # written
        inputs: Sequence[Any] | None = None,  # on rank src, one for each rank; not looked at elsewhere
        src: int = 0,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Give every rank its own of rank src's inputs; they may differ in size."""
        if self.rank != self._arguments.root(src, "src"):
            return self.scatter_single(tensor, None, src, codec, async_op)
        inputs = self._arguments.one_each(() if inputs is None else inputs, "inputs")
        packed = Packed(inputs, "inputs", written=False)
        return self.scatter_single(tensor, packed.fill(), src, codec, async_op, counts=packed.counts)

    def send(
        self,
        tensor: Any,
        dst: int,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Send tensor to rank dst, which calls recv with as many elements, the same dtype and codec."""
        span = self._arguments.read(tensor, "tensor")
        return self._point_to_point.send(span, self._arguments.peer(dst, "dst"), self._codec(codec), async_op)

    def recv(
        self,
        tensor: Any,  # written
        src: int,
        codec: Codec | str | None = None,  # None: the plan's
        async_op: bool = False,
    ) -> Work | None:
        """Receive what rank src sends to this one."""
        span, peer = self._arguments.written(tensor, "tensor"), self._arguments.peer(src, "src")
        return self._point_to_point.receive(span, peer, self._codec(codec), async_op, deliver(span, tensor))

    def stats(self) -> Stats:
        """Calls, bytes and seconds of each collective on this rank so far."""
        return {name: stats + CollectiveStats() for name, stats in list(self._conductor.stats.items())}

    def reset_stats(self) -> None:
        """Count anew from here."""
        self._conductor.stats.clear()

    def close(self) -> None:
        """Finish what is under way, free scratch and thread. The group stays as it is.

        Raises GroupError in a callback of one of its works: those behind it would still be under way.
        """
        if self._conductor.runs_here or self._point_to_point.runs_here:
            raise GroupError("close() was called from a callback of this communicator's own work; call it elsewhere")
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

    def _call(self, request: Request, async_op: bool) -> Work | None:
        return self._conductor.call(request, async_op)

    def _source_and_target(self, tensor: Any, output: Any) -> tuple[Span, Span, Any]:
        """What is summed, where the sum goes, and the array that stands for it: tensor itself if output is None."""
        if output is None:
            span = self._arguments.written(tensor, "tensor")
            return span, span, tensor
        source, target = self._arguments.read(tensor, "tensor"), self._arguments.written(output, "output")
        check_output(target, source, source.n_elems, "as many as tensor has")
        check_overlap(target, source, 0)
        return source, target, output

    def _codec(self, codec: Codec | str | None) -> Codec:
        return parse_codec(self.plan.codec if codec is None else codec)

    def _codecs(self, codec: Codec | str | None) -> tuple[Codec, Codec]:
        """Of a call, between and inside nodes: the plan's two, or the one that the call itself asks for at both."""
        chosen = self._codec(codec)
        if codec is None and self.plan.intra_codec is not None:
            return chosen, parse_codec(self.plan.intra_codec)
        return chosen, chosen
