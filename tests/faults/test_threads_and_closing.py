"""Calls from two threads, and calls after close: each has one stated behaviour (docs/sharp-bits.md)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import forms
import numpy as np
import pytest
from impatience import AMPLE_S

import zcomm
from zcomm import Communicator, Plan, local
from zcomm.collectives.stats import total
from zcomm.errors import GroupError

f = np.float32


@pytest.fixture
def restless():
    """Threads that take turns as often as Python can, so that a race has many chances."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*programs: Callable[[], None]) -> None:
    """Run programs at once; raise what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(program):
        try:
            program()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AMPLE_S)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_a_communicator_for_each_thread(restless):
    def of_rank(transport):
        comms = [Communicator(transport, "raw"), Communicator(transport, "raw")]

        def calls(number):
            for step in range(40):
                x = np.full(100 + 50 * number + step, comms[number].rank + number, f)
                comms[number].all_reduce(x)
                assert (x == 3 + 3 * number).all()

        in_threads(lambda: calls(0), lambda: calls(1))

    local.run(3, of_rank)


def test_threads_that_share_a_communicator_are_served_one_at_a_time(restless):
    """Equal calls, so that their order does not matter; synchronous and asynchronous ones mixed."""

    def program(comm):
        def calls():
            for step in range(40):
                x = np.ones(300, f)
                work = comm.all_reduce(x, async_op=step % 2 == 1)
                if work is not None:
                    work.wait()
                assert (x == 3).all()

        in_threads(calls, calls, calls)
        assert comm.stats()["all_reduce"].calls == 120

    forms.run("3", program, codec="raw", check="never")


def test_a_work_may_be_waited_for_by_many_threads():
    def program(comm):
        x = np.ones(50_000, f)
        work = comm.all_reduce(x, codec="raw", async_op=True)
        in_threads(*[lambda: work.wait()] * 5)
        assert (x == 2).all()

    forms.run("2", program)


def test_counts_are_exact_whichever_threads_made_them_go_up(restless):
    """Messages to and from every peer at once, each peer on threads of its own, beside asynchronous collectives."""
    n, rounds = 333, 30

    def program(comm):
        def messages(peer):
            for _ in range(rounds):
                receiving = comm.recv(came := np.empty(n, f), peer, async_op=True)
                comm.send(np.full(n, comm.rank, f), peer)
                receiving.wait()
                assert np.allclose(came, peer, rtol=0.01)

        def collectives():
            for work in [comm.all_reduce(np.ones(5000, f), async_op=True) for _ in range(rounds)]:
                work.wait()

        before = comm._transport.wire_bytes_sent
        peers = [rank for rank in range(comm.size) if rank != comm.rank]
        in_threads(collectives, *(lambda peer=peer: messages(peer) for peer in peers))
        stats = comm.stats()
        nbytes = zcomm.codec("int8").nbytes(n)
        assert stats["send"].calls == stats["recv"].calls == rounds * len(peers)
        assert stats["send"].wire_bytes == nbytes * rounds * len(peers)
        assert stats["send"].raw_bytes == 4 * n * rounds * len(peers)
        assert total(stats).wire_bytes == comm._transport.wire_bytes_sent - before

    forms.run("4", program, check="never", chunk_elems=512, one_shot_bytes=0)


# -- after close ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["1", "2", "2x2"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_call_after_close_is_refused_and_counts_stay(placement, asynchronous):
    def program(comm):
        comm.all_reduce(np.ones(9, f))
        before = comm.stats()
        comm.close()
        for form in forms.FORMS.values():
            case = form(comm, np.ones(4 * comm.size, f), "sum", np.copy)
            with pytest.raises(GroupError, match=r"is closed; make a new one"):
                case.call(async_op=asynchronous)
        if comm.size > 1:
            for call in (comm.send, comm.recv):
                with pytest.raises(GroupError, match="closed"):
                    call(np.ones(4, f), (comm.rank + 1) % comm.size, async_op=asynchronous)
        comm.close()
        assert comm.stats() == before
        assert comm._conductor.scratch.free_bytes == comm._conductor.scratch.used_bytes == 0

    forms.run(placement, program)


def test_close_finishes_what_is_in_flight():
    def program(comm):
        xs = [np.full(2000, step, f) for step in range(20)]
        works = [comm.all_reduce(x, codec="raw", async_op=True) for x in xs]
        comm.close()
        assert all(work.is_completed() and work.exception() is None for work in works)
        assert all((x == 3 * step).all() for step, x in enumerate(xs))

    forms.run("3", program, one_shot_bytes=0)


def test_a_closed_communicator_leaves_no_thread_and_no_memory():
    def of_rank(transport):
        comm = Communicator(transport, Plan("int8", one_shot_bytes=0))
        comm.all_reduce(np.ones(9000, f), async_op=True).wait()
        comm.send(np.ones(10, f), 1 - comm.rank, async_op=True)
        comm.recv(np.ones(10, f), 1 - comm.rank)
        conductor, point_to_point = comm._conductor, comm._point_to_point
        threads = [conductor._worker._thread, *(worker._thread for worker in point_to_point._workers.values())]
        gone = [weakref.ref(each) for each in (comm, conductor, conductor.scratch, *conductor.scratch._free)]
        comm.close()
        assert not any(thread is not None and thread.is_alive() for thread in threads)
        del comm, conductor, point_to_point
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)

    local.run(2, of_rank)


def test_a_communicator_in_a_with_statement_is_closed_also_by_an_error():
    def of_rank(transport):
        with pytest.raises(ZeroDivisionError), Communicator(transport) as comm:
            raise ZeroDivisionError
        with pytest.raises(GroupError, match="closed"):
            comm.all_reduce(np.ones(3, f))

    local.run(2, of_rank)


def test_one_communicator_closed_leaves_the_other_over_the_same_ranks():
    def of_rank(transport):
        first, second = Communicator(transport, "raw"), Communicator(transport, "raw")
        works = [second.all_reduce(np.ones(9, f), async_op=True) for _ in range(3)]
        first.close()
        for work in works:
            work.wait()
        second.all_reduce(x := np.ones(9, f))
        assert (x == 2).all()
        second.close()

    local.run(2, of_rank)


# -- over gloo and MPI ------------------------------------------------------------------------------------------------


def check_threads_over_gloo() -> None:
    """Two threads with a group each, and one communicator that is closed while the other goes on."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1, 2, 3]) for _ in range(2)]
    comms = [Communicator(group, "int8") for group in groups]

    def calls(number):
        for step in range(15):
            x = torch.full((2000 + 100 * number + step,), float(dist.get_rank() + number))
            comms[number].all_reduce(x, "sum", "raw")
            assert (x == 6 + 4 * number).all()
            zcomm.all_reduce(x, "avg", group=groups[number], codec="int4")
            assert torch.allclose(x, torch.full_like(x, 6.0 + 4 * number), rtol=0.01)

    in_threads(lambda: calls(0), lambda: calls(1))
    comms[0].close()
    with pytest.raises(GroupError, match="closed"):
        comms[0].all_reduce(torch.ones(3))
    comms[1].all_reduce(y := torch.ones(3), codec="raw")
    assert (y == 4).all()


