"""`zcomm.mpi.Comm`: sums and gathers are the definition's bits, for every form of buffer."""

from __future__ import annotations

import ctypes
import tempfile

import numpy as np
import pytest
from mpi_cases import comm_of, gathered, inputs, reduced, scattered

import zcomm
from zcomm.errors import BufferError, ReduceOpError

DTYPES = ["float32", "float64", "float16", "bfloat16"]
SIZES = [1, 7, 2305, 70_001]


def every_collective(size: int, n_elems: int, codec: str, dtype: str) -> None:
    comm = comm_of(size, codec)
    if comm is None:
        return
    with comm:
        rank = comm.rank
        x = inputs(size, n_elems, dtype)[rank]
        given = x.copy()
        out = np.full_like(x, np.nan)
        comm.Allreduce(x, out)
        assert out.dtype == x.dtype
        assert x.tobytes() == given.tobytes()
        assert out.tobytes() == reduced(size, n_elems, codec, dtype).tobytes()

        everything = np.full((size, n_elems), np.nan, x.dtype)
        comm.Allgather(x, everything)
        assert everything.tobytes() == gathered(size, n_elems, codec, dtype).tobytes()

        long = inputs(size, n_elems * size, dtype)[rank]
        comm.Reduce_scatter_block(long, out)
        assert out.tobytes() == scattered(size, n_elems, codec, dtype)[rank].tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", ["int8", "int4", "raw"])
def test_every_collective_is_the_definition(mpi_world, size, codec):
    for n_elems in SIZES:
        mpi_world.run(every_collective, size, n_elems, codec, "float32")


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_dtypes_that_mpi_cannot_sum_come_back_as_themselves(mpi_world, dtype, codec):
    for size in (1, 3, 4):
        mpi_world.run(every_collective, size, 1031, codec, dtype)


def in_place(size: int, n_elems: int, asynchronous: bool) -> None:
    from mpi4py import MPI

    comm = comm_of(size)
    if comm is None:
        return
    with comm:
        rank = comm.rank

        def call(name, *args) -> None:
            if not asynchronous:
                assert getattr(comm, name)(*args) is None
                return
            request = getattr(comm, "I" + name.lower())(*args)
            assert request.Wait() is True
            assert request.Test() is True
            assert request.test() == (True, None)
            assert request.wait() is None

        x = inputs(size, n_elems, "float32")[rank].copy()
        call("Allreduce", MPI.IN_PLACE, x)
        assert x.tobytes() == reduced(size, n_elems, "int8", "float32").tobytes()

        everything = np.full((size, n_elems), np.nan, np.float32)
        everything[rank] = inputs(size, n_elems, "float32")[rank]
        call("Allgather", MPI.IN_PLACE, everything)
        assert everything.tobytes() == gathered(size, n_elems, "int8", "float32").tobytes()

        long = inputs(size, n_elems * size, "float32")[rank].copy()
        rest = long[n_elems:].copy()
        call("Reduce_scatter_block", MPI.IN_PLACE, long)
        assert long[:n_elems].tobytes() == scattered(size, n_elems, "int8", "float32")[rank].tobytes()
        assert long[n_elems:].tobytes() == rest.tobytes()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_in_place_is_where_mpi_says(mpi_world, size, asynchronous):
    mpi_world.run(in_place, size, 2305, asynchronous)


def lists_of_buffer_and_type() -> None:
    from array import array

    from mpi4py import MPI

    n = 1000
    with comm_of(4) as comm:
        rank, size = comm.rank, comm.size
        x = inputs(4, n, "float32")[rank]
        expected = reduced(4, n, "int8", "float32").tobytes()
        out = np.zeros(n, np.float32)
        for send, receive in [
            ([x, MPI.FLOAT], [out, MPI.FLOAT]),
            ([x, n], (out, n)),
            ([x, n, MPI.FLOAT], [out, n, "f"]),
            ([x, (n, 0), MPI.FLOAT], [out, n, 0, MPI.FLOAT]),
            ([x, None, MPI.FLOAT], out),
            ([x.view(np.uint8), MPI.FLOAT], [memoryview(out).cast("B"), n, MPI.FLOAT]),
            (array("f", x), out),
            (x.reshape(10, 1, 100), out.reshape(1, 1, n)),
        ]:
            out[:] = np.nan
            comm.Allreduce(send, receive)
            assert out.tobytes() == expected, (send, receive)

        longer = np.full(n + 30, -1, np.float32)  # a part of memory, its surroundings untouched
        comm.Allreduce([x, n, MPI.FLOAT], [longer, n, 20, MPI.FLOAT])
        assert longer[20:-10].tobytes() == expected
        assert (longer[:20] == -1).all()
        assert (longer[-10:] == -1).all()

        everything = np.zeros(size * n, np.float32)
        comm.Allgather([x, n, MPI.FLOAT], [everything, n, MPI.FLOAT])  # MPI's count is that of one rank
        assert everything.tobytes() == gathered(4, n, "int8", "float32").tobytes()

        doubles = np.arange(n, dtype=np.float64)
        comm.Allreduce(MPI.IN_PLACE, [doubles, MPI.DOUBLE])
        assert np.abs(doubles - 4 * np.arange(n)).max() <= 40


def test_lists_of_buffer_count_and_type_mean_what_they_mean_in_mpi4py(mpi_world):
    mpi_world.run(lists_of_buffer_and_type)


