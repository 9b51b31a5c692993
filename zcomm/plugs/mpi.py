"""`zcomm.mpi.Comm`: an mpi4py communicator whose sums and gathers of floats travel compressed.

    comm = zcomm.mpi.Comm(MPI.COMM_WORLD, codec="int8")
    comm.Allreduce(MPI.IN_PLACE, gradient)

Allreduce, Allgather, Reduce_scatter_block and their I-forms take what mpi4py takes. Floats under MPI.SUM are
compressed; anything else goes to MPI as it came, and is counted with its reason. All other names are those of the
communicator inside.
"""

# ruff: noqa: N802 - methods have mpi4py's names

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zcomm.buffers import copy_back, copy_memory, overlap, span_of
from zcomm.collectives.arguments import check_writable
from zcomm.collectives.arguments import flattened as on_device
from zcomm.collectives.communicator import Communicator
from zcomm.collectives.stats import CollectiveStats, Stats
from zcomm.errors import BufferError, GroupError, MissingExtra, ReduceOpError, TransportError
from zcomm.plan import Plan
from zcomm.plugs.mpi_buffers import Other, flattened, read
from zcomm.reduce_op import SUM, ReduceOp
from zcomm.topology import Topology
from zcomm.transports.mpi import no_threads
from zcomm.wire.codec import Codec
from zcomm.work import Work

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library
    raise MissingExtra(f"mpi4py cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'") from error

PLAN = Plan(chunk_elems=1 << 19)  # smaller chunks than elsewhere: MPI starts messages quickly, and slow links stay full
_OP_NAMES = ("MAX", "MIN", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR", "MAXLOC", "MINLOC", "REPLACE", "NO_OP")


class Comm:
    """A communicator with compressed collectives. Making and closing one is collective."""

    def __init__(
        self,
        comm: Any,  # mpi4py.MPI.Intracomm; stays the caller's
        codec: Codec | str | None = None,  # None: the plan's
        *,
        plan: Plan = PLAN,
        topology: Topology | None = None,  # None: the host names tell
    ) -> None:
        if not isinstance(comm, MPI.Comm):
            raise GroupError(f"got a {type(comm).__name__}; expected an mpi4py communicator, such as MPI.COMM_WORLD")
        self.wrapped = comm
        self.communicator = Communicator(comm, plan if codec is None else replace(plan, codec=codec), topology)
        self._passed: dict[str, collections.Counter[str]] = {}

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        """Sum over all ranks; bit-identical everywhere. op: MPI.SUM, zcomm's AVG or premul_sum; others go to MPI."""
        self._allreduce("Allreduce", sendbuf, recvbuf, op)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Any:
        """Allreduce that returns a request."""
        return self._allreduce("Iallreduce", sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Gather from all ranks, in rank order; bit-identical everywhere, the own part too."""
        self._allgather("Allgather", sendbuf, recvbuf)

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Allgather that returns a request."""
        return self._allgather("Iallgather", sendbuf, recvbuf)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        """Sum over all ranks and keep this rank's block; op as for Allreduce."""
        self._reduce_scatter("Reduce_scatter_block", sendbuf, recvbuf, op)

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> Any:
        """Reduce_scatter_block that returns a request."""
        return self._reduce_scatter("Ireduce_scatter_block", sendbuf, recvbuf, op)

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

    def __repr__(self) -> str:
        return f"<zcomm.mpi.Comm rank {self.rank} of {self.size}, {self.communicator.plan}>"

    def _allreduce(self, name: str, sendbuf: Any, recvbuf: Any, op: Any) -> Any:
        target = read(recvbuf, "recvbuf")
        source = target if _in_place(sendbuf) else read(sendbuf, "sendbuf")
        operator = self._operator("all_reduce", op, source, target)
        if operator is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf, op)
        async_op = self._asynchronous(name)
        if source is not target:
            _fill(target, source)
        return _request(self.communicator.all_reduce(target, operator, None, async_op))

    def _allgather(self, name: str, sendbuf: Any, recvbuf: Any) -> Any:
        target = read(recvbuf, "recvbuf", self.communicator.size)
        source = target if _in_place(sendbuf) else read(sendbuf, "sendbuf")
        if self._operator("all_gather", MPI.SUM, source, target) is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf)
        async_op = self._asynchronous(name)
        if source is target:
            n_elems = self._per_rank(target, "recvbuf")
            source = target.reshape(-1)[self.communicator.rank * n_elems :][:n_elems]
        return _request(self.communicator.all_gather_single(target, source, None, async_op))

    def _reduce_scatter(self, name: str, sendbuf: Any, recvbuf: Any, op: Any) -> Any:
        target = read(recvbuf, "recvbuf")
        source = target if _in_place(sendbuf) else read(sendbuf, "sendbuf")
        operator = self._operator("reduce_scatter", op, source, target)
        if operator is None:
            return getattr(self.wrapped, name)(sendbuf, recvbuf, op)
        async_op = self._asynchronous(name)
        if source is not target:
            return _request(self.communicator.reduce_scatter_single(target, source, operator, None, async_op))
        check_writable(target, "recvbuf")
        first = flattened(target, "recvbuf")[: self._per_rank(target, "recvbuf")]  # MPI: the result of every rank
        result = first.copy() if isinstance(first, np.ndarray) else first.clone()
        work = self.communicator.reduce_scatter_single(result, source, operator, None, async_op)

        def deliver() -> None:
            first[...] = result

        if work is None:
            deliver()
        return _request(work, deliver)

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
        self._passed.setdefault(collective, collections.Counter())[reason] += 1
        return None

    def _asynchronous(self, name: str) -> bool:
        """Whether a call returns a request. Raises TransportError where this MPI allows no second thread."""
        if not name.startswith("I"):
            return False
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise TransportError(no_threads())
        return True

    def _per_rank(self, array: Any, role: str) -> int:
        n_elems, size = span_of(array, role).n_elems, self.communicator.size
        if n_elems % size:
            raise BufferError(f"{role} has {n_elems} elements, which {size} ranks cannot share equally")
        return n_elems // size


