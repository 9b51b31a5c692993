"""Datatypes of the program's own on some ranks, plain arrays on others: MPI programs that MPI itself runs."""

from __future__ import annotations

import gc

import numpy as np
import oracle
import pytest
from mpi_cases import comm_of

from zcomm.errors import BufferError

SIZE, ROWS = 4, 5
FLOAT32 = np.dtype(np.float32)


def call(comm, asynchronous: bool, name: str, *args, free=()) -> None:
    """One call of comm, or of MPI where comm is MPI's; datatypes are freed as soon as MPI allows it."""
    request = getattr(comm, "I" + name.lower() if asynchronous else name)(*args)
    for datatype in free:
        datatype.Free()
    if asynchronous:
        request.Wait()


def column():
    """Of a matrix with SIZE columns; the next one begins an element later."""
    from mpi4py import MPI

    return MPI.FLOAT.Create_vector(ROWS, 1, SIZE).Create_resized(0, 4).Commit()


def on_the_root(asynchronous: bool) -> None:
    with comm_of(SIZE, "raw") as comm:
        for each in (comm, comm.wrapped):
            matrix = oracle.values(7, ROWS * SIZE, FLOAT32).reshape(ROWS, SIZE)
            for root in range(SIZE):
                here, mine = comm.rank == root, np.full(ROWS, np.nan, np.float32)
                columns = column()
                call(each, asynchronous, "Scatter", [matrix, 1, columns] if here else None, mine, root, free=[columns])
                assert mine.tobytes() == matrix[:, comm.rank].tobytes()
                columns, got = column(), np.zeros((ROWS, SIZE), np.float32)
                call(each, asynchronous, "Gather", mine, [got, 1, columns] if here else None, root, free=[columns])
                assert not here or got.tobytes() == matrix.tobytes()
                # Columns in the order of ranks turned round, of which rank 1 has none.
                counts, places = [1, 0, 1, 1], [3, -9, 1, 0]
                part = mine if counts[comm.rank] else np.empty(0, np.float32)
                columns, got = column(), np.zeros((ROWS, SIZE), np.float32)
                into = [got, counts, places, columns] if here else None
                call(each, asynchronous, "Gatherv", part, into, root, free=[columns])
                expected = np.zeros_like(matrix)
                expected[:, [3, 1, 0]] = matrix[:, [0, 2, 3]]
                assert not here or got.tobytes() == expected.tobytes()
                columns, back = column(), np.full(part.size, np.nan, np.float32)
                given = [got, counts, places, columns] if here else None
                call(each, asynchronous, "Scatterv", given, back, root, free=[columns])
                assert back.tobytes() == part.tobytes()
        assert not any(counted.uncompressed for counted in comm.stats().values())


def on_other_ranks(asynchronous: bool) -> None:
    """Rank 0 gives plain arrays, the others parts of a matrix; everything that arrives is the same."""
    from mpi4py import MPI

    with comm_of(SIZE, "raw") as comm:
        rank = comm.rank
        for each in (comm, comm.wrapped):
            parts = [oracle.values(source, ROWS, FLOAT32) for source in range(SIZE)]
            matrix, columns = np.zeros((ROWS, SIZE), np.float32), column()
            matrix[:, 2] = parts[rank]
            mine = parts[0] if rank == 0 else [matrix[0, 2:], 1, columns]
            got = np.zeros((SIZE, ROWS), np.float32)
            call(each, asynchronous, "Gather", mine, got if rank == 0 else None, 0)
            assert rank or got.tobytes() == np.stack(parts).tobytes()
            got = np.zeros((ROWS, SIZE), np.float32)
            call(each, asynchronous, "Allgather", mine, [got, 1, columns])
            assert got.tobytes() == np.stack(parts, 1).tobytes()
            got[:, (rank + 1) % SIZE] = np.nan
            call(each, asynchronous, "Allgather", MPI.IN_PLACE, [got, 1, columns])
            blocks = np.array([[np.full(ROWS, 10 * a + b) for b in range(SIZE)] for a in range(SIZE)], np.float32)
            turned = np.zeros((ROWS, SIZE), np.float32)
            given = blocks[rank] if rank else [np.ascontiguousarray(blocks[0].T), 1, columns]
            call(each, asynchronous, "Alltoall", given, [turned, 1, columns])
            assert turned.tobytes() == np.ascontiguousarray(blocks[:, rank].T).tobytes()


