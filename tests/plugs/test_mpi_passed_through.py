"""What `zcomm.mpi.Comm` leaves to MPI, and what it counts."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from mpi_cases import comm_of

import zcomm
from zcomm.errors import BufferError, GroupError
from zcomm.plan import AUTO_RAW_BYTES

torch = pytest.importorskip("torch")


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


def short_sums(size: int) -> None:
    from mpi4py import MPI

    comm = comm_of(size, "int8", auto=True)
    if comm is None:
        return
    rank, limit, reason = comm.rank, AUTO_RAW_BYTES, "auto: MPI's own, 65536 bytes or fewer"
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
    assert stats.uncompressed == {reason: calls + 1}
    assert (stats.calls, stats.wire_bytes) == (calls + 1, 0)
    read_only = np.ones(8, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(BufferError, match="recvbuf is a read-only array"):
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
        comm.name = "grid"  # attributes that are set, too
        assert comm.wrapped.Get_name() == comm.name == "grid"
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
