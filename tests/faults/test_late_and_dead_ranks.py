"""A rank that is late, fails or dies while others wait for it: an error on every rank that needs it, which names the
collective, its number, the group and a rank; and afterwards nothing hangs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext

import forms
import numpy as np
import pytest
from impatience import AMPLE_S, shorten, waiting_in_vain

import zcomm
from zcomm import Communicator, Plan, local
from zcomm.errors import PeerTimeout, TransportError

SHORT_S = 0.1  # that is waited in vain
ODD = 1
NOT_BY_ALL = (  # forms in which not every rank needs rank 1; its shards of uneven ones are empty
    *("broadcast", "scatter_single", "scatter uneven", "reduce", "gather_single", "gather uneven"),
    "all_gather_single uneven",
)
BY_ALL = tuple(name for name in forms.FORMS if name not in NOT_BY_ALL)


def late(placement: str, name: str, asynchronous: bool, comes_after: bool) -> list[str]:
    """What each rank was told of its second call, which rank 1 does not make, or only when all others have given up."""
    size = forms.PLACEMENTS[placement].size
    in_two_hops = forms.PLACEMENTS[placement].has_two_levels and name != "gather_single"
    gave_up = threading.Barrier(size)
    told = [""] * size

    def main(transport):
        comm = Communicator(transport, Plan("int4", timeout_s=AMPLE_S, one_shot_bytes=0), forms.PLACEMENTS[placement])
        forms.carry_out(forms.FORMS[name](comm, _values(comm), "avg", np.copy))
        patience: AbstractContextManager = waiting_in_vain(comm, {ODD}, SHORT_S)
        if comm.rank == ODD or in_two_hops:  # where those who gave up are awaited, too
            patience = nullcontext(shorten(comm, SHORT_S))
        if comm.rank == ODD:
            gave_up.wait(AMPLE_S)
        if comm.rank != ODD or comes_after:
            try:
                with patience:
                    forms.carry_out(forms.FORMS[name](comm, _values(comm), "avg", np.copy), asynchronous)
            except TransportError as error:
                told[comm.rank] = f"{type(error).__name__}: {error}"
        if comm.rank != ODD:
            gave_up.wait(AMPLE_S)
        comm.close()
        with Communicator(transport, "raw") as again:  # the world is unharmed, and old messages are not taken for new
            x = np.full(5000, comm.rank + 1.0, np.float32)
            again.all_reduce(x)
            assert (x == size * (size + 1) / 2).all()

    local.run(size, main)
    return told


@pytest.mark.parametrize(
    ("name", "asynchronous"), [*((name, False) for name in BY_ALL), *((name, True) for name in BY_ALL[:4])]
)
@pytest.mark.parametrize("placement", ["3", "2x2"])
def test_a_rank_that_does_not_come_is_named_by_every_other(placement, name, asynchronous):
    size = forms.PLACEMENTS[placement].size

    told = late(placement, name, asynchronous, comes_after=False)

    for rank, message in enumerate(told):
        if rank != ODD:
            assert message.startswith("PeerTimeout: ")
            assert f" number 2 on rank {rank} of local world of {size}, " in message
            assert " float32 as int4: " in message
            assert f"within {SHORT_S} s; check that every rank is alive and made the same call" in message
    complaints = [message.split("nothing came from ")[1] for rank, message in enumerate(told) if rank != ODD]
    assert any(complaint.startswith(f"rank {ODD} ") for complaint in complaints)
    if not forms.PLACEMENTS[placement].has_two_levels:  # in two hops, a victim may be named: docs/sharp-bits.md
        assert all(complaint.startswith(f"rank {ODD} ") for complaint in complaints)


@pytest.mark.parametrize("name", NOT_BY_ALL)
@pytest.mark.parametrize("placement", ["3", "2x2"])
def test_where_only_some_need_the_late_rank_only_those_complain(placement, name):
    told = late(placement, name, asynchronous=False, comes_after=False)

    assert all(message == "" or message.startswith("PeerTimeout") for message in told)
    if name in ("reduce", "gather_single") and forms.PLACEMENTS[placement].size // 2 != ODD:
        assert any(f"nothing came from rank {ODD}" in message for message in told)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single"])
@pytest.mark.parametrize("placement", ["3", "2x2"])
def test_a_rank_that_wakes_after_the_others_gave_up_hangs_nobody(placement, name):
    """It may succeed, as they sent their part before they gave up, or time out; then all make a new communicator."""
    told = late(placement, name, asynchronous=False, comes_after=True)

    assert all(told[rank].startswith("PeerTimeout") for rank in range(len(told)) if rank != ODD)
    assert told[ODD] == "" or told[ODD].startswith("PeerTimeout")


def _values(comm) -> np.ndarray:
    return (np.arange(700 * comm.size) % 9 + comm.rank).astype(np.float32)


@pytest.mark.parametrize("check", ["first", "always", "never"])
def test_a_rank_that_is_late_for_a_call_that_is_compared(check):
    def main(transport):
        comm = Communicator(transport, Plan("int8", check=check, timeout_s=AMPLE_S))
        if transport.rank == ODD:
            return ""
        with waiting_in_vain(comm, {ODD}, SHORT_S), pytest.raises(PeerTimeout) as caught:
            comm.all_reduce(np.ones(9, np.float32))
        return str(caught.value)

    for rank, told in enumerate(local.run(3, main)):
        if rank != ODD:
            assert f"all_reduce number 1 on rank {rank}" in told
            assert f"nothing came from rank {ODD}" in told


def test_a_rank_that_is_late_where_a_communicator_is_made():
    def main(transport):
        if transport.rank == ODD:
            return ""
        with pytest.raises(PeerTimeout) as caught:
            Communicator(transport, Plan(timeout_s=SHORT_S))
        return str(caught.value)

    for rank, told in enumerate(local.run(3, main)):
        if rank != ODD:
            assert told.startswith(f"making a communicator on rank {rank} of local world of 3: nothing came from rank")
            assert told.endswith("; check that every rank is alive and makes it too, by hand or at its first call")


def test_works_in_flight_when_a_rank_is_lost_all_end_and_close_returns():
    def main(transport):
        comm = Communicator(transport, Plan("int8", timeout_s=AMPLE_S, one_shot_bytes=0))
        comm.all_reduce(np.ones(3000, np.float32))
        if transport.rank == ODD:
            return 0
        shorten(comm, SHORT_S)
        works = [comm.all_reduce(np.ones(3000, np.float32), async_op=True) for _ in range(6)]
        for work in reversed(works):
            with pytest.raises(PeerTimeout, match="all_reduce number"):
                work.wait()
            assert work.is_completed()
            assert isinstance(work.exception(), PeerTimeout)
        comm.close()
        return len(works)

    assert local.run(3, main) == [6, 0, 6]


def test_a_rank_that_fails_is_named_with_its_failure():
    told = []

    def main(transport):
        comm = Communicator(transport, Plan("int8", timeout_s=AMPLE_S))
        if transport.rank == ODD:
            raise ZeroDivisionError("on purpose")
        try:
            comm.all_reduce(np.ones(9, np.float32))
        except TransportError as error:
            told.append(str(error))

    with pytest.raises(ZeroDivisionError):
        local.run(3, main)

    assert len(told) == 2
    assert all(
        "all_reduce number 1" in message and f"rank {ODD} failed: ZeroDivisionError" in message for message in told
    )


# -- processes that are killed ----------------------------------------------------------------------------------------


@pytest.fixture
def doomed_world():
    from torch_world import TorchWorld

    world = TorchWorld(3)
    yield world
    world.close()


def die_on_second_call() -> list[str]:
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1, 2])
    comms = [Communicator(each, Plan("int8", timeout_s=AMPLE_S)) for each in (None, group)]
    x = torch.arange(100_000, dtype=torch.float32)
    for comm in comms:
        comm.all_reduce(x)
    if dist.get_rank() == 2:
        os._exit(9)
    told = []
    for comm, asynchronous in zip(comms, (False, True), strict=True):
        with pytest.raises(TransportError) as caught:
            for _ in range(3):
                work = comm.all_reduce(x, async_op=asynchronous)
                if asynchronous:
                    work.wait()
        assert not isinstance(caught.value, PeerTimeout)  # it heard of the death, and did not wait for the timeout
        told.append(str(caught.value))
    return told


def test_a_killed_rank_is_an_error_at_once(doomed_world):
    for pipe in doomed_world._pipes:
        pipe.send((die_on_second_call, ()))

    complaints: list[str] = []
    for rank in (0, 1):
        assert doomed_world._pipes[rank].poll(AMPLE_S)
        good, told = doomed_world._pipes[rank].recv()
        assert good, told
        for message in told:
            assert "all_reduce number" in message
            assert "100000 float32" in message
            complaints.append(message.split(" as int8: ")[1])
    assert any("rank 2" in complaint for complaint in complaints)  # somebody names the dead one


def die_when_one_waits_and_the_other_has_yet_to_call() -> str:
    import torch
    import torch.distributed as dist

    comm = Communicator(None, Plan("int8", timeout_s=AMPLE_S, one_shot_bytes=0))
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(1000)
    comm.all_reduce(x)
    if dist.get_rank() == 2:
        store.wait(["called"])
        os._exit(9)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), 2)  # ends when that one has died
    before = comm._transport.wire_bytes_sent
    with pytest.raises(TransportError) as caught:
        work = comm.all_reduce(x, async_op=True)
        if dist.get_rank() == 0:
            while comm._transport.wire_bytes_sent == before:
                time.sleep(0.01)
            store.set("called", "")
        work.wait()
    assert not isinstance(caught.value, PeerTimeout)
    return str(caught.value)


def test_who_waits_for_a_rank_that_heard_of_a_death_hears_of_it_too(doomed_world):
    """Rank 1 does not begin its call, as rank 2 is dead; rank 0, which asks rank 1 first, is not left waiting."""
    for pipe in doomed_world._pipes:
        pipe.send((die_when_one_waits_and_the_other_has_yet_to_call, ()))

    for rank in (0, 1):
        assert doomed_world._pipes[rank].poll(AMPLE_S)
        good, told = doomed_world._pipes[rank].recv()
        assert good, told
        assert "all_reduce number 2" in told


def late_over_gloo() -> str:
    import torch
    import torch.distributed as dist

    comm = Communicator(dist.new_group([0, 1, 2, 3]), Plan("int8"))
    if dist.get_rank() == 2:
        return ""  # does not call
    shorten(comm, 1.0)
    work = comm.all_reduce(torch.ones(1000), async_op=True)
    with pytest.raises(TransportError) as caught:
        work.wait()
    assert work.is_completed()
    assert isinstance(work.exception(), TransportError)
    return str(caught.value)


def test_an_asynchronous_call_raises_at_wait(torch_world):
    told = torch_world.run(late_over_gloo)

    for rank in (0, 1, 3):
        assert f"all_reduce number 1 on rank {rank}" in told[rank]


KILLED = """
import os
from mpi4py import MPI
import numpy, zcomm
comm = zcomm.mpi.Comm(MPI.COMM_WORLD, codec="int8", plan=zcomm.Plan(timeout_s=200.0))
x = numpy.ones(1000, numpy.float32)
comm.Allreduce(MPI.IN_PLACE, x)
if comm.rank == 1:
    os._exit(9)
