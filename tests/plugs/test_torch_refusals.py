"""zcomm.<torch.distributed's name> refuses what cannot be done: alike on every rank, before a byte moves."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch_cases import group_of

import zcomm
from zcomm.errors import (
    BufferError,
    CodecError,
    GroupError,
    PeerTimeout,
    PlanError,
    ReduceOpError,
    TransportError,
)
from zcomm.plugs import torch_calls
from zcomm.plugs.torch_work import TorchWork
from zcomm.work import Work


def check_refusals() -> list[str]:
    """Every refusal's message; nothing may have travelled, and the next call must work."""
    full, part = torch.ones(40), torch.ones(10)
    before = torch_calls.communicator()._transport.wire_bytes_sent
    told = []
    for kind, call in [
        (CodecError, lambda: zcomm.all_reduce(full, codec="int9")),
        (CodecError, lambda: zcomm.all_reduce(full, codec="int8:0")),
        (CodecError, lambda: zcomm.all_reduce(full, codec="nf4")),
        (BufferError, lambda: zcomm.all_reduce(torch.ones(4, dtype=torch.int32), codec="int8")),
        (BufferError, lambda: zcomm.all_reduce(torch.ones(4, dtype=torch.bool), codec="int8")),
        (BufferError, lambda: zcomm.all_reduce(torch.ones(4, dtype=torch.complex64), codec="int8")),
        (BufferError, lambda: zcomm.all_reduce(torch.ones(4).to(torch.float8_e4m3fn), codec="int8")),
        (BufferError, lambda: zcomm.all_reduce(torch.ones(4, device="meta"), codec="int8")),
        (BufferError, lambda: zcomm.all_reduce(torch.ones(4).to_sparse(), codec="int8")),
        (BufferError, lambda: zcomm.all_reduce(torch.ones(1).expand(4), codec="int8")),
        (BufferError, lambda: zcomm.all_reduce([1.0, 2.0], codec="int8")),
        (ReduceOpError, lambda: zcomm.all_reduce(full, dist.ReduceOp.MAX, codec="int8")),
        (ReduceOpError, lambda: zcomm.all_reduce(full, dist.ReduceOp.PRODUCT, codec="int8")),
        (ReduceOpError, lambda: zcomm.all_reduce(full, "median", codec="int8")),
        (BufferError, lambda: zcomm.all_gather_single(torch.empty(39), part, codec="int8")),
        (BufferError, lambda: zcomm.all_gather_single(torch.empty(40).bfloat16(), part, codec="int8")),
        (BufferError, lambda: zcomm.all_gather_single(torch.empty(40, device="meta"), part, codec="int8")),
        (BufferError, lambda: zcomm.all_gather_single(full, full[5:15], codec="int8")),
        (BufferError, lambda: zcomm.reduce_scatter_single(torch.empty(9), full, codec="int8")),
        (BufferError, lambda: zcomm.reduce_scatter_single(torch.empty(10), torch.ones(41), codec="int8")),
        (GroupError, lambda: zcomm.all_reduce(full, group="world", codec="int8")),
        (BufferError, lambda: zcomm.all_to_all_single(torch.empty(40), full, 10, 10)),
        (BufferError, lambda: zcomm.all_to_all_single(torch.empty(40), full, [10.0] * 4, [10.0] * 4)),
        (BufferError, lambda: zcomm.all_to_all_single(torch.empty(40), full, "abcd", "abcd")),
        (
            BufferError,
            lambda: zcomm.all_to_all_single(torch.empty(0, 5), torch.empty(0, 5), [1, 0, 0, 0], [1, 0, 0, 0]),
        ),
        (BufferError, lambda: zcomm.all_to_all_single(None, full, [10] * 4, [10] * 4)),
        (BufferError, lambda: zcomm.gather(part, torch.empty(4, 10), dist.get_rank())),
        (BufferError, lambda: zcomm.scatter(part, torch.empty(4, 10), dist.get_rank())),
    ]:
        with pytest.raises(kind) as caught:
            call()
        told.append(str(caught.value))
    assert torch_calls.communicator()._transport.wire_bytes_sent == before
    x = torch.ones(5)
    zcomm.all_reduce(x, codec="int8")
    assert torch.allclose(x, torch.full((5,), 4.0), rtol=0.01)
    return told


def test_bad_arguments_are_refused_alike_everywhere_before_a_byte_moves(torch_world):
    by_rank = torch_world.run(check_refusals)

    assert by_rank.count(by_rank[0]) == len(by_rank)
    told = by_rank[0]
    assert "int8" in told[0]
    assert "bf16" in told[0]  # the known spellings
    assert "int32" in told[3]
    assert "torch.distributed" in told[3]
    assert "meta" in told[7]
    assert "SUM, AVG or PREMUL_SUM" in told[11]
    assert "39" in told[14]
    assert "40" in told[14]


