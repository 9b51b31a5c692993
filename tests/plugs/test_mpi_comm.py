"""`zcomm.mpi.Comm`: the definition's bits for every form of call, MPI's own for all the rest, errors on every rank."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import oracle
import pytest
from impatience import AMPLE_S, shorten

import zcomm
from zcomm.buffers import DType
from zcomm.errors import BufferError, GroupError, MismatchError, PeerTimeout, ReduceOpError, TransportError
from zcomm.topology import Topology

TWO_NODES = (0, 0, 1, 1)  # as the ranks of tests/mpi_world.py say
DTYPES = ["float32", "float64", "float16", "bfloat16"]
SIZES = [1, 7, 2305, 70_001]


def comm_of(size: int, codec: str = "int8", **settings):
    """A compressed communicator over the first ranks of the world, or None on the others."""
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < size else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return None
    return zcomm.mpi.Comm(part, codec, plan=zcomm.Plan(one_shot_bytes=0, **settings))


def topology_of(size: int) -> Topology | None:
    """Where two hops are taken; None where one is."""
    topology = Topology(node_of_rank=TWO_NODES[:size])
    return topology if topology.has_two_levels else None


def inputs(size: int, n_elems: int, dtype: str) -> list[np.ndarray]:
    return [oracle.values(rank, n_elems, DType[dtype.upper()].numpy) for rank in range(size)]


def reduced(size: int, n_elems: int, codec_name: str, dtype: str, op: str = "SUM") -> np.ndarray:
    """What the definition says: the input itself on one rank."""
    if size == 1:
        return inputs(1, n_elems, dtype)[0]
    codec = zcomm.codec(codec_name).for_dtype(DType[dtype.upper()])
    return oracle.all_reduce(codec, codec, inputs(size, n_elems, dtype), topology_of(size), op)


def scattered(size: int, n_elems: int, codec_name: str, dtype: str) -> list[np.ndarray]:
    if size == 1:
        return inputs(1, n_elems, dtype)
    codec = zcomm.codec(codec_name).for_dtype(DType[dtype.upper()])
    return oracle.reduce_scatter(codec, codec, inputs(size, n_elems * size, dtype), topology_of(size), "SUM")


def gathered(size: int, n_elems: int, codec_name: str, dtype: str) -> np.ndarray:
    if size == 1:
        return inputs(1, n_elems, dtype)[0]
    codec = zcomm.codec(codec_name).for_dtype(DType[dtype.upper()])
    return oracle.all_gather(codec, inputs(size, n_elems, dtype))


# -- the definition, in every form ------------------------------------------------------------------------------------


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


# -- requests ---------------------------------------------------------------------------------------------------------


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


# -- what goes to MPI -------------------------------------------------------------------------------------------------


def passed_through() -> None:
    from mpi4py import MPI

    with comm_of(4) as comm:
        rank = comm.rank
        for x in (
            np.arange(1000, dtype=np.int64) * (rank + 1),
            np.arange(1000, dtype=np.int8) % 20 + np.int8(rank),
            (np.arange(1000) + 1j * rank).astype(np.complex64),
        ):
            ours, theirs = np.empty_like(x), np.empty_like(x)
            comm.Allreduce(x, ours)
            comm.wrapped.Allreduce(x, theirs)
            assert ours.tobytes() == theirs.tobytes()
            everything = np.empty((4, x.size), x.dtype)
            comm.Allgather([x, x.size], everything)
            assert everything[rank].tobytes() == x.tobytes()
        y = np.array([0.1, 1e30, -rank], np.float32)
        ours = np.empty_like(y)
        comm.Allreduce(y, ours, MPI.MAX)
        assert ours.tolist() == [*y[:2].tolist(), 0]
        part = np.empty(1, np.int32)
        comm.Reduce_scatter_block(np.arange(4, dtype=np.int32), part)
        assert part[0] == 4 * rank
        stats = comm.stats()
        assert stats["all_reduce"].uncompressed == {
            "MPI carries int64": 1,
            "MPI carries int8": 1,
            "MPI carries complex64": 1,
            "MPI computes op MAX": 1,
        }
        assert stats["all_reduce"].calls == 4
        assert stats["all_reduce"].wire_bytes == 0
        assert stats["all_gather"].calls == 3
        assert stats["reduce_scatter"].uncompressed == {"MPI carries int32": 1}
        comm.reset_stats()
        assert comm.stats() == {}


def test_integers_complex_numbers_and_other_operators_are_mpi_s_own_and_counted(mpi_world):
    mpi_world.run(passed_through)


def everything_else() -> None:
    from mpi4py import MPI

    with comm_of(4) as comm:
        assert (comm.rank, comm.size) == (comm.Get_rank(), comm.Get_size())
        assert comm.bcast({"seed": 5} if comm.rank == 0 else None) == {"seed": 5}
        assert comm.allreduce(comm.rank) == 6
        x = np.array([comm.rank * 0.1])
        comm.Bcast(x, root=3)
        assert x[0] == 3 * 0.1
        comm.Barrier()
        half = comm.Split(comm.rank % 2)
        assert isinstance(half, MPI.Comm)
        half.Free()
        with pytest.raises(AttributeError, match="Allredoce"):
            comm.Allredoce  # noqa: B018


def test_all_other_names_are_the_communicator_s(mpi_world):
    mpi_world.run(everything_else)


def counted() -> None:
    with comm_of(4) as comm:
        n = 4096
        comm.Allreduce(np.ones(n, np.float32), np.empty(n, np.float32))
        stats = comm.stats()["all_reduce"]
        part = zcomm.codec("int8").nbytes(n // 4)
        assert (stats.wire_bytes_intra, stats.wire_bytes_inter) == (4 * part, 2 * part)
        assert stats.wire_bytes == comm.communicator._transport.wire_bytes_sent - counted_cards(comm)


def counted_cards(comm) -> int:
    """Bytes of the settings and of the one call that ranks compared."""
    from zcomm.collectives.agreement import CARD_BYTES

    return 2 * (comm.size - 1) * CARD_BYTES


def test_wire_bytes_are_the_codec_s_summed_by_level_and_the_transport_s(mpi_world):
    mpi_world.run(counted)


# -- errors -----------------------------------------------------------------------------------------------------------


def bad_buffers() -> None:
    from mpi4py import MPI

    f = np.float32
    with comm_of(4) as comm:
        before = comm.communicator._transport.wire_bytes_sent
        read_only = np.ones(4, f)
        read_only.flags.writeable = False
        both = np.ones(8, f)
        for call, complaint in [
            (lambda: comm.Allreduce(np.ones(3, f), np.ones(4, f)), "sendbuf is 3 float32, recvbuf 4 float32"),
            (lambda: comm.Allreduce(np.ones(4, f), np.ones(4, np.float64)), "recvbuf 4 float64"),
            (lambda: comm.Allreduce(MPI.IN_PLACE, read_only), "read-only"),
            (lambda: comm.Allreduce(np.ones(4, f), read_only), "read-only"),
            (lambda: comm.Allreduce(both[:5], both[3:]), "overlap"),
            (lambda: comm.Allreduce(MPI.IN_PLACE, np.broadcast_to(np.ones(1, f), 4)), "read-only"),
            (lambda: comm.Allgather(np.ones(4, f), np.ones(15, f)), "15 elements"),
            (lambda: comm.Allgather(MPI.IN_PLACE, np.ones(15, f)), "15 elements"),
            (lambda: comm.Reduce_scatter_block(np.ones(15, f), np.ones(4, f)), "15 elements"),
            (lambda: comm.Allreduce([np.ones(4, f), 5, MPI.FLOAT], np.ones(5, f)), "holds 4 elements; expected 5"),
            (lambda: comm.Allreduce([np.ones(4, f), -1, MPI.FLOAT], np.ones(4, f)), "below 0"),
            (lambda: comm.Allreduce([np.ones((4, 4), f)[:, 1], MPI.FLOAT], np.ones(4, f)), "strided"),
            (lambda: comm.Allreduce([np.ones(3, np.uint8), MPI.FLOAT], np.ones(4, f)), "multiple of 4"),
            (lambda: comm.Allreduce([np.ones(4, f)], np.ones(4, f)), "1 items"),
        ]:
            with pytest.raises(BufferError, match=complaint):
                call()
        assert comm.communicator._transport.wire_bytes_sent == before
        with pytest.raises(GroupError, match="expected an mpi4py communicator"):
            zcomm.mpi.Comm("world")


def test_bad_buffers_are_refused_before_a_byte_moves(mpi_world):
    mpi_world.run(bad_buffers)


def ranks_that_differ(what: str) -> None:
    from mpi4py import MPI

    with comm_of(4, timeout_s=AMPLE_S) as comm:
        odd = comm.rank == 2
        x = np.ones(1001 if odd and what == "count" else 1000, np.float64 if odd and what == "dtype" else np.float32)
        with pytest.raises(MismatchError, match=f"rank 2 has {what}"):
            if odd and what == "collective":
                comm.Allgather(x, np.empty(4000, np.float32))
            else:
                comm.Allreduce(MPI.IN_PLACE, x, zcomm.AVG if odd and what == "op" else MPI.SUM)
        comm.Allreduce(MPI.IN_PLACE, x := np.ones(10, np.float32))  # and the communicator goes on
        assert np.allclose(x, 4, rtol=0.01)


@pytest.mark.parametrize("what", ["count", "dtype", "op", "collective"])
def test_ranks_that_call_differently_fail_alike_and_name_the_odd_one(mpi_world, what):
    mpi_world.run(ranks_that_differ, what)


def ranks_with_other_settings(what: str) -> None:
    from mpi4py import MPI

    odd = MPI.COMM_WORLD.rank == 1
    plan = zcomm.Plan("int4" if odd and what == "plan" else "int8", timeout_s=AMPLE_S)
    topology = Topology(nodes=4, ranks_per_node=1) if odd else Topology(nodes=2, ranks_per_node=2)
    with pytest.raises(MismatchError, match=f"rank 1 has {what}"):
        zcomm.mpi.Comm(MPI.COMM_WORLD, plan=plan, topology=topology if what == "topology" else None)


@pytest.mark.parametrize("what", ["plan", "topology"])
def test_ranks_whose_settings_differ_fail_where_the_communicator_is_made(mpi_world, what):
    mpi_world.run(ranks_with_other_settings, what)


def one_rank_is_late(asynchronous: bool) -> str:
    from mpi4py import MPI

    comm = comm_of(3, check="never")  # one node with two ranks and one with one
    said = ""
    if comm is not None:
        with comm:
            x = np.ones(10_000, np.float32)
            comm.Allreduce(MPI.IN_PLACE, x)
            if comm.rank != 1:
                shorten(comm, 0.5)
                with pytest.raises(PeerTimeout) as raised:
                    if asynchronous:
                        comm.Iallreduce(MPI.IN_PLACE, x).Wait()
                    else:
                        comm.Allreduce(MPI.IN_PLACE, x)
                said = str(raised.value)
    MPI.COMM_WORLD.Barrier()
    with comm_of(4) as again:  # MPI is unharmed
        again.Allreduce(MPI.IN_PLACE, y := np.ones(10, np.float32))
        assert np.allclose(y, 4, rtol=0.01)
    return said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_late_rank_is_an_error_within_the_timeout(mpi_world, asynchronous):
    said = mpi_world.run(one_rank_is_late, asynchronous)

    assert "all_reduce number 2 on rank 0" in said[0]
    assert "nothing came from rank 1 within 0.5 s" in said[0]
    assert "10000 float32" in said[0]
    assert "within 0.5 s" in said[2]


def after_close() -> None:
    from mpi4py import MPI

    comm = comm_of(4)
    comm.close()
    comm.Free()
    with pytest.raises(GroupError, match="closed"):
        comm.Allreduce(MPI.IN_PLACE, np.ones(4, np.float32))
    assert comm.allreduce(1) == 4  # the communicator inside stays
    for _ in range(300):  # more than MPI could hold at once, were they not freed
        comm_of(4).close()


def test_closing_frees_what_zcomm_made_and_nothing_else(mpi_world):
    mpi_world.run(after_close)


def communicators_side_by_side() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    flat = zcomm.mpi.Comm(world, "int8", topology=Topology(nodes=4, ranks_per_node=1))
    hops = zcomm.Communicator(world, "int4", Topology(node_of_rank=(0, 1, 0, 1)))
    half = zcomm.mpi.Comm(world.Split(world.rank % 2), "raw")
    for i in range(10):
        x, y, z = (np.full(2000 + i, world.rank + 1, np.float32) for _ in range(3))
        request = flat.Iallreduce(MPI.IN_PLACE, x)
        work = hops.all_reduce(y, "sum", async_op=True)
        half.Allreduce(MPI.IN_PLACE, z)
        work.wait()
        request.Wait()
        assert np.allclose(x, 10, rtol=0.02)
        assert np.allclose(y, 10, rtol=0.2)
        assert (z == (4 if world.rank % 2 == 0 else 6)).all()
    for comm in (flat, hops, half):
        comm.close()


def test_communicators_over_the_same_ranks_never_mix(mpi_world):
    mpi_world.run(communicators_side_by_side)


# -- programs of their own --------------------------------------------------------------------------------------------

ALONE = """
from mpi4py import MPI
import numpy, zcomm
with zcomm.mpi.Comm(MPI.COMM_WORLD, codec="int4") as comm:
    x = numpy.linspace(-3, 3, 1001)
    y, g = numpy.empty_like(x), numpy.empty_like(x)
    comm.Allreduce(x, y)
    comm.Iallgather(x, g).Wait()
    comm.Reduce_scatter_block(MPI.IN_PLACE, x)
    assert y.tobytes() == g.tobytes() == x.tobytes() == numpy.linspace(-3, 3, 1001).tobytes()
    assert comm.stats()["all_reduce"].uncompressed == {"a world of one rank": 1}