comm.Allreduce(MPI.IN_PLACE, x)
"""


def test_a_killed_mpi_rank_ends_the_job(mpi_world):
    """MPI's launcher ends all ranks when one dies: nobody waits."""
    from mpi_world import environment, launch

    command = launch(3, sys.executable, "-c", KILLED)

    done = subprocess.run(command, env=environment(), capture_output=True, timeout=AMPLE_S, check=False)

    assert done.returncode != 0


def late_over_mpi() -> str:
    from mpi4py import MPI

    comm = zcomm.mpi.Comm(MPI.COMM_WORLD, "int8")
    comm.Allreduce(MPI.IN_PLACE, np.ones(500, np.float32))
    told = ""
    if comm.rank != 3:
        shorten(comm, 0.5)
        with pytest.raises(PeerTimeout) as caught:
            comm.Reduce_scatter_block(np.ones(400, np.float32), np.ones(100, np.float32))
        told = str(caught.value)
    MPI.COMM_WORLD.Barrier()
    comm.close()
    return told


def test_a_late_mpi_rank_is_named(mpi_world):
    told = mpi_world.run(late_over_mpi)

    assert all(f"reduce_scatter number 2 on rank {rank}" in told[rank] for rank in range(3))
    assert any("nothing came from rank 3 within 0.5 s" in message for message in told)