def any_strides() -> None:
    from mpi4py import MPI

    with comm_of(4, "raw") as comm:
        base = [np.random.default_rng(rank).standard_normal((6, 5, 4)).astype(np.float32) for rank in range(4)]
        rank = comm.rank
        views = [
            lambda x: x.T,
            lambda x: x[::2, :, 1::3],
            lambda x: x[::-1, ::-1],
            lambda x: x[3, 2, 1, ...],
            lambda x: x[None, None],
            lambda x: x[1:2, :1],
        ]
        for view in views:
            whole = base[rank].copy()
            untouched = whole.copy()
            comm.Allreduce(MPI.IN_PLACE, view(whole))
            expected = (view(base[0]) + view(base[1])) + (view(base[2]) + view(base[3]))  # node by node
            assert np.array_equal(view(whole), expected)
            view(untouched)[...] = view(whole)
            assert np.array_equal(whole, untouched)  # nothing outside the view

            read_only = view(base[rank])
            read_only.flags.writeable = False
            out = np.empty_like(read_only)
            comm.Allreduce(read_only, out)
            assert np.array_equal(out, expected)


def test_strided_negative_read_only_and_leading_ones(mpi_world):
    mpi_world.run(any_strides)


def torch_tensors() -> None:
    import torch
    from mpi4py import MPI

    with comm_of(4) as comm:
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            ours = inputs(4, 1031, dtype)[comm.rank]
            x = torch.tensor(ours.astype(np.float32)).to(getattr(torch, dtype))
            comm.Allreduce(MPI.IN_PLACE, x)
            expected = torch.tensor(reduced(4, 1031, "int8", dtype).astype(np.float32))
            assert x.dtype == getattr(torch, dtype)
            assert torch.equal(x.float(), expected)
        shard = torch.ones(1, 2, 2) * (comm.rank + 1)
        request = comm.Iallgather(shard, full := torch.empty(4, 2, 2))
        request.Wait()
        assert torch.allclose(full[:, 0, 0], torch.arange(1.0, 5.0), rtol=0.01)
        comm.Reduce_scatter_block(MPI.IN_PLACE, long := torch.ones(8))
        assert torch.allclose(long, torch.tensor([4.0, 4, 1, 1, 1, 1, 1, 1]), rtol=0.01)
        with pytest.raises(BufferError, match="strided"):
            comm.Reduce_scatter_block(MPI.IN_PLACE, torch.ones(8, 2).T)


def test_torch_tensors_travel_as_they_are(mpi_world):
    pytest.importorskip("torch")
    mpi_world.run(torch_tensors)


def memory_of_any_kind() -> None:
    import torch
    from mpi4py import MPI

    with comm_of(4, "raw") as comm:
        mine = np.arange(6, dtype=np.float32) + 10 * comm.rank
        total = 4 * np.arange(6, dtype=np.float32) + 60
        with tempfile.TemporaryFile() as file:
            on_disk = np.memmap(file, np.float32, "w+", shape=6)
        on_disk[:] = mine
        rounded_up = MPI.Alloc_mem(6 * 4 + 2)  # as allocators give memory
        np.frombuffer(rounded_up, np.float32, 6)[:] = mine
        fortran = np.asfortranarray(mine.reshape(2, 3))
        torch_fortran = torch.from_numpy(mine.reshape(3, 2).copy()).t()
        for name, send, result in [
            ("memmap", on_disk, total),
            ("memmap in a list", [on_disk, MPI.FLOAT], total),
            ("matrix", np.matrix(mine), total),
            ("matrix in a list", [np.matrix(mine), 6], total),
            ("memory with bytes left over", [rounded_up, 6, MPI.FLOAT], total),
            ("Fortran order in a list", [fortran, MPI.FLOAT], total.reshape(2, 3).T.ravel()),
            ("bytes of Fortran order", [fortran.view(np.int32), MPI.FLOAT], total.reshape(2, 3).T.ravel()),
            ("torch's Fortran order in a list", [torch_fortran, 6], total),
        ]:
            received = np.zeros(6, np.float32)
            comm.Allreduce(send, received)
            assert received.tolist() == result.tolist(), name
        received = np.zeros((2, 3), np.float32, order="F")
        comm.Allreduce([fortran, MPI.FLOAT], [received, MPI.FLOAT])
        assert received.tolist() == total.reshape(2, 3).tolist()
        everyone = np.zeros(26, np.float32).view(np.uint8)[:98]
        comm.Allgatherv([rounded_up, 6, MPI.FLOAT], [everyone, [6] * 4, MPI.FLOAT])
        assert everyone[:96].view(np.float32).sum() == total.sum()
        for number in (np.float64(comm.rank + 0.5), np.float32(comm.rank + 0.5)):
            one = np.zeros(1, number.dtype)
            comm.Allreduce(number, one)
            assert one[0] == 8
        pointers = (ctypes.POINTER(ctypes.c_float) * 3)()  # a format that numpy does not know
        comm.Allgather([pointers, MPI.BYTE], [everyone[:96], MPI.BYTE])
        assert not everyone[:96].any()
        assert not comm.stats()["all_reduce"].uncompressed  # nothing of it went to MPI


def test_memory_of_any_kind_means_what_it_means_to_mpi(mpi_world):
    pytest.importorskip("torch")
    mpi_world.run(memory_of_any_kind)


def zcomms_operators() -> None:
    from mpi4py import MPI

    with comm_of(4, "fp16") as comm:
        x = np.full(300, 60_000, np.float16)
        comm.Allreduce(MPI.IN_PLACE, x, op=zcomm.AVG)
        assert (x == 60_000).all()  # the sum would be infinite
        y = np.full(300, 8, np.float32)
        comm.Allreduce(MPI.IN_PLACE, y, op=zcomm.premul_sum(0.5))
        assert (y == 16).all()
        with pytest.raises(ReduceOpError, match="int64"):
            comm.Allreduce(MPI.IN_PLACE, np.arange(3), op=zcomm.AVG)


def test_an_average_of_large_fp16_values_is_finite(mpi_world):
    mpi_world.run(zcomms_operators)
