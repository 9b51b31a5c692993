"""Ranks that call differently, disagree or do not come: an error on every rank within the timeout, and who it was."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from impatience import shorten, waiting_in_vain
from torch_cases import TWO_BY_TWO

import zcomm
from zcomm.errors import (
    MismatchError,
    PeerTimeout,
    TransportError,
)
from zcomm.topology import Topology


def check_late_rank() -> str | None:
    group, callers = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2])
    comm = zcomm.Communicator(group, "int8")
    comm.all_reduce(torch.ones(100))
    shorten(comm, 3.0)
    if dist.get_rank() == 3:
        return None  # does not call
    dist.barrier(callers)
    with pytest.raises((PeerTimeout, TransportError)) as caught:
        comm.all_reduce(torch.ones(100))
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_within_the_timeout(torch_world):
    told = torch_world.run(check_late_rank)

    assert any("rank 3" in message for message in told[:3])
    for message in told[:3]:
        assert "all_reduce number 2" in message
        assert "100 float32 as int8" in message


def check_disagreement(field: str) -> str:
    rank = dist.get_rank()
    plan = zcomm.Plan("int4" if field == "plan" and rank == 2 else "int8")
    topology = None
    if field == "topology":
        topology = TWO_BY_TWO if rank != 1 else Topology(nodes=1, ranks_per_node=4)
    with pytest.raises(zcomm.errors.MismatchError) as caught:
        zcomm.Communicator(None, plan, topology)
    return str(caught.value)


@pytest.mark.parametrize(("field", "odd"), [("plan", 2), ("topology", 1)])
def test_ranks_that_disagree_fail_everywhere_and_are_named(torch_world, field, odd):
    told = torch_world.run(check_disagreement, field)

    assert told.count(told[0]) == 4
    assert f"rank {odd} " in told[0]
    assert field in told[0]


def check_different_calls(difference: str, check: str) -> str:
    """Rank 2 calls differently; everybody must hear of it, and nobody may be aborted."""
    group = dist.new_group([0, 1, 2, 3])
    comm = zcomm.Communicator(group, zcomm.Plan("int8", check=check))
    if check == "never":
        shorten(comm, 1.0)
    odd = dist.get_rank() == 2
    full, half = torch.ones(1000), torch.ones(500)
    if check == "always":  # so that both kinds of call are known already
        comm.all_reduce(full.clone())
        comm.all_reduce(half.clone())
    with pytest.raises((MismatchError, TransportError)) as caught:
        if difference == "collective" and odd:
            comm.reduce_scatter_single(torch.empty(250), full)
        elif difference == "count" and odd:
            comm.all_reduce(half)
        elif difference == "padded count" and odd:
            comm.all_reduce(torch.ones(1001))  # as many wire bytes as 1000
        elif difference == "dtype" and odd:
            comm.all_reduce(full.bfloat16())
        elif difference == "op" and odd:
            comm.all_reduce(full, "avg")
        elif difference == "codec" and odd:
            comm.all_reduce(full, codec="int8:512")
        else:
            comm.all_reduce(full)
    assert isinstance(caught.value, MismatchError) == (check != "never")
    return str(caught.value)


DIFFERENCES = ["collective", "count", "padded count", "dtype", "op", "codec"]


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("check", ["first", "always"])
def test_ranks_that_call_differently_fail_alike_and_name_the_odd_one(torch_world, difference, check):
    told = torch_world.run(check_different_calls, difference, check)

    assert told.count(told[0]) == 4
    assert "rank 2 has " + difference.removeprefix("padded ") in told[0]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_unchecked_calls_that_differ_time_out_and_abort_nobody(torch_world, difference):
    for told in torch_world.run(check_different_calls, difference, "never"):
        assert "number 1 on rank" in told
        assert "the same call" in told


def check_retry_after_a_mismatch() -> None:
    """Ranks that disagreed once and are then put right must not wait for each other."""
    comm = zcomm.Communicator(dist.new_group([0, 1, 2, 3]), "int8")
    wrong = torch.ones(300 if dist.get_rank() == 1 else 301)
    with pytest.raises(MismatchError):
        comm.all_reduce(wrong)
    for n in (300, 301, 300):
        x = torch.arange(n, dtype=torch.float32)
        comm.all_reduce(x, codec="raw")
        assert torch.equal(x, torch.arange(n) * 4.0)


def test_a_mismatch_can_be_put_right(torch_world):
    torch_world.run(check_retry_after_a_mismatch)


def check_splits(check: str, hierarchical: bool) -> str:
    rank = dist.get_rank()
    plan = zcomm.Plan("int8", check=check, hierarchical=hierarchical)
    comm = zcomm.Communicator(dist.new_group([0, 1, 2, 3]), plan)
    sender = 3 if hierarchical else 2
    is_in_vain = check == "never" and rank == 1
    sends, receives = [100] * 4, [100] * 4
    if rank == 2:
        sends = [100, 90, 100, 100]  # rank 1 expects 100
    try:
        with waiting_in_vain(comm, {sender}, 1.0) if is_in_vain else nullcontext():
            comm.all_to_all_single(torch.empty(sum(receives)), torch.ones(sum(sends)), receives, sends)
    except (MismatchError, TransportError) as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("hierarchical", [True, False], ids=["two hops", "flat"])
def test_splits_that_do_not_match_are_named_or_time_out(torch_world, hierarchical):
    told = torch_world.run(check_splits, "first", hierarchical)
    assert told.count(told[0]) == 4
    assert "rank 2 sends 90 elements to rank 1, which expects 100" in told[0]

    told = torch_world.run(check_splits, "never", hierarchical)
    sender = 3 if hierarchical else 2  # rank 3 carries for rank 1; who it does not carry for is served
    assert [told[rank] for rank in range(4) if rank not in (1, sender)] == ["done", "done"]
    assert "number 1 on rank 1" in told[1]
    assert f"rank {sender}" in told[1]
