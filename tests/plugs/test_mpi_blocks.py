"""`zcomm.mpi.Comm`'s calls with a block for each rank, or a root: the definition's bits where MPI would put its own."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from mpi_cases import comm_of, inputs, topology_of

import zcomm
from zcomm.errors import BufferError, GroupError

FLOAT32 = np.dtype(np.float32)
COUNTS = [5, 0, 3000, 257]  # of each rank
APART = [3300, 7, 300, 20]  # where each rank's block lies, out of order and with gaps


def call(comm, asynchronous: bool, name: str, *args) -> None:
    if not asynchronous:
        assert getattr(comm, name)(*args) is None
        return
    getattr(comm, "I" + name.lower())(*args).Wait()


def through(size: int, x: np.ndarray) -> np.ndarray:
    """What arrives of x; a world of one rank encodes nothing."""
    return x if size == 1 else oracle.through(zcomm.codec("int8"), x)


def equal_blocks(size: int, n: int, asynchronous: bool) -> None:
    from mpi4py import MPI

    comm = comm_of(size)
    if comm is None:
        return
    with comm:
        rank, parts = comm.rank, inputs(size, n, "float32")
        wholes = [oracle.values(20 + each, n * size, FLOAT32).reshape(size, n) for each in range(size)]
        everything = np.stack([through(size, part) for part in parts])
        for root in range(size):
            here = rank == root
            got = np.full((size, n), np.nan, np.float32) if here else None
            call(comm, asynchronous, "Gather", parts[rank], got, root)
            assert not here or got.tobytes() == everything.tobytes()

            got = np.full((size, n), np.nan, np.float32)
            got[rank] = parts[rank]
            call(comm, asynchronous, "Gather", MPI.IN_PLACE if here else parts[rank], got if here else None, root)
            assert not here or got.tobytes() == everything.tobytes()

            own = np.full(n, np.nan, np.float32)
            given = wholes[root].copy()
            call(comm, asynchronous, "Scatter", given if here else None, own, root)
            assert own.tobytes() == through(size, wholes[root][rank]).tobytes()
            own[:] = np.nan
            call(
                comm,
                asynchronous,
                "Scatter",
                [given, n, MPI.FLOAT] if here else None,
                MPI.IN_PLACE if here else own,
                root,
            )
            assert here or own.tobytes() == through(size, wholes[root][rank]).tobytes()
            assert given.tobytes() == wholes[root].tobytes()

            total, source = np.full(n, np.nan, np.float32), parts[rank].copy()
            source.flags.writeable = False
            call(comm, asynchronous, "Reduce", source, total if here else None, MPI.SUM, root)
            codec = zcomm.codec("int8")
            wanted = oracle.reduced_shard(codec, codec, parts, topology_of(size), "SUM", 1.0) if size > 1 else parts[0]
            assert not here or total.tobytes() == wanted.tobytes()
            again = parts[rank].copy()
            call(comm, asynchronous, "Reduce", MPI.IN_PLACE if here else again, again if here else None, MPI.SUM, root)
            assert again.tobytes() == (wanted if here else parts[rank]).tobytes()

        came = np.full((size, n), np.nan, np.float32)
        call(comm, asynchronous, "Alltoall", wholes[rank], came)
        wanted = np.stack([through(size, each[rank]) for each in wholes])
        assert came.tobytes() == wanted.tobytes()
        came = wholes[rank].copy()
        call(comm, asynchronous, "Alltoall", MPI.IN_PLACE, came)
        assert came.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gather_scatter_reduce_and_all_to_all_are_the_definition_at_any_root(mpi_world, size, asynchronous):
    for n_elems in (1, 2305):
        mpi_world.run(equal_blocks, size, n_elems, asynchronous)


def uneven_blocks(asynchronous: bool) -> None:
    from mpi4py import MPI

    with comm_of(4) as comm:
        rank, starts = comm.rank, np.cumsum([0, *COUNTS])
        parts = [oracle.values(each, n, FLOAT32) for each, n in enumerate(COUNTS)]
        side_by_side = np.concatenate([through(4, part) for part in parts])
        length = 3400
        apart = np.full(length, -1, np.float32)
        for at, part in zip(APART, parts, strict=True):
            apart[at : at + part.size] = through(4, part)
        for spec, wanted in [
            (lambda x: [x, COUNTS], side_by_side),
            (lambda x: [x, COUNTS, MPI.FLOAT], side_by_side),
            (lambda x: [x, (COUNTS, None), MPI.FLOAT], side_by_side),
            (lambda x: [x, (COUNTS, starts[:-1])], side_by_side),
            (lambda x: [x, (COUNTS, APART), MPI.FLOAT], apart),
            (lambda x: [x, COUNTS, APART, MPI.FLOAT], apart),
        ]:
            got = np.full(length, -1, np.float32)
            call(comm, asynchronous, "Allgatherv", parts[rank], spec(got))
            assert got[: wanted.size].tobytes() == wanted.tobytes()
            assert (got[wanted.size :] == -1).all()

            got = np.full(length, -1, np.float32)
            at = APART[rank] if wanted is apart else starts[rank]
            got[at : at + COUNTS[rank]] = parts[rank]
            call(comm, asynchronous, "Allgatherv", MPI.IN_PLACE, spec(got))
            assert got[: wanted.size].tobytes() == wanted.tobytes()

            got = np.full(length, -1, np.float32)
            call(comm, asynchronous, "Gatherv", parts[rank], spec(got) if rank == 2 else None, 2)
            assert rank != 2 or got[: wanted.size].tobytes() == wanted.tobytes()

            source = np.full(length, np.nan, np.float32)
            places = APART if wanted is apart else starts
            for at, part in zip(places, parts, strict=False):
                source[at : at + part.size] = part
            own = np.full(COUNTS[rank], np.nan, np.float32)
            call(comm, asynchronous, "Scatterv", spec(source) if rank == 1 else None, own, 1)
            assert own.tobytes() == through(4, parts[rank]).tobytes()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_v_forms_take_counts_and_displacements(mpi_world, asynchronous):
    mpi_world.run(uneven_blocks, asynchronous)


def uneven_sums(asynchronous: bool) -> None:
    from mpi4py import MPI

    codec = zcomm.codec("int8")
    with comm_of(4) as comm:
        rank, starts = comm.rank, np.cumsum([0, *COUNTS])
        wholes = [oracle.values(each, sum(COUNTS), FLOAT32) for each in range(4)]
        own = slice(starts[rank], starts[rank + 1])
        wanted = oracle.reduced_shard(codec, codec, [x[own] for x in wholes], topology_of(4), "SUM", 1.0)
        got = np.full(COUNTS[rank], np.nan, np.float32)
        call(comm, asynchronous, "Reduce_scatter", wholes[rank], got, COUNTS)
        assert got.tobytes() == wanted.tobytes()
        in_place = wholes[rank].copy()
        call(comm, asynchronous, "Reduce_scatter", MPI.IN_PLACE, in_place, COUNTS)
        assert in_place[: got.size].tobytes() == wanted.tobytes()
        assert in_place[got.size :].tobytes() == wholes[rank][got.size :].tobytes()

        exact = sum(x[own].astype(np.float64) for x in wholes)
        call(comm, asynchronous, "Reduce_scatter", wholes[rank], got)  # MPI's own
        assert np.allclose(got, exact, rtol=1e-5, atol=1e-5)
        whole = np.arange(sum(COUNTS), dtype=np.int32)
        part = np.empty(COUNTS[rank], np.int32)
        call(comm, asynchronous, "Reduce_scatter", whole, part, COUNTS)
        assert part.tolist() == (4 * whole[own]).tolist()
        assert comm.stats()["reduce_scatter"].calls == 4
        assert comm.stats()["reduce_scatter"].uncompressed == {
            "MPI asks the ranks for recvcounts": 1,
            "MPI carries int32": 1,
        }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_reduce_scatter_of_uneven_blocks(mpi_world, asynchronous):
    mpi_world.run(uneven_sums, asynchronous)


def uneven_all_to_all() -> None:
    from mpi4py import MPI

    table = np.array([[3, 0, 700, 1], [0, 2, 5, 300], [9, 9, 9, 0], [1000, 4, 0, 257]])
    with comm_of(4) as comm:
        rank = comm.rank
        sends, receives = table[rank].tolist(), table[:, rank].tolist()
        wholes = [oracle.values(each, int(row.sum()), FLOAT32) for each, row in enumerate(table)]
        parts = [np.split(whole, np.cumsum(row)[:-1]) for whole, row in zip(wholes, table, strict=True)]
        wanted = [through(4, parts[peer][rank]) for peer in range(4)]

        came = np.full(sum(receives), np.nan, np.float32)
        comm.Alltoallv([wholes[rank], sends], [came, receives])
        assert came.tobytes() == np.concatenate(wanted).tobytes()

        places = np.cumsum([10, *[n + 3 for n in receives]])[:-1]
        spread = np.full(sum(receives) + 50, -1, np.float32)
        comm.Ialltoallv([wholes[rank], sends, MPI.FLOAT], [spread, (receives, places), MPI.FLOAT]).Wait()
        untouched = np.full_like(spread, -1)
        for at, part in zip(places, wanted, strict=True):
            untouched[at : at + part.size] = part
        assert spread.tobytes() == untouched.tobytes()

        bare = np.arange(6 + 2 * rank, dtype=np.float32)  # nothing said: as equal as can be, as mpi4py does it
        ours, theirs = (
            np.empty(4 * bare.size // 4 * 4 + 8, np.float32),
            np.empty(4 * bare.size // 4 * 4 + 8, np.float32),
        )
        n_each = [[(6 + 2 * peer) // 4 + ((6 + 2 * peer) % 4 > to) for to in range(4)] for peer in range(4)]
        into = [n_each[peer][rank] for peer in range(4)]
        with zcomm.mpi.Comm(comm.wrapped, "raw") as exact:
            exact.Alltoallv(bare, [ours, into])
        comm.wrapped.Alltoallv(bare, [theirs, into])
        assert ours[: sum(into)].tolist() == theirs[: sum(into)].tolist()


def test_all_to_all_of_uneven_blocks(mpi_world):
    mpi_world.run(uneven_all_to_all)


def other_memory() -> None:
    import ml_dtypes
    from mpi4py import MPI

    with comm_of(4, "raw") as comm:
        rank = comm.rank
        for dtype in (np.float16, np.float64, ml_dtypes.bfloat16):
            x = np.arange(rank + 1, dtype=np.float32).astype(dtype)
            got = np.zeros(10, dtype) if rank == 3 else None
            comm.Gatherv(x, [got, [1, 2, 3, 4]] if rank == 3 else None, 3)
            assert rank != 3 or got.astype(int).tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
        strided = np.zeros((4, 6), np.float32)
        comm.Gather(np.full(3, rank, np.float32), strided[:, ::2] if rank == 0 else None)
        assert rank or strided.tolist() == [[r, 0, r, 0, r, 0] for r in range(4)]

        whole = np.arange(8, dtype=np.int64) * (rank + 1)  # MPI's own, in every form
        part, everything = np.empty(2, np.int64), np.empty(8, np.int64)
        comm.Scatter(whole if rank == 0 else None, part)
        assert part.tolist() == [2 * rank, 2 * rank + 1]
        comm.Scatter(whole if rank == 0 else None, MPI.IN_PLACE if rank == 0 else part)
        comm.Gather(part, everything if rank == 2 else None, 2)
        assert rank != 2 or everything.tolist() == list(range(8))
        comm.Allgatherv(part, [everything, [2] * 4])
        assert everything.tolist() == list(range(8))
        comm.Alltoall(MPI.IN_PLACE, everything)
        comm.Ireduce(whole, everything if rank == 1 else None, MPI.SUM, 1).Wait()
        assert rank != 1 or everything.tolist() == [10 * i for i in range(8)]
        top = np.full(3, float(rank))
        comm.Reduce(MPI.IN_PLACE if rank == 0 else top, top if rank == 0 else None, MPI.MAX)
        assert rank or top.tolist() == [3.0] * 3
        named = {name: stats.uncompressed for name, stats in comm.stats().items()}
        carried = {"MPI carries int64": 1}
        assert named["gather"] == named["all_gather"] == named["all_to_all"] == carried
        assert named["scatter"] == {"MPI carries int64": 2}
        assert named["reduce"] == carried | {"MPI computes op MAX": 1}


def test_other_floats_travel_and_integers_are_mpi_s_own(mpi_world):
    mpi_world.run(other_memory)


def torch_blocks() -> None:
    import torch

    with comm_of(4, "raw") as comm:
        rank = comm.rank
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.full((rank + 1,), float(rank), dtype=dtype)
            got = torch.zeros(10, dtype=dtype)
            comm.Allgatherv(x, [got, [1, 2, 3, 4]])
            assert got.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
            came = torch.zeros(4, 2, dtype=dtype)
            comm.Alltoall(torch.arange(8).reshape(4, 2).to(dtype) + 8 * rank, came)
            assert came.tolist() == [[8 * r + 2 * rank, 8 * r + 2 * rank + 1] for r in range(4)]


def test_torch_tensors_travel_as_they_are(mpi_world):
    pytest.importorskip("torch")
    mpi_world.run(torch_blocks)


def bad_blocks() -> None:
    f = np.float32
    with comm_of(4) as comm:
        before = comm.communicator._transport.wire_bytes_sent
        x, y = np.ones(8, f), np.empty(8, f)
        for call_it, told in [
            (lambda: comm.Allgatherv(x[:2], [y, [1, 2, 3]]), "for each rank|expected 4"),
            (lambda: comm.Allgatherv(x[:2], [y, [2, 2, 2, 3]]), "holds 8 elements; expected 9"),
            (lambda: comm.Allgatherv(x[:2], [y, [-2, 2, 2, 2]]), "0 or more"),
            (lambda: comm.Allgatherv(x[:2], [y, ([2] * 4, [0, 2, 4, 7])]), "expected 9"),
            (lambda: comm.Allgatherv(x[:3], [y, [2] * 4]), "3 elements"),
            (lambda: comm.Allgatherv(x[:2], [y, ([2] * 4, [0, 1, 4, 6])]), "share memory"),
            (lambda: comm.Alltoall(x[:6], y), "6 elements"),
            (lambda: comm.Alltoallv(x, [np.ones((8, 2), f)[:, 0], [2] * 4]), "strided"),
        ]:
            with pytest.raises((BufferError, ValueError), match=told):
                call_it()
        with pytest.raises(GroupError, match="expected 0 to 3"):
            comm.Gather(x, None, 4)
        assert comm.communicator._transport.wire_bytes_sent == before


def test_blocks_that_make_no_sense_are_refused_before_a_byte_moves(mpi_world):
    mpi_world.run(bad_blocks)
