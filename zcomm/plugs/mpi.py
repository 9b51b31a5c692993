"""`zcomm.mpi.Comm`: an mpi4py communicator whose sums and gathers of floats travel compressed.

    comm = zcomm.mpi.Comm(MPI.COMM_WORLD, codec="int8")
    comm.Allreduce(MPI.IN_PLACE, gradient)

Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Allgather, Gather, Scatter, Alltoall, their v- and I-forms take
what mpi4py takes. Floats under MPI.SUM are compressed; anything else goes to MPI as it came, and is counted with its
reason. All other names are those of the communicator inside.
"""

# ruff: noqa: N802 - methods have mpi4py's names

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zcomm.buffers import span_of
from zcomm.collectives.arguments import check_writable
from zcomm.collectives.communicator import Communicator
from zcomm.collectives.stats import CollectiveStats, Stats
from zcomm.errors import BufferError, GroupError, MissingExtra, ReduceOpError, TransportError
from zcomm.keywords import known_keywords
from zcomm.plan import Plan, plan_of
from zcomm.plugs.mpi_buffers import Blocks, Other, flattened, one_each, read, read_blocks, read_part
from zcomm.plugs.mpi_datatypes import Places
from zcomm.plugs.mpi_request import Request
from zcomm.plugs.mpi_short import short_calls
from zcomm.reduce_op import SUM, ReduceOp
from zcomm.topology import Topology
from zcomm.transports.mpi import check_not_over, no_threads
from zcomm.wire.codec import Codec
from zcomm.work import Work

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library
    raise MissingExtra(f"mpi4py cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'") from error

