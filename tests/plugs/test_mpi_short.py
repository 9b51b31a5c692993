"""Short blocking calls under a plan with `auto`: MPI's own, bit for bit, on all ranks alike, and counted."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import oracle
import pytest
from mpi_cases import comm_of

import zcomm
from zcomm.errors import BufferError, GroupError
from zcomm.plan import AUTO_RAW_BYTES

torch = pytest.importorskip("torch")

REASON = "auto: MPI's own, 65536 bytes or fewer"


def short_sums(size: int) -> None:
    from mpi4py import MPI

    comm = comm_of(size, "int8", auto=True)
    if comm is None:
        return
    rank, limit = comm.rank, AUTO_RAW_BYTES
    calls = 0
    for dtype in (np.float32, np.float64):
        for n in (0, 1, 1031, limit // np.dtype(dtype).itemsize):
            x = oracle.values(rank, n, np.dtype(dtype))
            theirs = np.empty_like(x)
            comm.wrapped.Allreduce(x, theirs)
            # How the memory lies differs from rank to rank; who adds does not.
            given = np.repeat(x, 2)[::2] if rank == 1 else x.copy()
            into = np.empty(2 * n, dtype)[::2] if rank == size - 1 else np.empty(n, dtype)
            comm.Allreduce(given, into)
            assert into.tobytes() == theirs.tobytes()
            comm.Allreduce(MPI.IN_PLACE, given)
            assert given.tobytes() == theirs.tobytes()
            calls += 2
    comm.Allreduce(MPI.IN_PLACE, given := torch.full((3, 5), 1.0 + rank).T)
    assert torch.equal(given, torch.full((5, 3), size * (size + 1) / 2))
    odd = np.zeros(8 * 5 + 1, np.uint8)[rank % 2 :][:40].view(np.float64)  # on some ranks not where floats belong
    odd[:] = 1 + rank
    comm.Allreduce(MPI.IN_PLACE, odd)
    assert odd.tolist() == [size * (size + 1) / 2] * 5
    calls += 1
    twice = np.full(9, 1.0 + rank)
    comm.Allreduce(twice[:], twice.reshape(3, 3))  # the same memory, seen as two arrays: in place, as zcomm has it
    assert twice.tolist() == [size * (size + 1) / 2] * 9
    calls += 1
    stats = comm.stats()["all_reduce"]
    assert stats.uncompressed == {REASON: calls + 1}
    assert (stats.calls, stats.wire_bytes) == (calls + 1, 0)
    read_only = np.ones(8, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(BufferError, match="is a read-only array"):
        comm.Allreduce(MPI.IN_PLACE, read_only)
    x = np.ones(8, np.float32)
    with pytest.raises(BufferError, match="overlap"):
        comm.Allreduce(x[:6], x[2:])
    with pytest.raises(BufferError, match="recvbuf"):
        comm.Allreduce(x, np.empty(7, np.float32))
    comm.close()
    for into in (np.empty(8, np.float32), np.empty((8, 2), np.float32)[:, 0]):
        with pytest.raises(GroupError, match="is closed"):
            comm.Allreduce(x, into)


def test_auto_leaves_short_sums_to_mpi_however_memory_lies(mpi_world):
    for size in (1, 2, 3, 4):
        mpi_world.run(short_sums, size)


def not_so_short() -> None:
    """What auto leaves to zcomm, raw or not."""
    from mpi4py import MPI

    floats = AUTO_RAW_BYTES // 4
    with comm_of(4, "int8", auto=True) as comm:
        comm.Allreduce(MPI.IN_PLACE, np.ones(floats + 1, np.float32))
        assert comm.stats()["all_reduce"].uncompressed == {}
        comm.Allreduce(MPI.IN_PLACE, np.ones(8, np.float16))
        comm.Allreduce(MPI.IN_PLACE, np.ones(8, np.float32), zcomm.AVG)
        comm.Iallreduce(MPI.IN_PLACE, np.ones(8, np.float32)).Wait()
        assert comm.stats()["all_reduce"].uncompressed == {"auto: 65536 bytes or fewer": 3}
    for settings in ({"codec": "raw", "auto": True}, {"codec": "int8"}, {"auto": True, "check": "always"}):
        with comm_of(4, **settings) as comm:
            comm.Allreduce(MPI.IN_PLACE, np.ones(8, np.float32))
            assert not any("MPI's own" in reason for reason in comm.stats()["all_reduce"].uncompressed)
            assert comm.stats()["all_reduce"].wire_bytes > 0


def test_auto_keeps_what_mpi_cannot_add_or_zcomm_alone_does(mpi_world):
    mpi_world.run(not_so_short)


class Spy:
    """A communicator that notes which of its collectives are called."""

    def __init__(self, comm) -> None:
        self.comm = comm
        self.called: list[str] = []

    def __getattr__(self, name: str):
        if name[0].isupper() and not name.startswith("Get_"):
            self.called.append(name)
        return getattr(self.comm, name)


def spied_upon(comm) -> Spy:
    """What from now on stands where a zcomm.mpi.Comm hands calls to MPI."""
    spy = Spy(comm.wrapped)
    comm.wrapped = spy
    for calls in comm._short.values():
        calls._comm = spy
    return spy


def laid_out(x: np.ndarray, how: int) -> np.ndarray:
    """The same elements, lying otherwise: side by side, with gaps, backwards."""
    if how % 3 == 0:
        return x.copy()
    if how % 3 == 1:
        wide = np.zeros((*x.shape, 2), x.dtype)
        wide[..., 0] = x
        return wide[..., 0]
    return x[::-1].copy()[::-1]


def every_method(size: int, n: int, dtype: str) -> None:
    """n elements of each rank, or one more or less; all results beside MPI's own, of the same bytes."""
    from mpi4py import MPI

    comm = comm_of(size, "int8", auto=True)
    if comm is None:
        return
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    spy, rank, mpi = spied_upon(comm), comm.rank, comm.wrapped.comm
    summable = dtype in ("float32", "float64")
    counts = [max(0, n + (each % 3) - 1) for each in range(size)]
    starts = np.cumsum([0, *counts])[:-1]
    wanted: list[str] = []

    def same(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        assert np.ascontiguousarray(ours).tobytes() == theirs.tobytes(), name
        assert spy.called == [name], (name, spy.called)
        wanted.append(spy.called.pop())

    for turn in range(4):
        comm.Allreduce(MPI.IN_PLACE, long := np.ones(AUTO_RAW_BYTES // 4 + 1, np.float32))  # zcomm's
        assert np.allclose(long, size, rtol=0.02)
        assert not spy.called
        whole = oracle.values(10 * turn + rank, n * size, kind).reshape(size, n)
        uneven = oracle.values(10 * turn + rank + 5, sum(counts), kind)
        root = (turn + 1) % size
        is_root = rank == root

        def empty(*shape: int, how: int = rank + turn) -> np.ndarray:
            return laid_out(np.full(shape, 7, np.float32).astype(kind), how + 1)

        def moved(name: str, given: np.ndarray | None, into: np.ndarray | None, *more, how: int = rank + turn) -> None:
            """MPI's own, of bytes, then ours of values."""
            theirs = None if into is None else np.empty(into.shape, kind)
            as_bytes = [None if x is None else x.view(np.uint8).reshape(-1) for x in (given, theirs)]
            getattr(mpi, name)(*([x, MPI.BYTE] if x is not None else None for x in as_bytes), *more)
            getattr(comm, name)(None if given is None else laid_out(given, how), into, *more)
            same(name, into, theirs) if into is not None else wanted.append(spy.called.pop())

        moved("Allgather", whole[rank], empty(size, n))
        moved("Gather", whole[0], empty(size, n) if is_root else None, root)
        moved("Scatter", whole if is_root else None, empty(n), root)
        moved("Alltoall", whole, empty(size, n))

        table, part = np.zeros(sum(counts), kind), uneven[: counts[rank]].copy()
        byte_counts = [count * kind.itemsize for count in counts]
        mpi.Allgatherv([part.view(np.uint8), MPI.BYTE], [table.view(np.uint8), byte_counts, MPI.BYTE])
        comm.Allgatherv(laid_out(part, rank + turn), [into := np.zeros(sum(counts), kind), counts])
        same("Allgatherv", into, table)
        spread = np.zeros(sum(counts) + size, kind)  # with a gap before each block
        comm.Allgatherv(part, [spread, (counts, starts + np.arange(1, size + 1))])
        blocks = np.split(spread, starts + np.arange(size))[1:]
        same("Allgatherv", np.concatenate([block[1:] for block in blocks]), table)

        in_place = np.zeros((size, n), kind)
        in_place[rank] = whole[rank]
        comm.Allgather(MPI.IN_PLACE, in_place)
        theirs = np.empty((size, n), kind)
        mpi.Allgather([whole[rank].view(np.uint8), MPI.BYTE], [theirs.view(np.uint8), MPI.BYTE])
        same("Allgather", in_place, theirs)
        in_place = np.zeros((size, n), kind)
        in_place[rank] = whole[rank]
        comm.Gather(MPI.IN_PLACE if is_root else whole[rank], in_place if is_root else None, root)
        if is_root:
            same("Gather", in_place, theirs)
        else:
            wanted.append(spy.called.pop())
        crossed = whole.copy()
        comm.Alltoall(MPI.IN_PLACE, crossed)
        mpi.Alltoall([whole.view(np.uint8), MPI.BYTE], [theirs.view(np.uint8), MPI.BYTE])
        same("Alltoall", crossed, theirs)

        if not summable:
            continue
        theirs = np.empty(n, kind)
        mpi.Reduce_scatter_block(whole, theirs)
        comm.Reduce_scatter_block(laid_out(whole, rank + turn), into := empty(n))
        same("Reduce_scatter_block", into, theirs)
        in_place = whole.copy()
        comm.Reduce_scatter_block(MPI.IN_PLACE, in_place)
        same("Reduce_scatter_block", in_place[0], theirs)
        assert in_place[1:].tobytes() == whole[1:].tobytes()
        theirs = np.empty(counts[rank], kind)
        mpi.Reduce_scatter(uneven, theirs, counts)
        comm.Reduce_scatter(laid_out(uneven, rank + turn), into := empty(counts[rank]), counts)
        same("Reduce_scatter", into, theirs)
        in_place = uneven.copy()
        comm.Reduce_scatter(MPI.IN_PLACE, in_place, counts)
        same("Reduce_scatter", in_place[: counts[rank]], theirs)
        theirs = np.zeros((size, n), kind)
        mpi.Reduce(whole, theirs if is_root else None, root=root)
        comm.Reduce(laid_out(whole, rank + turn), (into := empty(size, n)) if is_root else None, root=root)
        same("Reduce", into if is_root else theirs, theirs)
        in_place = whole.copy()
        comm.Reduce(MPI.IN_PLACE if is_root else in_place, in_place if is_root else None, root=root)
        same("Reduce", in_place, theirs if is_root else whole)

    stats = comm.stats()
    assert all(stats[name].uncompressed == {REASON: stats[name].calls} for name in stats if name != "all_reduce")
    assert sum(stats[name].calls for name in stats) == len(wanted) + 4
    assert sum(stats[name].wire_bytes for name in stats if name != "all_reduce") == 0
    comm.close()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_short_calls_are_mpi_s_own_by_every_method_that_knows_the_whole(mpi_world, size, dtype):
    for n_elems in (0, 1, 1031):
        mpi_world.run(every_method, size, n_elems, dtype)


def torch_tensors_and_lists() -> None:
    from mpi4py import MPI

    with comm_of(4, "int8", auto=True) as comm:
        spy, rank = spied_upon(comm), comm.rank
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.arange(21.0).reshape(3, 7).to(dtype) + 32 * rank
            everything = torch.zeros(4, 7, 3, dtype=dtype)
            comm.Allgather(x.T, everything)
            assert torch.equal(everything, torch.stack([x.T + 32 * (each - rank) for each in range(4)]))
            comm.Scatter(everything if rank == 2 else None, part := torch.zeros(21, dtype=dtype), 2)
            assert torch.equal(part, x.T.reshape(-1))
        long = np.full(30, -1, np.float32)
        comm.Allgather([np.full(5, rank, np.float32), 5, MPI.FLOAT], [long, 5, 3, MPI.FLOAT])
        assert long.tolist() == [-1] * 3 + [each for each in range(4) for _ in range(5)] + [-1] * 7
        comm.Reduce([long, (5, 3), MPI.FLOAT], [long, (5, 25), MPI.FLOAT] if rank == 1 else None, root=1)
        assert long[25:].tolist() == [0 if rank == 1 else -1] * 5
        columns = MPI.FLOAT.Create_vector(5, 1, 4).Create_resized(0, 4).Commit()  # of a matrix, on the root alone
        matrix, part = np.arange(20, dtype=np.float32).reshape(5, 4), np.zeros(5, np.float32)
        comm.Scatter([matrix, 1, columns] if rank == 1 else None, part, 1)
        assert part.tolist() == matrix[:, rank].tolist()
        again = np.zeros_like(matrix)
        comm.Gather(part, [again, 1, columns] if rank == 1 else None, 1)
        assert again.tolist() == (matrix if rank == 1 else np.zeros_like(matrix)).tolist()
        assert spy.called == ["Allgather", "Scatter"] * 3 + ["Allgather", "Reduce", "Scatter", "Gather"]


def test_short_calls_take_torch_tensors_counts_and_datatypes(mpi_world):
    mpi_world.run(torch_tensors_and_lists)


def at_the_limit() -> None:
    """The whole decides: what all ranks have together."""
    n = AUTO_RAW_BYTES // 4
    with comm_of(4, "int8", auto=True) as comm:
        spy, rank = spied_upon(comm), comm.rank
        for more in (0, 4):
            whole, part = np.ones(n + more, np.float32), np.ones((n + more) // 4, np.float32)
            counts = [part.size - 5, part.size, part.size, part.size + 5]
            uneven = np.ones(counts[rank], np.float32)
            comm.Allgather(part, whole)
            comm.Allgatherv(uneven, [whole, counts])
            comm.Gather(part, whole if rank == 3 else None, 3)
            comm.Scatter(whole if rank == 3 else None, part, 3)
            comm.Alltoall(whole, np.empty_like(whole))
            comm.Reduce(whole, np.empty_like(whole) if rank == 3 else None, root=3)
            comm.Reduce_scatter_block(whole, part)
            comm.Reduce_scatter(whole, uneven, counts)
        assert sorted(spy.called) == sorted(comm._short.keys() - {"Allreduce"})


def test_the_size_of_the_whole_decides(mpi_world):
    mpi_world.run(at_the_limit)


def stays_zcomm_s() -> None:
    from mpi4py import MPI

    with comm_of(4, "int8", auto=True) as comm:
        spy, rank = spied_upon(comm), comm.rank
        x, y = np.ones(4, np.float32), np.empty(4, np.float32)
        counts = [1] * 4
        comm.Gatherv(x[:1], [y, counts] if rank == 0 else None)
        comm.Scatterv([x, counts] if rank == 0 else None, y[:1])
        comm.Alltoallv([x, counts], [y, counts])
        for asynchronous in (
            comm.Iallgather(x[:1], y),
            comm.Iallgatherv(x[:1], [y, counts]),
            comm.Igather(x[:1], y if rank == 0 else None),
            comm.Iscatter(x if rank == 0 else None, y[:1]),
            comm.Ialltoall(x, y),
            comm.Ireduce(x, y if rank == 0 else None),
            comm.Ireduce_scatter_block(x, y[:1]),
            comm.Ireduce_scatter(x, y[:1], counts),
        ):
            asynchronous.Wait()
        comm.Reduce(x, y if rank == 0 else None, zcomm.AVG)
        half = np.ones(8, np.float16)
        comm.Reduce_scatter_block(half, half[:2].copy(), MPI.SUM)
        assert not spy.called
    for settings in ({"codec": "raw", "auto": True}, {"codec": "int8"}, {"auto": True, "check": "always"}):
        with comm_of(4, **settings) as comm:
            comm.Allgather(x[:1], y)
            assert comm.stats()["all_gather"].wire_bytes > 0


def test_auto_keeps_calls_whose_whole_no_rank_knows_and_those_with_a_request(mpi_world):
    mpi_world.run(stays_zcomm_s)


def refused() -> None:
    with comm_of(4, "int8", auto=True) as comm:
        spy = spied_upon(comm)
        x, read_only = np.ones(8, np.float32), np.ones(8, np.float32)
        read_only.flags.writeable = False
        for call, told in [
            (lambda: comm.Allgather(x[:2], read_only), "read-only"),
            (lambda: comm.Allgather(x[:3], np.empty(8, np.float32)), "8 elements; expected"),
            (lambda: comm.Allgather(x[:2], np.empty(8, np.float64)), "expected the same dtype"),
            (lambda: comm.Allgather(x[1:3], x), "overlap"),
            (lambda: comm.Allgatherv(x[:2], [x, ([2] * 4, [0, 1, 4, 6])]), "share memory"),
            (lambda: comm.Alltoall(x, x), "overlap"),
            (lambda: comm.Alltoall(x[:6], x[:6].copy()), "6 elements"),
            (lambda: comm.Reduce_scatter_block(x[:7], x[:1].copy()), "7 elements"),
            (lambda: comm.Reduce_scatter(x, x[:2].copy(), [3, 3, 3, 3]), "expected 4 ranks x 3"),
        ]:
            with pytest.raises(BufferError, match=told):
                call()
        for call in (lambda: comm.Gather(x, None, 4), lambda: comm.Scatter(None, x, -1)):
            with pytest.raises(GroupError, match="expected 0 to 3"):
                call()
        assert not spy.called
        comm.close()
        with pytest.raises(GroupError, match="is closed"):
            comm.Allgather(x[:2], np.empty(8, np.float32))
        assert not spy.called


def nothing_to_a_root(size: int) -> None:
    from mpi4py import MPI

    comm = comm_of(size, "int8", auto=True)
    if comm is None:
        return
    roots: list[int] = []

    def reduce(sendbuf, recvbuf, root):
        roots.append(root)
        comm.wrapped.Reduce(sendbuf, recvbuf, root=root)

    comm._short["Reduce"]._comm = SimpleNamespace(Reduce=reduce, Get_rank=comm.wrapped.Get_rank)
    for root in range(size):
        nothing = np.empty(0, np.float32)
        comm.Reduce(MPI.IN_PLACE if comm.rank == root else nothing, nothing if comm.rank == root else None, root=root)
    assert roots == list(range(size))
    comm.close()


def test_the_root_of_an_empty_sum_is_the_caller_s(mpi_world):
    for size in (2, 3):
        mpi_world.run(nothing_to_a_root, size)


def test_what_zcomm_refuses_it_refuses_in_short_calls_too(mpi_world):
    mpi_world.run(refused)


def in_place_alike() -> None:
    """MPI wants MPI.IN_PLACE of all ranks of an Allreduce or of none, however each rank's memory lies."""
    from mpi4py import MPI

    with comm_of(4, "int8", auto=True) as comm:
        spy, rank = spied_upon(comm), comm.rank
        given: list[bool] = []
        spy.Allreduce = lambda source, target: (
            given.append(source is MPI.IN_PLACE) or spy.comm.Allreduce(source, target)
        )
        for how in range(3):
            comm.Allreduce(MPI.IN_PLACE, x := laid_out(np.full(6, 1.0), rank + how))
            assert x.tolist() == [4.0] * 6
        for n in (0, 6):
            x = np.full(n, 1.0)
            comm.Allreduce(x[:] if rank == 1 else x.copy(), x.reshape(2, n // 2) if rank == 1 else x)
            assert x.tolist() == [4.0] * n
        assert given == [True] * 3 + [False] * 2


def test_short_sums_are_in_place_on_all_ranks_or_on_none(mpi_world):
    mpi_world.run(in_place_alike)