def mixed_elements() -> None:
    """What holds floats and others goes to MPI."""
    from mpi4py import MPI

    with comm_of(SIZE) as comm:
        pair = MPI.Datatype.Create_struct([1, 1], [0, 4], [MPI.FLOAT, MPI.INT]).Commit()
        got = np.zeros(2 * SIZE, np.float32)
        comm.Allgather([np.full(2, comm.rank, np.float32), 1, pair], [got, 1, pair])
        assert got.tolist() == np.repeat(np.arange(SIZE), 2).tolist()
        assert sum(comm.stats()["all_gather"].uncompressed.values()) == 1


def test_the_root_s_datatypes_meet_plain_arrays(mpi_world):
    for asynchronous in (False, True):
        mpi_world.run(on_the_root, asynchronous)


def test_the_other_ranks_datatypes_meet_plain_arrays(mpi_world):
    for asynchronous in (False, True):
        mpi_world.run(on_other_ranks, asynchronous)


def test_datatypes_of_floats_and_others_are_mpi_s(mpi_world):
    mpi_world.run(mixed_elements)


def no_elements() -> None:
    """Where a block of nothing is said to lie does not matter, as in MPI."""
    with comm_of(SIZE, "raw") as comm:
        counts, places = [2, 0, 3, 0], [3, 10**6, 0, -1]
        for each in (comm, comm.wrapped):
            got = np.zeros(5, np.float32)
            each.Allgatherv(np.full(counts[comm.rank], 1 + comm.rank, np.float32), [got, counts, places, "f"])
            assert got.tolist() == [3, 3, 3, 1, 1]


def datatypes_kept() -> None:
    from zcomm.plugs import mpi_datatypes

    freed, free = [], mpi_datatypes._free
    with comm_of(SIZE, "raw") as comm:
        mpi_datatypes._free = lambda datatype: (freed.append(1), free(datatype))
        try:
            columns, got = column(), np.zeros((ROWS, SIZE), np.float32)
            comm.Allgather(np.ones(ROWS, np.float32), [got, 1, columns])
            with pytest.raises(BufferError):
                comm.Allgather(np.ones(ROWS + 1, np.float32), [got, 1, columns])
            columns.Free()
            gc.collect()  # the error's traceback had it
        finally:
            mpi_datatypes._free = free
        assert freed == [1, 1]


def test_a_receive_s_datatype_is_freed_however_the_call_ends(mpi_world):
    mpi_world.run(datatypes_kept)


def nothing_of_another_dtype() -> None:
    from mpi4py import MPI

    with comm_of(SIZE, "raw") as comm:
        counts = [4, 0, 2, 0]
        expected = np.concatenate([oracle.values(rank, n, FLOAT32) for rank, n in enumerate(counts)])
        for nothing in (np.array([]), np.array([], np.int64), np.empty((0, 3), np.float32)):
            mine = nothing if not counts[comm.rank] else oracle.values(comm.rank, counts[comm.rank], FLOAT32)
            for into in (np.zeros(6, np.float32), np.zeros(9, np.float32)):
                apart = into.size > 6
                places = [5, 0, 1, 0] if apart else [0, 4, 4, 6]
                for asynchronous in (False, True):
                    into[:] = 0
                    call(comm, asynchronous, "Allgatherv", mine, [into, counts, places, MPI.FLOAT])
                    got = np.concatenate([into[5:9], into[1:3]]) if apart else into
                    assert got.tobytes() == expected.tobytes()


def test_a_rank_that_gives_nothing_may_give_it_in_any_dtype(mpi_world):
    mpi_world.run(nothing_of_another_dtype)


def test_blocks_of_nothing_lie_anywhere(mpi_world):
    mpi_world.run(no_elements)
