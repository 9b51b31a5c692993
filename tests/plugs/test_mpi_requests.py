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


def several_at_once() -> None:
    from mpi4py import MPI

    request = zcomm.mpi.Request
    with comm_of(4) as comm:
        sums = [np.full(9 + i, comm.rank + i, np.float32) for i in range(4)]
        counts = np.array([comm.rank])
        requests = [comm.Iallreduce(MPI.IN_PLACE, x) for x in sums]
        requests.append(comm.Iallreduce(MPI.IN_PLACE, counts))  # MPI's own
        order = [request.Waitany(requests) for _ in requests]
        assert sorted(order) == [0, 1, 2, 3, 4]
        assert request.Waitany(requests) == request.Waitany([]) == MPI.UNDEFINED
        assert all(np.allclose(x, 6 + 4 * i, rtol=0.01) for i, x in enumerate(sums))
        assert counts[0] == 6
        assert request.Testall(requests)
        requests = [comm.Iallreduce(MPI.IN_PLACE, x) for x in sums]
        while not request.Testall(requests):
            time.sleep(1e-3)
        assert all(np.allclose(x, 24 + 16 * i, rtol=0.02) for i, x in enumerate(sums))


def test_several_requests_are_waited_for_and_tested_together(mpi_world):
    mpi_world.run(several_at_once)


def dropped_in_place() -> None:
    from mpi4py import MPI

    with comm_of(4, "raw") as comm:
        blocks = np.arange(4 * 7, dtype=np.float32)
        comm.Ireduce_scatter_block(MPI.IN_PLACE, blocks)  # nobody waits for it
        uneven = np.arange(10, dtype=np.float32)
        comm.Ireduce_scatter(MPI.IN_PLACE, uneven, [1, 2, 3, 4])
        comm.Allreduce(MPI.IN_PLACE, np.ones(3, np.float32))  # comes after them
        assert blocks[:7].tolist() == [4 * (7 * comm.rank + i) for i in range(7)]
        start = sum(range(comm.rank + 1))
        assert uneven[: comm.rank + 1].tolist() == [4 * (start + i) for i in range(comm.rank + 1)]


def test_a_request_that_nobody_waits_for_brings_its_result_too(mpi_world):
    mpi_world.run(dropped_in_place)


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
