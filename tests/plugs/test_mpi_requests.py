"""Requests of `zcomm.mpi.Comm`: several in flight, polled, with MPI's own among them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi_cases import comm_of, inputs, reduced

import zcomm
from zcomm.errors import TransportError


def many_in_flight() -> None:
    from mpi4py import MPI

    with comm_of(4) as comm:
        rounds = [inputs(4, 500 + 37 * i, "float32")[comm.rank].copy() for i in range(12)]
        requests = [comm.Iallreduce(MPI.IN_PLACE, x) for x in rounds]
        flag = np.array([comm.rank])
        requests.append(comm.Iallreduce(MPI.IN_PLACE, flag))  # MPI's own request, for integers
        for _ in range(3):
            comm.Iallreduce(MPI.IN_PLACE, np.ones(1000, np.float32))  # dropped
        zcomm.mpi.Request.Waitall(requests[::-1])
        for i, x in enumerate(rounds):
            assert x.tobytes() == reduced(4, 500 + 37 * i, "int8", "float32").tobytes()
        assert flag[0] == 6
        assert isinstance(requests[-1], MPI.Request)


def test_a_dozen_requests_waited_for_in_reverse(mpi_world):
    mpi_world.run(many_in_flight)


def polled_until_done() -> None:
    from mpi4py import MPI

    with comm_of(4) as comm:
        request = comm.Iallreduce(MPI.IN_PLACE, x := np.ones(1 << 18, np.float32))
        while not request.Test():  # as long as it takes: one that never completes is found by the world's own timeout
            time.sleep(1e-3)
        assert np.allclose(x, 4, rtol=0.01)


def test_requests_complete_while_the_program_does_something_else(mpi_world):
    mpi_world.run(polled_until_done)


def without_threads() -> None:
    from mpi4py import MPI

    with comm_of(4) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr("zcomm.plugs.mpi.MPI", _LessThreads(MPI))
        x = np.ones(10, np.float32)
        with pytest.raises(TransportError, match="needs MPI_THREAD_MULTIPLE"):
            comm.Iallreduce(MPI.IN_PLACE, x)
        comm.Allreduce(MPI.IN_PLACE, x)
        assert comm.stats()["all_reduce"].calls == 1


class _LessThreads:
    """MPI as initialised with a lower thread level."""

    def __init__(self, mpi) -> None:
        self._mpi = mpi

    def __getattr__(self, name: str):
        return getattr(self._mpi, name)

    def Query_thread(self) -> int:  # noqa: N802
        return self._mpi.THREAD_SERIALIZED


def test_asynchronous_calls_are_refused_where_mpi_allows_no_second_thread(mpi_world):
    mpi_world.run(without_threads)
