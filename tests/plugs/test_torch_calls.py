"""zcomm.<torch.distributed's name>: the same arguments, results by the codecs' definitions, clear refusals."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from impatience import AMPLE_S, shorten

import zcomm
from zcomm.errors import (
    BufferError,
    CodecError,
    GroupError,
    MismatchError,
    PeerTimeout,
    ReduceOpError,
    TransportError,
)
from zcomm.plugs import torch_calls
from zcomm.topology import Topology

DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}
TWO_BY_TWO = Topology(nodes=2, ranks_per_node=2)
_groups: dict[int, object] = {}


def group_of(size: int):
    """The group of the first `size` ranks, made once."""
    if size not in _groups:
        _groups[size] = dist.new_group(list(range(size)))
    return _groups[size]


def inputs(n_elems: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        torch.from_numpy(oracle.values(rank, n_elems, np.dtype(np.float32))).to(dtype)
        for rank in range(dist.get_world_size())
    ]


def topology_of(size: int) -> Topology | None:
    """What is detected for the first ranks: two on a node."""
    return {3: Topology(node_of_rank=(0, 0, 1)), 4: TWO_BY_TWO}.get(size)


# -- results ----------------------------------------------------------------------------------------------------------


def check_all_reduce(size: int, n_elems: int, codec: str) -> None:
    group = group_of(size)
    if dist.get_rank() >= size:
        return
    xs = inputs(n_elems)[:size]
    x = xs[dist.get_rank()].clone()

    assert zcomm.all_reduce(x, dist.ReduceOp.AVG, group, codec=codec) is None

    chosen = zcomm.codec(codec)
    arrays = [each.numpy() for each in xs]
    if chosen.nbytes(n_elems) * (size - 1) <= zcomm.Plan().one_shot_bytes:
        expected = oracle.one_shot_all_reduce(chosen, arrays, "AVG")
    else:
        expected = oracle.all_reduce(chosen, chosen, arrays, topology_of(size), "AVG")
    if size == 1:
        expected = xs[0].numpy()
    assert x.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "int4"])
@pytest.mark.parametrize("n_elems", [0, 1, 7, 2305, 300_001])
def test_all_reduce_over_gloo_is_the_definition(torch_world, codec, n_elems):
    for size in (1, 2, 3, 4):
        torch_world.run(check_all_reduce, size, n_elems, codec)


def check_gather_and_scatter(size: int, dtype: torch.dtype, asynchronous: bool) -> None:
    group = group_of(size)
    rank = dist.get_rank()
    if rank >= size:
        return
    codec = zcomm.codec("int8")
    shards = [x.numpy() for x in inputs(1031, dtype)[:size]]
    wholes = [x.numpy() for x in inputs(1031 * size, dtype)[:size]]
    gathered, scattered = torch.full((1031 * size,), np.nan, dtype=dtype), torch.full((1031,), np.nan, dtype=dtype)

    works = [
        zcomm.all_gather_single(gathered, torch.from_numpy(shards[rank]), group, asynchronous, codec="int8"),
        zcomm.reduce_scatter_single(
            scattered, torch.from_numpy(wholes[rank]), dist.ReduceOp.SUM, group, asynchronous, codec="int8"
        ),
    ]
    if asynchronous:
        assert all(isinstance(work, dist.Work) for work in works)
        assert works[1].get_future().wait() is scattered
        assert works[0].wait() is True
        assert all(work.is_completed() for work in works)
    else:
        assert works == [None, None]

    wanted = oracle.all_gather(codec, shards)
    sums = oracle.reduce_scatter(codec, codec, wholes, topology_of(size), "SUM")
    if size > 1:
        assert gathered.numpy().tobytes() == wanted.tobytes()
        assert scattered.numpy().tobytes() == sums[rank].tobytes()
    else:
        assert gathered.numpy().tobytes() == shards[0].tobytes()


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_gather_and_scatter_keep_dtype_and_shape(torch_world, dtype, asynchronous):
    for size in (1, 2, 3, 4):
        torch_world.run(check_gather_and_scatter, size, dtype, asynchronous)


def check_chunks(asynchronous: bool) -> None:
    """Many chunks in flight over real sockets, two hops, odd sizes."""
    rank = dist.get_rank()
    comm = zcomm.Communicator(None, zcomm.Plan("int4", chunk_elems=3000))
    codec = zcomm.codec("int4")
    xs = [x.numpy() for x in inputs(100_003)]
    shards = [x.numpy() for x in inputs(25_001)]
    reduced, gathered, scattered = torch.from_numpy(xs[rank].copy()), torch.empty(4 * 25_001), torch.empty(25_000)
    works = [
        comm.all_reduce(reduced, "avg", async_op=asynchronous),
        comm.all_gather_single(gathered, torch.from_numpy(shards[rank]), async_op=asynchronous),
        comm.reduce_scatter_single(scattered, torch.from_numpy(xs[rank][:100_000]), "sum", async_op=asynchronous),
    ]
    for work in reversed(works):
        assert (work is None) != asynchronous
        if work is not None:
            work.wait()
    assert reduced.numpy().tobytes() == oracle.all_reduce(codec, codec, xs, TWO_BY_TWO, "AVG").tobytes()
    assert gathered.numpy().tobytes() == oracle.all_gather(codec, shards).tobytes()
    wanted = oracle.reduce_scatter(codec, codec, [x[:100_000] for x in xs], TWO_BY_TWO, "SUM")[rank]
    assert scattered.numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_of_many_chunks_over_gloo_are_the_definition(torch_world, asynchronous):
    torch_world.run(check_chunks, asynchronous)


def check_torch_operators() -> None:
    xs = inputs(500)
    total = torch.stack(xs).sum(0)
    for op, wanted in [
        (dist.ReduceOp.SUM, total),
        (dist.ReduceOp.AVG, total / 4),
        (dist.ReduceOp(dist.ReduceOp.SUM), total),
        (dist._make_nccl_premul_sum(0.25), total * 0.25),
    ]:
        x = xs[dist.get_rank()].clone()
        zcomm.all_reduce(x, op, codec="raw")
        assert torch.allclose(x, wanted, rtol=1e-6, atol=1e-6)


def test_torch_s_operators_mean_what_they_mean_in_torch(torch_world):
    torch_world.run(check_torch_operators)


def check_strides() -> None:
    for view in (lambda x: x[::2], lambda x: x.t(), lambda x: x[:, 1:], lambda x: x[3, 2]):
        wholes = [x.reshape(20, 15) for x in inputs(300)]
        mine = wholes[dist.get_rank()].clone()
        zcomm.all_reduce(view(mine), codec="raw")
        expected = wholes[dist.get_rank()].clone()
        view(expected).copy_(torch.stack([view(x) for x in wholes]).sum(0))
        assert torch.allclose(mine, expected, rtol=1e-6, atol=1e-6)


def test_strided_views_are_reduced_in_place(torch_world):
    torch_world.run(check_strides)


def check_others_untouched() -> None:
    x = torch.arange(1000, dtype=torch.float32) / 7
    zcomm.all_reduce(x.clone(), codec="int2")
    plain = x.clone()
    dist.all_reduce(plain)
    assert torch.equal(plain, x * 4)
    requires_grad = torch.nn.Parameter(torch.ones(10))
    zcomm.all_reduce(requires_grad, codec="raw")
    assert requires_grad.tolist() == [4.0] * 10


def test_other_collectives_of_the_program_stay_exact(torch_world):
    torch_world.run(check_others_untouched)


TORCH_NAMES = {
    "all_gather_single": ["all_gather_single", "all_gather_into_tensor"],
    "reduce_scatter_single": ["reduce_scatter_single", "reduce_scatter_tensor"],
    "all_reduce_coalesced": ["all_reduce_coalesced"],
}


@pytest.mark.parametrize(
    "name",
    [
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "irecv",
        "isend",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "send",
    ],
)
def test_arguments_are_torch_s_with_codec_behind(name):
    theirs = next(getattr(dist, each) for each in TORCH_NAMES.get(name, [name]) if hasattr(dist, each))
    wanted = list(inspect.signature(theirs).parameters)
    ours = inspect.signature(getattr(zcomm, name)).parameters

    assert list(ours) == [*wanted, "codec"]
    assert ours["codec"].kind is inspect.Parameter.KEYWORD_ONLY


def check_other_calls() -> None:
    rank = dist.get_rank()
    xs = inputs(12)
    gathered = [torch.empty(12) for _ in range(4)]
    zcomm.all_gather(gathered, xs[rank], codec="raw")
    assert all(torch.equal(a, b) for a, b in zip(gathered, xs, strict=True))
    reduced = torch.empty(3)
    zcomm.reduce_scatter(reduced, list(xs[rank].split(3)), dist.ReduceOp.SUM, codec="raw")
    assert torch.allclose(reduced, torch.stack(xs).sum(0)[3 * rank : 3 * rank + 3], rtol=1e-6, atol=1e-6)

    ours, theirs = torch.empty(4, 3), torch.empty(4, 3)
    zcomm.all_to_all_single(ours, xs[rank].view(4, 3), codec="raw")
    dist.all_to_all_single(theirs, xs[rank].view(4, 3))
    assert torch.equal(ours, theirs)
    receives = [rank] * 4  # rank r receives r rows from everybody
    uneven = torch.arange(6 * 3, dtype=torch.float32).view(6, 3) + 100 * rank
    ours, theirs = torch.empty(4 * rank, 3), torch.empty(4 * rank, 3)
    zcomm.all_to_all_single(ours, uneven, receives, [0, 1, 2, 3], codec="raw")
    dist.all_to_all_single(theirs, uneven, receives, [0, 1, 2, 3])
    assert torch.equal(ours, theirs)
    ours_list, theirs_list = ([torch.empty(3) for _ in range(4)] for _ in range(2))
    zcomm.all_to_all(ours_list, list(xs[rank].split(3)), codec="raw")
    dist.all_to_all(theirs_list, list(xs[rank].split(3)))
    assert all(torch.equal(a, b) for a, b in zip(ours_list, theirs_list, strict=True))

    x = xs[rank].clone()
    zcomm.broadcast(x, 2, codec="raw")
    assert torch.equal(x, xs[2])
    x = xs[rank].clone()
    work = zcomm.broadcast(x, group_src=3, async_op=True, codec="raw")
    assert work.wait()
    assert torch.equal(x, xs[3])
    x = xs[rank].clone()
    zcomm.reduce(x, 1, codec="raw")
    assert torch.allclose(x, torch.stack(xs).sum(0) if rank == 1 else xs[rank], rtol=1e-6, atol=1e-6)
    pair = [xs[rank].clone(), xs[rank].clone().view(3, 4).bfloat16()]
    zcomm.all_reduce_coalesced(pair, dist.ReduceOp.AVG, codec="raw")
    assert torch.allclose(pair[0], torch.stack(xs).mean(0), rtol=1e-6, atol=1e-6)
    assert pair[1].dtype == torch.bfloat16


def test_lists_splits_roots_and_coalesced_calls_do_what_torch_s_do(torch_world):
    torch_world.run(check_other_calls)


def check_messages() -> None:
    rank, group = dist.get_rank(), group_of(3)
    x = torch.arange(1000, dtype=torch.float32) + rank
    if rank == 0:
        zcomm.send(x, 2, group, codec="raw")
        zcomm.isend(x, group_dst=1, group=group, codec="int8").wait()
    elif rank < 3:
        came = torch.empty(1000)
        if rank == 2:
            assert zcomm.recv(came, 0, group, codec="raw") == 0
            assert torch.equal(came, x - 2)
        else:
            work = zcomm.irecv(came, 0, group, codec="int8")
            work.wait()
            assert torch.allclose(came, x - 1, atol=1000 / 127)
        with pytest.raises(GroupError):
            zcomm.send(came, codec="int8")
        with pytest.raises(GroupError):
            zcomm.send(came, 3, group, codec="int8")  # not in the group
        with pytest.raises(GroupError):
            zcomm.isend(came, 0, group, tag=5, codec="int8")


def test_messages_between_two_ranks(torch_world):
    torch_world.run(check_messages)


# -- refusals ---------------------------------------------------------------------------------------------------------


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
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "launcher started 2" in done.stdout, done.stderr


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


def check_splits(check: str) -> str:
    rank = dist.get_rank()
    comm = zcomm.Communicator(dist.new_group([0, 1, 2, 3]), zcomm.Plan("int8", check=check))
    if check == "never" and rank == 1:
        shorten(comm, 1.0)  # it waits in vain
    sends, receives = [100] * 4, [100] * 4
    if rank == 2:
        sends = [100, 90, 100, 100]  # rank 1 expects 100
    try:
        comm.all_to_all_single(torch.empty(sum(receives)), torch.ones(sum(sends)), receives, sends)
    except (MismatchError, TransportError) as error:
        return str(error)
    return "done"


def test_splits_that_do_not_match_are_named_or_time_out(torch_world):
    told = torch_world.run(check_splits, "first")
    assert told.count(told[0]) == 4
    assert "rank 2 sends 90 elements to rank 1, which expects 100" in told[0]

    told = torch_world.run(check_splits, "never")
    assert told[0] == told[3] == "done"  # nothing is wrong between them and the others
    assert "number 1 on rank 1" in told[1]
    assert "rank 2" in told[1]


def check_destroyed_group() -> None:
    import gc
    import threading
    import weakref

    group = dist.new_group([0, 1, 2, 3])
    comm = zcomm.Communicator(group)
    x = torch.ones(5000)
    comm.all_reduce(x, async_op=True).wait()
    zcomm.all_reduce(x, group=group, codec="int8")
    cached = weakref.ref(torch_calls.communicator(group))
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert cached() is None
    with pytest.raises(GroupError, match="destroyed"):
        comm.all_reduce(x)
    name = comm._transport.group_name
    del comm
    gc.collect()
    for thread in threading.enumerate():
        if name in thread.name:
            thread.join(AMPLE_S)
            assert not thread.is_alive(), "the worker's thread outlived its communicator"


def test_a_destroyed_group_takes_its_communicator_and_thread_with_it(torch_world):
    torch_world.run(check_destroyed_group)


def check_a_list_reused_before_wait() -> None:
    tensors = [torch.ones(10), torch.ones(3)]
    kept = list(tensors)
    work = zcomm.all_reduce_coalesced(tensors, async_op=True, codec="raw")
    tensors.clear()
    work.wait()
    assert all(bool((x == 4).all()) for x in kept)


def test_a_list_may_be_reused_before_its_call_is_complete(torch_world):
    torch_world.run(check_a_list_reused_before_wait)


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


def test_leaving_with_works_in_flight_is_a_clean_end(tmp_path):
    """Dropped works, a destroyed group, an exit status: the program ends as it would without zcomm."""
    # the barrier: both have called by then, if not completed
    for ending, status in (("", 0), ("dist.barrier(); dist.destroy_process_group()", 0), ("raise SystemExit(3)", 3)):
        store = tmp_path / f"store{len(ending)}"
        program = f"""
import sys, torch, torch.distributed as dist, zcomm
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
for _ in range(5):
    zcomm.all_reduce(torch.ones(100_000), async_op=True, codec="int8")
{ending}
"""
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(store), str(rank)],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in ranks:
            _, told = process.communicate(timeout=AMPLE_S)
            assert process.returncode == status, told


# -- memory -----------------------------------------------------------------------------------------------------------


def check_memory(calls: int) -> tuple[int, int]:

    generator = np.random.default_rng(7)  # the same sizes on every rank
    comm = zcomm.Communicator(None, "int8")
    most = 200_000
    comm.all_reduce(torch.ones(most))
    start = None
    for call in range(calls):
        comm.all_reduce(torch.ones(int(generator.integers(1, most))))
        if call == calls // 10:
            start = resident_bytes()
    grown = resident_bytes() - start
    free = comm._conductor.scratch.free_bytes
    comm.close()
    return grown, free


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_memory_stays_flat_over_two_thousand_calls_of_changing_size(torch_world):
    for grown, free in torch_world.run(check_memory, 2000):
        assert grown < 8 << 20
        assert free < 2 << 20