def test_threads_with_a_group_each_over_gloo(torch_world):
    torch_world.run(check_threads_over_gloo)


FORKING = """
import atexit, os, signal, threading
import numpy as np
import zcomm

late, forked = threading.Event(), threading.Event()

def program(transport):
    comm = zcomm.Communicator(transport)
    comm.all_reduce(np.ones(99, np.float32))
    if transport.rank == 1:
        late.wait()
    x = np.full(99, 1.0 + transport.rank, np.float32)
    works = [comm.all_reduce(x, codec="raw", async_op=True), comm.all_reduce(x * 1, async_op=True)]
    if transport.rank == 0:
        child = os.fork()
        if not child:
            signal.alarm(180)  # ends a child that hangs
            calls = [work.wait for work in works]
            calls += [lambda: comm.all_reduce(x), lambda: comm.all_reduce(x, async_op=True), lambda: comm.send(x, 1)]
            for call in calls:
                try:
                    call()
                except zcomm.errors.GroupError as error:
                    assert "forked" in str(error), error
                else:
                    os._exit(1)
            comm.close()
            atexit._run_exitfuncs()
            os._exit(0)
        late.set()
        assert os.waitpid(child, 0)[1] == 0
    for work in works:
        work.wait()
    assert (x == 3).all()
    comm.close()

zcomm.local.run(2, program)
"""


def test_the_child_of_a_fork_is_told_that_the_communicator_is_its_parent_s():
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=AMPLE_S, check=False)

    assert done.returncode == 0, done.stderr


def check_a_fork_over_gloo() -> None:
    """Also calls that would make a communicator first are refused: over the parent's sockets they would end its run."""
    import torch
    import torch.distributed as dist

    fresh = dist.new_group([0, 1, 2, 3])  # no communicator is over it yet
    zcomm.all_reduce(torch.ones(9))
    child = os.fork()
    if not child:
        signal.alarm(180)  # ends a child that hangs
        x, told = torch.ones(9), ["none"]
        try:
            calls = (
                lambda group: zcomm.all_reduce(x, group=group),
                lambda group: zcomm.ops.all_reduce(x, group=group),
                lambda group: zcomm.ddp.State("int8", group).communicator,
                Communicator,
            )
            told = [refusal(call, group) for call in calls for group in (None, fresh)]
        finally:
            os._exit(0 if all("forked" in each for each in told) else 1)
    status = os.waitpid(child, 0)[1]
    zcomm.all_reduce(x := torch.full((9,), dist.get_rank() + 1.0), group=fresh, codec="raw")
    assert (x == 10).all()
    assert status == 0


def refusal(call, group) -> str:
    try:
        call(group)
    except GroupError as error:
        return str(error)
    return "none"


def test_the_child_of_a_fork_is_told_that_gloo_s_group_is_its_parent_s(torch_world):
    torch_world.run(check_a_fork_over_gloo)


def check_threads_over_mpi() -> None:
    from mpi4py import MPI

    comms = [zcomm.mpi.Comm(MPI.COMM_WORLD, "raw") for _ in range(2)]

    def calls(number):
        for step in range(15):
            x = np.full(3000 + step, comms[number].rank + number, f)
            comms[number].Allreduce(MPI.IN_PLACE, x)
            assert (x == 6 + 4 * number).all()

    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        in_threads(lambda: calls(0), lambda: calls(1))
    for comm in comms:
        comm.close()


def test_threads_with_a_communicator_each_over_mpi(mpi_world):
    mpi_world.run(check_threads_over_mpi)
