"""What `zcomm.mpi.Comm` leaves to MPI, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
from mpi_cases import comm_of

import zcomm


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