class Request:
    """A call under way, with the methods of an MPI request. Buffers are kept until it is complete."""

    def __init__(
        self,
        work: Work,
        deliver: Callable[[], None] | None = None,  # what is left to do when work is complete
    ) -> None:
        self._work = work
        self._deliver = deliver
        self._lock = threading.Lock()

    def Wait(self, status: Any = None) -> bool:
        """Return when the result is there; raise what the call raised. status is left as it is."""
        self._work.wait()
        with self._lock:
            deliver, self._deliver = self._deliver, None
            if deliver is not None:
                deliver()
        return True

    def Test(self, status: Any = None) -> bool:
        """Whether the result is there."""
        return self._work.is_completed() and self.Wait()

    def wait(self, status: Any = None) -> None:
        """As Wait; there is no message to return."""
        self.Wait()

    def test(self, status: Any = None) -> tuple[bool, None]:
        """As Test; there is no message to return."""
        return self.Test(), None

    @staticmethod
    def Waitall(requests: Sequence[Any], statuses: Any = None) -> bool:
        """Wait for zcomm's and MPI's requests together."""
        for request in requests:
            request.Wait()
        return True


def _in_place(sendbuf: Any) -> bool:
    return sendbuf is None or sendbuf is MPI.IN_PLACE


def _fill(target: Any, source: Any) -> None:
    """Copy the input to where the sum is formed. Raises BufferError unless they match and are separate memory."""
    into, given = on_device(target, "recvbuf", "cpu"), on_device(source, "sendbuf", "cpu")
    check_writable(target, "recvbuf")
    if into.n_elems != given.n_elems or into.dtype != given.dtype:
        raise BufferError(
            f"sendbuf is {given.n_elems} {given.dtype.spelling}, recvbuf {into.n_elems} {into.dtype.spelling}; "
            "expected the same"
        )
    if overlap(into, given):
        raise BufferError("sendbuf and recvbuf overlap; expected separate memory, or MPI.IN_PLACE for sendbuf")
    copy_memory(given, into)
    if into.owner is not target:
        copy_back(into.owner, target)


def _request(work: Work | None, deliver: Callable[[], None] | None = None) -> Request | None:
    return None if work is None else Request(work, deliver)


def _op_name(op: Any) -> str:
    known = (name for name in _OP_NAMES if op == getattr(MPI, name))
    return f"op {next(known, 'of the program')}"