def check_under_fake_tensor_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, known = torch.ones(1000), zcomm.Communicator(None, "raw")
    known.all_reduce(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for call in (
            lambda: known.all_reduce(x),
            lambda: known.send(x, (known.rank + 1) % known.size),
            lambda: zcomm.Communicator(None, "int8"),
        ):
            with pytest.raises(TransportError, match="FakeTensorMode"):
                call()
    known.all_reduce(x)
    assert x.tolist() == [16.0] * 1000


def test_a_call_that_would_move_no_bytes_is_refused(torch_world):
    torch_world.run(check_under_fake_tensor_mode)


def check_stranger() -> str | None:
    group = group_of(2)
    if dist.get_rank() < 2:
        return None
    with pytest.raises(GroupError) as caught:
        zcomm.all_reduce(torch.ones(4), group=group, codec="int8")
    return str(caught.value)


def test_a_rank_outside_the_group_is_told_so(torch_world):
    told = torch_world.run(check_stranger)

    assert "not in" in told[2]


def test_before_init_process_group_is_a_clear_error():
    program = textwrap.dedent("""
        import torch, zcomm
        try:
            zcomm.all_reduce(torch.ones(3), codec="int8")
        except RuntimeError as e:
            print(e)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "init_process_group" in done.stdout, done.stderr


def test_a_world_of_one_under_a_launcher_of_two_is_noticed():
    program = textwrap.dedent("""
        import os, torch, torch.distributed as dist, zcomm
        os.environ["WORLD_SIZE"] = "2"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            zcomm.all_reduce(torch.ones(3), codec="int8")
        except zcomm.errors.GroupError as e:
            print(e)
        os.environ["WORLD_SIZE"] = "two"  # says nothing
        zcomm.all_reduce(alone := torch.ones(3), codec="int8")
        print(alone.tolist())
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "launcher started 2" in done.stdout, done.stderr
    assert "[1.0, 1.0, 1.0]" in done.stdout, done.stderr


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_views_that_are_not_their_memory_are_read_right_or_refused():
    base = torch.arange(6.0)
    for x, wanted in [
        (torch._neg_view(base.clone()), -base),
        (torch.randn(6, dtype=torch.complex64).conj().imag, None),
    ]:
        wanted = x.clone() if wanted is None else wanted
        results = zcomm.local.run(2, _gather_view, x)
        assert all(torch.equal(result, wanted.repeat(2)) for result in results)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    for bad in (freed, torch._to_functional_tensor(torch.ones(4)), torch.ones(4, 4).to_sparse_csr()):
        with pytest.raises(BufferError):
            zcomm.local.run(1, _gather_view, bad)
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=torch.jagged)
    for bad in (ragged, ragged.transpose(1, 2), jagged):
        with pytest.raises(BufferError, match=r"nested tensor|a NestedTensor"):
            zcomm.local.run(1, _gather_view, bad)
    with pytest.raises(BufferError, match=r"may be under way; pass the plain tensor: \.wait"):
        zcomm.local.run(1, _gather_view, AsyncCollectiveTensor(torch.ones(4)))


def _gather_view(transport, x):
    out = torch.empty(2 * x.numel()) if transport.size == 2 else torch.empty(x.numel())
    zcomm.Communicator(transport, "raw").all_gather_single(out, x)
    return out


def test_outputs_that_overlap_themselves_or_each_other_are_refused():
    def program(transport):
        comm = zcomm.Communicator(transport, "raw")
        x = torch.ones(3)
        for call in (
            lambda: comm.all_gather_single(torch.zeros(7).unfold(0, 3, 1)[:2], x),
            lambda: comm.all_reduce_coalesced([x, x]),
            lambda: comm.all_gather([x, x[:3]], torch.ones(3)),
        ):
            with pytest.raises(BufferError):
                call()

    zcomm.local.run(2, program)


def test_operators_that_are_not_are_refused():
    for make in (
        lambda: zcomm.ReduceOp("MAX"),
        lambda: zcomm.ReduceOp("avg"),
        lambda: zcomm.ReduceOp("PREMUL_SUM", "3"),
        lambda: zcomm.ReduceOp("SUM", 2.0),
        lambda: zcomm.premul_sum("x"),
        lambda: zcomm.premul_sum(None),
    ):
        with pytest.raises(ReduceOpError):
            make()


def test_a_work_is_waited_for_by_every_name_that_torch_has_for_it():
    for wait in (TorchWork.wait, TorchWork.synchronize, TorchWork.block_current_stream):
        end = threading.Event()
        work = Work(lambda end=end: end.wait() and None)
        thread = threading.Thread(target=work.run)
        thread.start()
        threading.Timer(0.05, end.set).start()

        wait(TorchWork(work, torch.ones(1)))

        assert end.is_set()
        thread.join()


def test_a_work_waits_no_longer_than_it_is_told():
    stuck = TorchWork(Work(lambda: None), torch.ones(1))  # nobody carries it out

    for timeout in (0.01, timedelta(milliseconds=10)):
        with pytest.raises(PeerTimeout, match=r"0\.01 s"):
            stuck.wait(timeout)
    with pytest.raises(PlanError, match="'10 ms'"):
        stuck.wait("10 ms")
