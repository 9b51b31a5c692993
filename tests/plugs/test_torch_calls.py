"""zcomm.<torch.distributed's name>: the same arguments, results by the codecs' definitions."""

from __future__ import annotations

import inspect

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from torch_cases import TWO_BY_TWO, group_of, inputs, topology_of

import zcomm
from zcomm.errors import (
    GroupError,
)
from zcomm.plugs import torch_calls

DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


def check_all_reduce(size: int, n_elems: int, codec: str) -> None:
    group = group_of(size)
    if dist.get_rank() >= size:
        return
    xs = inputs(n_elems)[:size]
    x = xs[dist.get_rank()].clone()

    assert zcomm.all_reduce(x, dist.ReduceOp.AVG, group, codec=codec) is None

    chosen = zcomm.codec(codec)
    arrays = [each.numpy() for each in xs]
    nbytes, short = chosen.nbytes(n_elems), zcomm.Plan().one_shot_bytes
    if nbytes * (size - 1) <= short:
        expected = oracle.one_shot_all_reduce(chosen, arrays, "AVG")
    elif size == 4 and nbytes <= 16 * short:
        expected = oracle.two_nodes_all_reduce(chosen, chosen, arrays, TWO_BY_TWO, "AVG")
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


def check_gather_and_scatter(size: int, n_elems: int, dtype: torch.dtype, asynchronous: bool) -> None:
    group = group_of(size)
    rank = dist.get_rank()
    if rank >= size:
        return
    codec = zcomm.codec("int8")
    shards = [x.numpy() for x in inputs(n_elems, dtype)[:size]]
    wholes = [x.numpy() for x in inputs(n_elems * size, dtype)[:size]]
    gathered, scattered = (
        torch.full((n_elems * size,), np.nan, dtype=dtype),
        torch.full((n_elems,), np.nan, dtype=dtype),
    )

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
        assert all(work.is_completed() and work.is_success() for work in works)
    else:
        assert works == [None, None]

    wanted = oracle.all_gather(codec, shards)
    is_short = 4 * codec.nbytes(n_elems) * (size - 1) <= zcomm.Plan().one_shot_bytes
    sums = oracle.reduce_scatter(codec, codec, wholes, None if is_short else topology_of(size), "SUM")
    if size > 1:
        assert gathered.numpy().tobytes() == wanted.tobytes()
        assert scattered.numpy().tobytes() == sums[rank].tobytes()
    else:
        assert gathered.numpy().tobytes() == shards[0].tobytes()


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_gather_and_scatter_keep_dtype_and_shape(torch_world, dtype, asynchronous):
    for size in (1, 2, 3, 4):
        for n_elems in (1031, 10_007):
            torch_world.run(check_gather_and_scatter, size, n_elems, dtype, asynchronous)


def check_chunks(asynchronous: bool) -> None:
    """Many chunks in flight over real sockets, two hops, odd sizes."""
    rank = dist.get_rank()
    comm = zcomm.Communicator(None, zcomm.Plan("int4", chunk_elems=3000, one_shot_bytes=0))
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


@pytest.mark.parametrize("name", torch_calls.__all__)
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
    zcomm.all_to_all_single(ours, 2 * xs[rank].view(4, 3), [], [], codec="raw")  # to torch no splits are equal ones
    assert torch.equal(ours, 2 * theirs)
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
    for root in (0, 3):
        ours, theirs = ([torch.empty(12) for _ in range(4)] if rank == root else None for _ in range(2))
        zcomm.gather(xs[rank], ours, root, codec="raw")
        dist.gather(xs[rank], theirs, root)
        assert ours is None or all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        mine, wanted = torch.empty(12), torch.empty(12)
        work = zcomm.scatter(mine, xs if rank == root else None, group_src=root, async_op=True, codec="raw")
        dist.scatter(wanted, xs if rank == root else None, root)
        assert work.wait()
        assert torch.equal(mine, wanted)
    lengths = [torch.empty(5 * r) for r in range(4)] if rank == 0 else None
    zcomm.gather(torch.full((5 * rank,), float(rank)), lengths, codec="int8")  # to rank 0 if nothing is said
    assert rank or [x.numel() for x in lengths] == [0, 5, 10, 15]
    assert rank or all(torch.allclose(x, torch.full_like(x, r), rtol=0.01) for r, x in enumerate(lengths))
    pair = [xs[rank].clone(), xs[rank].clone().view(3, 4).bfloat16()]
    zcomm.all_reduce_coalesced(pair, dist.ReduceOp.AVG, codec="raw")
    assert torch.allclose(pair[0], torch.stack(xs).mean(0), rtol=1e-6, atol=1e-6)
    assert pair[1].dtype == torch.bfloat16


def test_lists_splits_roots_and_coalesced_calls_do_what_torch_s_do(torch_world):
    torch_world.run(check_other_calls)


def check_all_to_all(codec: str) -> None:
    """In two hops over real sockets: counts that change from call to call, several chunks, works in any order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    comm = zcomm.Communicator(None, zcomm.Plan(codec, chunk_elems=4000))
    calls = []
    for call in range(5):
        source, peer = np.indices((size, size))
        counts = (source * 1009 + peer * 401 * call) % (500 + 4000 * call) * ((source + 2 * peer + call) % 4 > 0)
        wholes = [oracle.values(each, int(row.sum()), np.dtype(np.float32)) for each, row in enumerate(counts)]
        out = torch.full((int(counts[:, rank].sum()),), np.nan)
        splits = counts[:, rank].tolist(), counts[rank].tolist()
        work = comm.all_to_all_single(out, torch.from_numpy(wholes[rank]), *splits, async_op=call % 2 == 1)
        parts = [np.split(whole, np.cumsum(row)[:-1])[rank] for whole, row in zip(wholes, counts, strict=True)]
        calls.append((out, work, np.concatenate([oracle.through(zcomm.codec(codec), part) for part in parts])))
    for out, work, wanted in reversed(calls):
        if work is not None:
            work.wait()
        assert out.numpy().tobytes() == wanted.tobytes()
    comm.close()


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_all_to_all_in_two_hops_over_gloo(torch_world, codec):
    torch_world.run(check_all_to_all, codec)


def check_messages() -> None:
    rank, group = dist.get_rank(), group_of(3)
    x = torch.arange(1000, dtype=torch.float32) + rank
    for each in (None, *([group] if rank < 3 else ())):
        torch_calls.communicator(each)  # which all ranks of a group make
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
