"""Sums so short that a plan with `auto` leaves them to MPI: nothing that comes in Python is as quick as MPI's own.

Told by what all ranks share, dtype and count, never by how a rank's memory lies: ranks that decided differently would
wait for each other. zcomm still reads the arrays, so what it takes elsewhere it takes here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zcomm.buffers import DType, Span, span_of, tell_autograd
from zcomm.collectives.arguments import check_output, check_overlap, check_writable, deliver
from zcomm.errors import MissingExtra
from zcomm.plan import AUTO_RAW_BYTES, Check, Plan
from zcomm.transports.mpi import check_not_over

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library
    raise MissingExtra(f"mpi4py cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'") from error

REASON = f"auto: MPI's own, {AUTO_RAW_BYTES} bytes or fewer"
_PLAIN = frozenset({np.dtype(np.float32), np.dtype(np.float64)})
_DATATYPES = {DType.FLOAT32: MPI.FLOAT, DType.FLOAT64: MPI.DOUBLE}  # that every MPI library can add


class ShortSums:
    """The short blocking sums of one communicator."""

    def __init__(self, comm: Any, plan: Plan) -> None:
        self._comm = comm  # mpi4py.MPI.Intracomm
        self._is_wanted = plan.auto and plan.check is not Check.ALWAYS and str(plan.codec) != "raw"

    def close(self) -> None:
        """Leave all calls to zcomm, which says that it is closed."""
        self._is_wanted = False

    def plain_allreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> bool:
        """As allreduce(), at a glance, for numpy arrays that MPI can take as they are; op is what the caller gave."""
        if not self._is_wanted or op != MPI.SUM or not _is_plain(recvbuf):
            return False
        if recvbuf.nbytes > AUTO_RAW_BYTES or not recvbuf.flags.writeable:
            return False
        if sendbuf is not MPI.IN_PLACE:
            if not _is_plain(sendbuf) or sendbuf.dtype != recvbuf.dtype or sendbuf.size != recvbuf.size:
                return False
            if np.may_share_memory(sendbuf, recvbuf):
                return False
        self._add(sendbuf, recvbuf)
        return True

    def allreduce(
        self,
        source: Any,  # an array of any shape and stride in host memory
        target: Any,  # as many elements, same dtype; source itself: in place
    ) -> bool:
        """MPI's sum over all ranks, if this call is one of those; whether it was.

        Raises BufferError where source and target do not match, or overlap.
        """
        if not self._is_wanted:
            return False
        given = span_of(source, "sendbuf")
        if given.dtype not in _DATATYPES or given.nbytes > AUTO_RAW_BYTES or given.device != "cpu":
            return False
        check_writable(target, "recvbuf")
        tell_autograd(target)
        into = given
        if source is not target:
            into = span_of(target, "recvbuf")
            check_output(into, given, given.n_elems, "as many as sendbuf has")
            check_overlap(into, given, 0)
        # The same memory may come as two arrays, which MPI refuses.
        self._add(MPI.IN_PLACE if into.address == given.address else _message(given), _message(into))
        copy_back = deliver(into, target)
        if copy_back is not None:
            copy_back()
        return True

    def _add(self, given: Any, into: Any) -> None:
        check_not_over()
        self._comm.Allreduce(given, into)


def _is_plain(array: Any) -> bool:
    """Whether this is a numpy array of floats that MPI adds, one beside the other, where mpi4py takes them."""
    if type(array) is not np.ndarray or array.dtype not in _PLAIN:
        return False
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned)


def _message(span: Span) -> list[Any]:
    """Memory as mpi4py takes it."""
    return [MPI.memory.fromaddress(span.address, span.nbytes), span.n_elems, _DATATYPES[span.dtype]]
