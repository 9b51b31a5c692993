"""Calls so short that a plan with `auto` leaves them to MPI: nothing that comes in Python is as quick as MPI's own.

Told by what all ranks share, dtype and the size of the whole, never by how a rank's memory lies: ranks that decided
differently would wait for each other. So Gatherv, Scatterv and Alltoallv stay zcomm's: no rank knows their whole. zcomm
still reads and checks the arrays, so what it takes elsewhere it takes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zcomm.buffers import DType, Span, overlap
from zcomm.collectives.communicator import Communicator
from zcomm.collectives.request import Request
from zcomm.errors import MissingExtra
from zcomm.plan import AUTO_RAW_BYTES, Check
from zcomm.reduce_op import SUM
from zcomm.transports.mpi import check_not_over
from zcomm.work import Work

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library
    raise MissingExtra(f"mpi4py cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'") from error

REASON = f"auto: MPI's own, {AUTO_RAW_BYTES} bytes or fewer"
_PLAIN = frozenset({np.dtype(np.float32), np.dtype(np.float64)})
_SUMMED = {DType.FLOAT32: MPI.FLOAT, DType.FLOAT64: MPI.DOUBLE}  # that every MPI library can add


class ShortCalls(Communicator):
    """A communicator's blocking calls by one of MPI's methods, of which MPI does the short ones."""

    def __init__(
        self,
        communicator: Communicator,  # does all others
        comm: Any,  # mpi4py.MPI.Intracomm of the same ranks
        method: str,  # one of METHODS
    ) -> None:
        vars(self).update(vars(communicator))  # one conductor, one transport, one stats: only _call differs
        self._comm = comm
        self._method = METHODS[method]
        self._contiguous = CONTIGUOUS_CALLS.get(method)

    def call_contiguous(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> bool:
        """Do the call, at a glance, if it is short and of numpy arrays that MPI can take as they are."""
        if self._contiguous is None or op != MPI.SUM or not _is_plain(recvbuf) or not recvbuf.flags.writeable:
            return False
        if not self._contiguous.fits(sendbuf, recvbuf, self.size):
            return False
        self._check_open()
        self._contiguous.call(self._comm, sendbuf, recvbuf)
        self._count(self._contiguous.collective)
        return True

    def _call(self, request: Request, async_op: bool) -> Work | None:
        if not self._is_short(request):
            return super()._call(request, async_op)
        self._check_open()
        self._method(self._comm, request)
        if request.deliver is not None:
            request.deliver()
        self._count(request.name)
        return None

    def _is_short(self, request: Request) -> bool:
        """Whether MPI does a call: alike on all ranks."""
        dtype = request.source.dtype
        if request.operator is not None and (request.operator != SUM or dtype not in _SUMMED):
            return False
        if request.name == "gather":
            n_elems = self.size * request.source.n_elems
        elif request.name == "scatter":
            n_elems = self.size * request.target.n_elems
        else:
            n_elems = sum(request.counts)
        return n_elems * dtype.itemsize <= AUTO_RAW_BYTES

    def _check_open(self) -> None:
        self._conductor.check_open()
        check_not_over()

    def _count(self, collective: str) -> None:
        stats = self._conductor.stats[collective]
        stats.calls += 1
        stats.uncompressed[REASON] = stats.uncompressed.get(REASON, 0) + 1


def short_calls(communicator: Communicator, comm: Any) -> dict[str, ShortCalls]:
    """The calls of communicator by those of MPI's methods that its plan leaves to MPI where they are short."""
    plan = communicator.plan
    is_wanted = plan.auto and plan.check is not Check.ALWAYS and str(plan.codec) != "raw"
    return {method: ShortCalls(communicator, comm, method) for method in METHODS} if is_wanted else {}


def _allreduce(comm: Any, request: Request) -> None:
    comm.Allreduce(_terms(request), _summed(request.target))


def _reduce(comm: Any, request: Request) -> None:
    into = _summed(request.target) if comm.Get_rank() == request.root else None
    comm.Reduce(_terms(request), into, root=request.root)


def _reduce_scatter_block(comm: Any, request: Request) -> None:
    comm.Reduce_scatter_block(_terms(request), _summed(request.target))


def _reduce_scatter(comm: Any, request: Request) -> None:
    comm.Reduce_scatter(_terms(request), _summed(request.target), request.counts)


