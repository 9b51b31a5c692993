"""A rank that dies or fails while others wait for it: an error that names it, soon, on every other rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from impatience import AMPLE_S, shorten
from torch_world import TorchWorld

import zcomm
from zcomm.errors import PeerTimeout, TransportError
from zcomm.plan import Plan


@pytest.fixture
def doomed_world():
    world = TorchWorld(3)
    yield world
    world.close()


def die_on_second_call() -> str | None:
    comm = zcomm.Communicator(None, Plan("int8", timeout_s=AMPLE_S))
    x = torch.arange(100_000, dtype=torch.float32)
    comm.all_reduce(x)
    if dist.get_rank() == 2:
        os._exit(9)
    with pytest.raises(TransportError) as caught:
        for _ in range(3):
            comm.all_reduce(x)
    assert not isinstance(caught.value, PeerTimeout)  # it heard of the death, and did not wait for the timeout
    return str(caught.value)


def test_a_killed_rank_is_an_error_within_seconds(doomed_world):
    for pipe in doomed_world._pipes:
        pipe.send((die_on_second_call, ()))

    messages: list[str] = []
    for rank in (0, 1):
        assert doomed_world._pipes[rank].poll(AMPLE_S)
        good, told = doomed_world._pipes[rank].recv()
        assert good, told
        messages.append(told)
        assert "all_reduce number" in told
    complaints = [told.split(" as int8: ")[1] for told in messages]
    assert any("rank 2" in complaint for complaint in complaints)  # somebody names the dead one


def raise_in_an_asynchronous_call() -> str | None:
    comm = zcomm.Communicator(None, Plan("int8"))
    x = torch.ones(1000)
    if dist.get_rank() == 2:
        return None  # does not call
    shorten(comm, 1.0)
    work = comm.all_reduce(x, async_op=True)
    with pytest.raises(TransportError) as caught:
        work.wait()
    assert work.is_completed()
    assert isinstance(work.exception(), TransportError)
    return str(caught.value)


def test_an_asynchronous_call_raises_at_wait(doomed_world):
    told = doomed_world.run(raise_in_an_asynchronous_call)

    for message in told[:2]:
        assert "all_reduce number 1 on rank" in message