PLAN = Plan(chunk_elems=1 << 19)  # smaller chunks than elsewhere: MPI starts messages quickly, and slow links stay full
_OWN = {"wrapped", "communicator", "_passed", "_short"}  # attributes that are not those of the communicator inside
_OP_NAMES = ("MAX", "MIN", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR", "MAXLOC", "MINLOC", "REPLACE", "NO_OP")


@known_keywords
class Comm:
    """A communicator with compressed collectives. Making and closing one is collective."""

    def __init__(
        self,
        comm: Any,  # mpi4py.MPI.Intracomm; stays the caller's
        codec: Codec | str | None = None,  # None: the plan's
        *,
        plan: Plan | Codec | str = PLAN,
        topology: Topology | None = None,  # None: the host names tell
    ) -> None:
        if isinstance(comm, Comm):
            raise GroupError("got a zcomm.mpi.Comm; expected the mpi4py communicator inside: its .wrapped")
        if not isinstance(comm, MPI.Comm):
            raise GroupError(f"got a {type(comm).__name__}; expected an mpi4py communicator, such as MPI.COMM_WORLD")
        settings = plan_of(plan)
        self.wrapped = comm
        self.communicator = Communicator(comm, settings if codec is None else replace(settings, codec=codec), topology)
        self._passed: dict[str, collections.Counter[str]] = {}
        self._short = short_calls(self.communicator, comm)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        """Sum over all ranks; bit-identical everywhere. op: MPI.SUM, zcomm's AVG or premul_sum; others go to MPI."""
        if not self._done_by_mpi("Allreduce", sendbuf, recvbuf, op):
            self._allreduce("Allreduce", sendbuf, recvbuf, op)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Any:
        """Allreduce that returns a request."""
        return self._allreduce("Iallreduce", sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Gather from all ranks, in rank order; bit-identical everywhere, the own part too."""
        if not self._done_by_mpi("Allgather", sendbuf, recvbuf):
            self._allgather("Allgather", sendbuf, recvbuf)

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Allgather that returns a request."""
        return self._allgather("Iallgather", sendbuf, recvbuf)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        """Sum over all ranks and keep this rank's block; op as for Allreduce."""
        if not self._done_by_mpi("Reduce_scatter_block", sendbuf, recvbuf, op):
            self._reduce_scatter("Reduce_scatter_block", sendbuf, recvbuf, op)

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Any:
        """Reduce_scatter_block that returns a request."""
        return self._reduce_scatter("Ireduce_scatter_block", sendbuf, recvbuf, op)

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM) -> None:
        """Reduce_scatter_block of blocks that may differ in size. Without recvcounts it is MPI's own."""
        self._reduce_scatter_counted("Reduce_scatter", sendbuf, recvbuf, recvcounts, op)

    def Ireduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = MPI.SUM) -> Any:
        """Reduce_scatter that returns a request."""
        return self._reduce_scatter_counted("Ireduce_scatter", sendbuf, recvbuf, recvcounts, op)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Allgather of blocks that may differ in size, to any places of recvbuf."""
        self._allgather("Allgatherv", sendbuf, recvbuf)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Allgatherv that returns a request."""
        return self._allgather("Iallgatherv", sendbuf, recvbuf)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Gather from all ranks on root, in rank order, the own part too; others give None for recvbuf."""
        self._gather("Gather", sendbuf, recvbuf, root)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        """Gather that returns a request."""
        return self._gather("Igather", sendbuf, recvbuf, root)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Gather of blocks that may differ in size, to any places of recvbuf."""
        self._gather("Gatherv", sendbuf, recvbuf, root)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        """Gatherv that returns a request."""
        return self._gather("Igatherv", sendbuf, recvbuf, root)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Give each rank its block of root's sendbuf, root too; others give None for sendbuf."""
        self._scatter("Scatter", sendbuf, recvbuf, root)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        """Scatter that returns a request."""
        return self._scatter("Iscatter", sendbuf, recvbuf, root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Scatter of blocks that may differ in size, from any places of sendbuf."""
        self._scatter("Scatterv", sendbuf, recvbuf, root)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
        """Scatterv that returns a request."""
        return self._scatter("Iscatterv", sendbuf, recvbuf, root)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send each rank its block of sendbuf; recvbuf holds the blocks that came, in rank order."""
        if not self._done_by_mpi("Alltoall", sendbuf, recvbuf):
            self._alltoall("Alltoall", sendbuf, recvbuf)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Alltoall that returns a request."""
        return self._alltoall("Ialltoall", sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Alltoall of blocks that may differ in size, from and to any places."""
        self._alltoall("Alltoallv", sendbuf, recvbuf)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Alltoallv that returns a request."""
        return self._alltoall("Ialltoallv", sendbuf, recvbuf)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> None:
        """Sum over all ranks, on root; op as for Allreduce; others give None for recvbuf."""
        self._reduce("Reduce", sendbuf, recvbuf, op, root)

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        """Reduce that returns a request."""
        return self._reduce("Ireduce", sendbuf, recvbuf, op, root)

    def stats(self) -> Stats:
        """Counts by collective, of all calls on this rank so far. What MPI carried has calls and a reason, no bytes."""
        found = self.communicator.stats()
        for name, reasons in self._passed.items():
            passed = CollectiveStats(calls=reasons.total(), uncompressed=dict(reasons))
            found[name] = found.get(name, CollectiveStats()) + passed
        return found

    def reset_stats(self) -> None:
        """Count anew from here."""
        self.communicator.reset_stats()
        self._passed.clear()

    def close(self) -> None:
        """Finish what is under way and free what zcomm made. The communicator inside stays as it is."""
        self.communicator.close()

    Free = close

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # not made yet
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)  # comm.name = "grid"

    def __repr__(self) -> str:
        comm = self.communicator
        return f"<zcomm.mpi.Comm rank {comm.rank} of {comm.size}, {comm.plan}>"

    def _allreduce(self, name: str, sendbuf: Any, recvbuf: Any, op: Any) -> Any:
        target = read(recvbuf, "recvbuf")
        source = target if _in_place(sendbuf) else read(sendbuf, "sendbuf")
        operator = self._operator("all_reduce", op, source, target)
        if operator is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf, op)
        if source is not target:
            _check_alike(target, source)
        async_op, output = self._asynchronous(name), None if source is target else target
        return _request(self._calls(name).all_reduce(source, operator, None, async_op, output=output))

    def _reduce(self, name: str, sendbuf: Any, recvbuf: Any, op: Any, root: int) -> Any:
        target = read(recvbuf, "recvbuf") if self.communicator.rank == root else None
        source = target if target is not None and _in_place(sendbuf) else read(sendbuf, "sendbuf")
        operator = self._operator("reduce", op, source, *_given(target))
        if operator is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf, op, root)
        if target is not None and source is not target:
            _check_alike(target, source)
        async_op, output = self._asynchronous(name), None if source is target else target
        return _request(self._calls(name).reduce(source, root, operator, None, async_op, output=output))

    def _allgather(self, name: str, sendbuf: Any, recvbuf: Any) -> Any:
        comm, vector = self._calls(name), name.endswith("v")
        target = read_blocks(recvbuf, "recvbuf", comm.size, vector)
        if vector and isinstance(target, Blocks) and getattr(sendbuf, "size", None) == 0:
            source = (target.apart or [target.whole])[0][:0]  # np.array([]), of whichever dtype
        else:
            source = self._source(sendbuf, target)
        if self._operator("all_gather", MPI.SUM, source, target) is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf)
        async_op = self._asynchronous(name)
        if target.apart:
            return _request(comm.all_gather(target.apart, source, None, async_op))
        work = comm.all_gather_single(target.whole, source, None, async_op, counts=target.counts)
        return _request(work, _delivery(target.places))

    def _gather(self, name: str, sendbuf: Any, recvbuf: Any, root: int) -> Any:
        comm, is_root = self._calls(name), self.communicator.rank == root
        target = read_blocks(recvbuf, "recvbuf", comm.size, name.endswith("v")) if is_root else None
        source = self._source(sendbuf, target) if is_root else read_part(sendbuf, "sendbuf")[0]
        if self._operator("gather", MPI.SUM, source, *_given(target)) is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf, root)
        async_op = self._asynchronous(name)
        if target is None:
            return _request(comm.gather_single(None, source, root, None, async_op))
        if target.apart:
            return _request(comm.gather(source, target.apart, root, None, async_op))
        work = comm.gather_single(target.whole, source, root, None, async_op, counts=target.counts)
        return _request(work, _delivery(target.places))

    def _scatter(self, name: str, sendbuf: Any, recvbuf: Any, root: int) -> Any:
        comm, is_root = self._calls(name), self.communicator.rank == root
        source = read_blocks(sendbuf, "sendbuf", comm.size, name.endswith("v")) if is_root else None
        target, places = (source, None) if is_root and _in_place(recvbuf) else read_part(recvbuf, "recvbuf")
        if self._operator("scatter", MPI.SUM, target, *_given(source)) is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf, root)
        async_op = self._asynchronous(name)
        if isinstance(target, Blocks):  # in place: the root's own block stays as it is
            target = _copied(target.each(comm.size, "sendbuf")[root])
        if source is None:
            work = comm.scatter_single(target, None, root, None, async_op)
        elif source.apart:
            work = comm.scatter(target, source.apart, root, None, async_op)
        else:
            work = comm.scatter_single(target, source.whole, root, None, async_op, counts=source.counts)
        return _request(work, _delivery(places))

    def _alltoall(self, name: str, sendbuf: Any, recvbuf: Any) -> Any:
        comm, vector = self._calls(name), name.endswith("v")
        target = read_blocks(recvbuf, "recvbuf", comm.size, vector)
        source = target if _in_place(sendbuf) else read_blocks(sendbuf, "sendbuf", comm.size, vector)
        if self._operator("all_to_all", MPI.SUM, source, target) is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf)
        async_op = self._asynchronous(name)
        if source is target or source.apart or target.apart:
            outputs, inputs = target.each(comm.size, "recvbuf"), source.each(comm.size, "sendbuf")
            work = comm.all_to_all(outputs, inputs, None, async_op)
        else:
            splits = target.counts, source.counts
            work = comm.all_to_all_single(target.whole, source.whole, *splits, None, async_op)
        return _request(work, _delivery(target.places))

    def _reduce_scatter(self, name: str, sendbuf: Any, recvbuf: Any, op: Any, counts: Any = None) -> Any:
        comm = self._calls(name)
        target = read(recvbuf, "recvbuf")
        source = target if _in_place(sendbuf) else read(sendbuf, "sendbuf")
        operator = self._operator("reduce_scatter", op, source, target)
        if operator is None:
            arguments = (op,) if counts is None else (counts, op)
            return getattr(self.wrapped, name)(sendbuf, recvbuf, *arguments)
        async_op = self._asynchronous(name)
        if source is not target:
            return _request(comm.reduce_scatter_single(target, source, operator, None, async_op, counts=counts))
        check_writable(target, "recvbuf")
        shares = None if counts is None else one_each(counts, comm.size, "recvbuf", "recvcounts")
        blocks = Blocks(target, [], shares).each(comm.size, "recvbuf")
        first = flattened(target, "recvbuf")[: len(blocks[comm.rank])]  # MPI: the result of every rank
        result = _copied(first)
        work = comm.reduce_scatter_single(result, source, operator, None, async_op, counts=counts)

        def deliver() -> None:
            first[...] = result

        return _request(work, deliver)

    def _reduce_scatter_counted(self, name: str, sendbuf: Any, recvbuf: Any, counts: Any, op: Any) -> Any:
        if counts is not None or isinstance(op, ReduceOp):
            return self._reduce_scatter(name, sendbuf, recvbuf, op, counts)
        self._pass("reduce_scatter", "MPI asks the ranks for recvcounts")
        return getattr(self.wrapped, name)(sendbuf, recvbuf, counts, op)

    def _done_by_mpi(self, name: str, *args: Any) -> bool:
        """Whether MPI has done the call, as a short one of contiguous arrays."""
        short = self._short.get(name)
        return short is not None and short.call_contiguous(*args)

    def _calls(self, name: str) -> Communicator:
        """What does the calls by one of MPI's methods."""
        return self._short.get(name, self.communicator)

    def _source(self, sendbuf: Any, target: Any) -> Any:
        """What this rank gives: its own block of target where the call is in place."""
        if not _in_place(sendbuf):
            return read_part(sendbuf, "sendbuf")[0]
        return target if isinstance(target, Other) else target.each(self.communicator.size, "recvbuf")[self.rank]

    def _operator(self, collective: str, op: Any, *buffers: Any) -> ReduceOp | None:
        """What zcomm is to compute, or None where the call is MPI's, which is counted."""
        others = [buffer.what for buffer in buffers if isinstance(buffer, Other)]
        if isinstance(op, ReduceOp):
            if others:
                raise ReduceOpError(f"op {op} is zcomm's, for floats; got {others[0]}, which goes to MPI: use MPI.SUM")
            return op
        if op == MPI.SUM and not others:
            return SUM
        reason = f"MPI carries {others[0]}" if others else f"MPI computes {_op_name(op)}"
        self._pass(collective, reason)
        return None

    def _pass(self, collective: str, reason: str) -> None:
        """Count a call that MPI carries."""
        self._passed.setdefault(collective, collections.Counter())[reason] += 1

    def _asynchronous(self, name: str) -> bool:
        """Whether a call returns a request. Raises TransportError where this MPI allows no second thread."""
        if not name.startswith("I"):
            return False
        check_not_over()
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise TransportError(no_threads())
        return True


def _in_place(buffer: Any) -> bool:
    return buffer is None or buffer is MPI.IN_PLACE


def _given(buffer: Any) -> tuple[Any, ...]:
    """A buffer where this rank gives one."""
    return () if buffer is None else (buffer,)


def _copied(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _check_alike(target: Any, source: Any) -> None:
    """Raise BufferError unless a sum's input and output match."""
    if type(target) is type(source) and target.dtype == source.dtype and target.shape == source.shape:
        return
    into, given = span_of(target, "recvbuf"), span_of(source, "sendbuf")
    if into.n_elems != given.n_elems or into.dtype != given.dtype:
        raise BufferError(
            f"sendbuf is {given.n_elems} {given.dtype.spelling}, recvbuf {into.n_elems} {into.dtype.spelling}; "
            "expected the same"
        )


def _request(
    work: Work | None,  # None: complete
    deliver: Callable[[], None] | None = None,  # what is left to do then
) -> Request | None:
    if work is not None:
        return Request(work, deliver)
    if deliver is not None:
        deliver()
    return None


def _delivery(places: Places | None) -> Callable[[], None] | None:
    return None if places is None else places.deliver


def _op_name(op: Any) -> str:
    known = (name for name in _OP_NAMES if op == getattr(MPI, name))
    return f"op {next(known, 'of the program')}"