"""


@pytest.mark.parametrize("launched", [True, False])
def test_one_rank_gets_its_own_values_back(mpi_world, launched):
    from mpi_world import environment, launch

    words = [sys.executable, "-c", ALONE]
    command = launch(1, *words) if launched else words

    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=AMPLE_S, check=False)

    assert done.returncode == 0, done.stderr


MISFIT = """
from mpi4py import MPI
import zcomm
try:
    zcomm.mpi.Comm(MPI.COMM_WORLD)
except zcomm.errors.GroupError as error:
    print(error)
"""


def test_a_program_started_by_another_mpi_s_launcher_is_told_so(mpi_world):
    from mpi_world import environment

    words = [sys.executable, "-c", MISFIT]
    as_launched = environment(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")

    done = subprocess.run(words, env=as_launched, capture_output=True, text=True, timeout=AMPLE_S, check=False)

    assert "Open MPI's mpiexec (OMPI_COMM_WORLD_SIZE=2) started several" in done.stdout, done.stderr
    assert "MPI.COMM_WORLD has 1 rank" in done.stdout


@pytest.mark.parametrize(
    "before",
    ["import sys; sys.modules['mpi4py'] = None", "import os; os.environ['MPI4PY_LIBMPI'] = '/nowhere/libmpi.so'"],
)
def test_without_mpi4py_or_its_library_the_error_names_the_extra(before):
    program = f"{before}\nimport zcomm\ntry: zcomm.mpi\nexcept ImportError as error: print(error)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=AMPLE_S, check=False)

    assert "zcomm-collectives[mpi]" in done.stdout, done.stderr