def _allgather(comm: Any, request: Request) -> None:
    comm.Allgather([_given(request), MPI.BYTE], _moved(request.target))


def _allgatherv(comm: Any, request: Request) -> None:
    target = request.target
    nbytes = [count * target.dtype.itemsize for count in request.counts]
    comm.Allgatherv([_given(request), MPI.BYTE], [_memory(target), nbytes, MPI.BYTE])


def _gather(comm: Any, request: Request) -> None:
    into = _moved(request.target) if comm.Get_rank() == request.root else None
    comm.Gather([_given(request), MPI.BYTE], into, request.root)


def _scatter(comm: Any, request: Request) -> None:
    given = [_given(request), MPI.BYTE] if comm.Get_rank() == request.root else None
    comm.Scatter(given, _moved(request.target), request.root)


def _alltoall(comm: Any, request: Request) -> None:
    comm.Alltoall(_moved(request.source), _moved(request.target))


METHODS: dict[str, Callable[[Any, Request], None]] = {  # how MPI does a call by each of them
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "Reduce_scatter_block": _reduce_scatter_block,
    "Reduce_scatter": _reduce_scatter,
    "Allgather": _allgather,
    "Allgatherv": _allgatherv,
    "Gather": _gather,
    "Scatter": _scatter,
    "Alltoall": _alltoall,
}


class ContiguousCall(NamedTuple):
    """How MPI does a call whose arrays it can take as they are."""

    collective: str
    call: Callable[[Any, Any, Any], None]
    sends_blocks: bool  # whether what a rank gives has a part for each rank
    receives_blocks: bool  # whether what it gets has one

    def fits(self, sendbuf: Any, recvbuf: Any, size: int) -> bool:
        """Whether the arrays fit each other, apart in memory, and the whole is short."""
        if sendbuf is MPI.IN_PLACE:
            return self.collective == "all_reduce" and recvbuf.nbytes <= AUTO_RAW_BYTES
        if not _is_plain(sendbuf) or sendbuf.dtype != recvbuf.dtype or np.may_share_memory(sendbuf, recvbuf):
            return False
        part, rest = divmod(sendbuf.size, size) if self.sends_blocks else (sendbuf.size, 0)
        if rest or recvbuf.size != (size * part if self.receives_blocks else part):
            return False
        return max(sendbuf.nbytes, recvbuf.nbytes) <= AUTO_RAW_BYTES


# What is only moved goes as bytes, as it does from a rank whose arrays are not plain.
CONTIGUOUS_CALLS = {
    "Allreduce": ContiguousCall("all_reduce", lambda comm, given, into: comm.Allreduce(given, into), False, False),
    "Reduce_scatter_block": ContiguousCall(
        "reduce_scatter", lambda comm, given, into: comm.Reduce_scatter_block(given, into), True, False
    ),
    "Allgather": ContiguousCall(
        "all_gather", lambda comm, given, into: comm.Allgather([given, MPI.BYTE], [into, MPI.BYTE]), False, True
    ),
    "Alltoall": ContiguousCall(
        "all_to_all", lambda comm, given, into: comm.Alltoall([given, MPI.BYTE], [into, MPI.BYTE]), True, True
    ),
}


def _is_plain(array: Any) -> bool:
    """Whether this is a numpy array of floats that MPI adds, one beside the other, where mpi4py takes them."""
    if type(array) is not np.ndarray or array.dtype not in _PLAIN:
        return False
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned)


def _given(request: Request) -> Any:
    """The memory of what a rank gives: a copy where it lies in what it gets, which MPI refuses."""
    memory = _memory(request.source)
    return bytes(memory) if overlap(request.source, request.target) else memory


def _terms(request: Request) -> Any:
    """What a rank gives to a sum. In place only where the caller said so: MPI wants it of all ranks or of none."""
    in_place = request.source is request.target
    return MPI.IN_PLACE if in_place else [_given(request), _SUMMED[request.source.dtype]]


def _summed(span: Span) -> list[Any]:
    """What MPI adds, as mpi4py takes it."""
    return [_memory(span), _SUMMED[span.dtype]]


def _moved(span: Span) -> list[Any]:
    """What MPI only moves: bytes, as not every MPI library knows every dtype."""
    return [_memory(span), MPI.BYTE]


def _memory(span: Span) -> Any:
    return MPI.memory.fromaddress(span.address, span.nbytes)
