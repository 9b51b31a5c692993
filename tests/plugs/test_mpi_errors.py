"""Errors of `zcomm.mpi.Comm` on every rank, its end, and programs started the wrong way."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from impatience import AMPLE_S, shorten
from mpi_cases import comm_of

import zcomm
from zcomm.errors import BufferError, CodecError, GroupError, MismatchError, PeerTimeout, TransportError
from zcomm.topology import Topology


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
            (lambda: comm.Allreduce([np.ones(4, f), 4 / 2, MPI.FLOAT], np.ones(2, f)), "count 2.0; expected whole"),
            (lambda: comm.Allreduce([np.ones(4, f), "2", MPI.FLOAT], np.ones(2, f)), "count '2'; expected whole"),
            (lambda: comm.Allreduce([np.ones(4, f), (2, 0.5)], np.ones(2, f)), "displacement 0.5; expected whole"),
            (lambda: comm.Allgatherv(np.ones(2, f), [np.ones(8, f), [2.5] * 4]), "counts 2.5; expected whole"),
            (lambda: comm.Reduce_scatter(MPI.IN_PLACE, np.ones(8, f), [8]), r"recvcounts \[8\]; expected 4"),
            (lambda: comm.Reduce_scatter(MPI.IN_PLACE, np.ones(8, f), [3, 3, 3, 3]), "expected 4 ranks x 3"),
            (lambda: comm.Allreduce(np.ma.array([1, 2], f, mask=[0, 1]), np.ones(2, f)), "MaskedArray"),
            (lambda: comm.Allreduce([np.ma.array([1, 2], f, mask=[0, 1]), 2], np.ones(2, f)), "MaskedArray"),
            (lambda: comm.Allreduce(np.ones(1, f), f(0)), "read-only"),
        ]:
            with pytest.raises(BufferError, match=complaint):
                call()
        assert comm.communicator._transport.wire_bytes_sent == before
        with pytest.raises(GroupError, match="expected an mpi4py communicator"):
            zcomm.mpi.Comm("world")
        with pytest.raises(GroupError, match=r"got a zcomm.mpi.Comm; expected .* its .wrapped"):
            zcomm.mpi.Comm(comm)
        with pytest.raises(CodecError, match="got None"):
            zcomm.mpi.Comm(comm.wrapped, "int8", plan=None)
        with zcomm.mpi.Comm(comm.wrapped, plan="int4") as other:  # as Communicator takes it
            assert other.communicator.plan == zcomm.Plan("int4")


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
    of_its_own = MPI.COMM_WORLD.Dup()
    with zcomm.mpi.Comm(of_its_own, "raw") as comm:
        of_its_own.Free()  # zcomm works on a duplicate
        comm.Reduce(np.ones(4, np.float32), total := np.zeros(4, np.float32), root=2)
        assert total.tolist() == ([4.0] * 4 if comm.communicator.rank == 2 else [0.0] * 4)
        assert "of 4" in repr(comm)
    for _ in range(300):  # more than MPI could hold at once, were they not freed
        comm_of(4).close()


def test_closing_frees_what_zcomm_made_and_nothing_else(mpi_world):
    mpi_world.run(after_close)


def without_a_communicator_left() -> None:
    from mpi4py import MPI

    class LastOfAll(MPI.Intracomm):
        def Dup(self, info=None):  # noqa: N802 - mpi4py's name
            raise MPI.Exception(MPI.ERR_OTHER)

    with pytest.raises(TransportError, match=r"MPI gives no communicator .* close\(\) those"):
        zcomm.mpi.Comm(LastOfAll(MPI.COMM_WORLD))


def test_where_mpi_has_no_communicator_left_it_is_told_what_holds_them(mpi_world):
    mpi_world.run(without_a_communicator_left)


FINALIZED = """
from mpi4py import MPI
import numpy, zcomm
comm = zcomm.mpi.Comm(MPI.COMM_WORLD, codec="raw")
auto = zcomm.mpi.Comm(MPI.COMM_WORLD, plan=zcomm.Plan("int8", auto=True))
sums = [numpy.full(100_000, comm.rank + i, numpy.float32) for i in range(5)]
for x in sums:
    comm.Iallreduce(MPI.IN_PLACE, x)
MPI.Finalize()
assert all((x == 1 + 2 * i).all() for i, x in enumerate(sums))
for call in (comm.Allreduce, comm.Iallreduce):
    try:
        call(MPI.IN_PLACE, sums[0])
    except zcomm.errors.GroupError as error:
        print(error)
for short in (numpy.ones(3), numpy.ones(6)[::2]):  # which would be MPI's own
    try:
        auto.Allreduce(MPI.IN_PLACE, short)
    except zcomm.errors.GroupError as error:
        print(error)
auto.close()
comm.close()
"""


def test_mpi_finalize_waits_for_requests_in_flight_and_later_calls_are_told(mpi_world):
    from mpi_world import environment, launch

    command = launch(2, sys.executable, "-c", FINALIZED)

    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=AMPLE_S, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MPI is finalised already; use zcomm before MPI.Finalize()") == 8


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
