"""Groups of one, sub-groups, several communicators over the same ranks, any placement of ranks on nodes."""

from __future__ import annotations

import forms
import numpy as np
import oracle
import pytest

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.errors import TopologyError

EIGHT = {
    "8x1": Topology(nodes=8, ranks_per_node=1),
    "4x2": Topology(nodes=4, ranks_per_node=2),
    "2x4": Topology(nodes=2, ranks_per_node=4),
    "1x8": Topology(nodes=1, ranks_per_node=8),
    "round robin": Topology(node_of_rank=(0, 1, 2, 0, 1, 2, 0, 1)),
    "7+1": Topology(node_of_rank=(0, 0, 0, 0, 0, 0, 0, 1)),
}


def values(rank: int, n_elems: int) -> np.ndarray:
    return oracle.values(rank, n_elems, np.dtype(np.float32))


@pytest.mark.parametrize("codec", forms.CODECS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_world_of_one_is_the_identity_and_sends_nothing(codec, op):
    def program(comm):
        for name, form in forms.FORMS.items():
            for n in (0, 1, 7, 333):
                for dtype in (np.float32, np.float64, np.float16):
                    x = oracle.values(0, n, np.dtype(dtype))
                    got = forms.carry_out(form(comm, x, op, np.copy), n % 2 == 1, codec=codec)
                    assert got.tobytes() == x.tobytes(), (name, n, dtype)
        assert comm._transport.wire_bytes_sent == 0

    forms.run("1", program)


def test_every_placement_of_eight_ranks_sums_alike_where_sums_are_exact():
    inputs = [(np.arange(8 * 129) % 31 + 3 * rank).astype(np.float32) for rank in range(8)]

    def of_rank(transport):
        for topology in EIGHT.values():
            for hierarchical in (True, False):
                with Communicator(transport, Plan("raw", hierarchical=hierarchical), topology) as comm:
                    for name, form in forms.FORMS.items():
                        got = forms.carry_out(form(comm, inputs[comm.rank], "avg", np.copy))
                        wanted = forms.exact(name, inputs, comm.rank, 1 / 8 if name in forms.REDUCING else 1)
                        assert np.array_equal(got, wanted), (topology, name)

    local.run(8, of_rank)


def test_communicators_of_other_node_sizes_over_the_same_ranks_live_side_by_side():
    """Calls of all of them in flight at once; each has its own result, and closing one leaves the others."""

    def of_rank(transport):
        rank, plan = transport.rank, Plan("int4", one_shot_bytes=0)
        comms = {name: Communicator(transport, plan, topology) for name, topology in EIGHT.items()}
        for step in range(4):
            results = {name: values(rank + 10 * step, 3001) for name in comms}
            works = [comm.all_reduce(results[name], "avg", async_op=True) for name, comm in comms.items()]
            for work in reversed(works):
                work.wait()
            codec = zcomm.codec("int4")
            inputs = [values(each + 10 * step, 3001) for each in range(8)]
            for name, topology in EIGHT.items():
                if name in comms:
                    two_hops = topology if topology.has_two_levels else None
                    wanted = oracle.all_reduce(codec, codec, inputs, two_hops, "AVG")
                    assert results[name].tobytes() == wanted.tobytes(), name
            comms.pop(next(iter(comms))).close()
        assert len(comms) == 2

    local.run(8, of_rank)


def test_communicators_may_be_made_and_closed_without_end():
    """More than there are ranges of tags over gloo; what is closed is as if it had never been."""

    def of_rank(transport):
        for number in range(150):
            with Communicator(transport, "raw", EIGHT["4x2" if number % 2 else "2x4"]) as comm:
                x = np.full(9, transport.rank + number, np.float32)
                comm.all_reduce(x)
                assert (x == 28 + 8 * number).all()

    local.run(8, of_rank)


def test_a_topology_of_another_size_is_refused_by_all():
    def program(transport):
        with pytest.raises(TopologyError, match="= 4 ranks, but the group has 3"):
            Communicator(transport, topology=Topology(nodes=2, ranks_per_node=2))

    local.run(3, program)


# -- sub-groups on gloo and MPI ---------------------------------------------------------------------------------------


def check_world_and_sub_groups_in_turn() -> list[bytes]:
    """C11, C7: the world, then two groups of two at once with other sizes, fifty times; the same bits in each group."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    said = []
    for step in range(50):
        x = torch.from_numpy(values(rank + 4 * step, 500 + step))
        zcomm.all_reduce(x, "avg", codec="int4")
        y = torch.from_numpy(values(rank + 4 * step, 1000 * (rank // 2 + 1) + step)).bfloat16()
        works = [zcomm.all_reduce(part, "avg", group=mine, codec="int8", async_op=True) for part in y.chunk(3)]
        for work in reversed(works):
            work.wait()
        said.append(x.numpy().tobytes())
        said.append(y.float().numpy().tobytes())
    return said


def test_a_world_and_its_sub_groups_never_mix(torch_world):
    said = torch_world.run(check_world_and_sub_groups_in_turn)

    for step in range(50):
        assert len({each[2 * step] for each in said}) == 1
        assert said[0][2 * step + 1] == said[1][2 * step + 1] != said[2][2 * step + 1] == said[3][2 * step + 1]
    codec = zcomm.codec("int4")
    inputs = [values(rank, 500) for rank in range(4)]
    assert said[0][0] == oracle.one_shot_all_reduce(codec, inputs, "AVG").tobytes()


def check_shards_follow_the_group_s_ranks() -> list[float]:
    """V9: torch sorts the ranks of a new group; shards are in the order of the group's ranks, not of the list."""
    import torch
    import torch.distributed as dist

    group = dist.new_group([3, 1, 0])
    if dist.get_rank() not in (0, 1, 3):
        return []
    out = torch.empty(3)
    zcomm.all_gather_single(out, torch.full((1,), float(dist.get_rank())), group=group, codec="raw")
    theirs = torch.empty(3)
    dist.all_gather_single(theirs, torch.full((1,), float(dist.get_rank())), group=group) if hasattr(
        dist, "all_gather_single"
    ) else dist.all_gather_into_tensor(theirs, torch.full((1,), float(dist.get_rank())), group=group)
    assert out.tolist() == theirs.tolist()
    return out.tolist()


def test_shards_are_in_the_order_of_the_group(torch_world):
    assert torch_world.run(check_shards_follow_the_group_s_ranks)[0] == [0.0, 1.0, 3.0]


def check_node_sizes_over_gloo() -> None:
    """C6: flat, 2 x 2 and round robin over one group, in flight at once; one closed, another made."""
    import torch
    import torch.distributed as dist

    rank, codec = dist.get_rank(), zcomm.codec("int4")
    topologies = [
        Topology(nodes=4, ranks_per_node=1),
        Topology(nodes=2, ranks_per_node=2),
        Topology(node_of_rank=(0, 1, 0, 1)),
    ]
    group, plan = dist.new_group([0, 1, 2, 3]), Plan("int4", one_shot_bytes=0)
    comms = [Communicator(group, plan, topology) for topology in topologies]
    for step in range(4):
        xs = [torch.from_numpy(values(rank + 4 * step, 5001)) for _ in comms]
        works = [comm.all_reduce(x, "avg", async_op=True) for comm, x in zip(comms, xs, strict=True)]
        for work in reversed(works):
            work.wait()
        for comm, x in zip(comms, xs, strict=True):
            inputs = [values(each + 4 * step, 5001) for each in range(4)]
            two_hops = comm.topology if comm.topology.has_two_levels else None
            assert x.numpy().tobytes() == oracle.all_reduce(codec, codec, inputs, two_hops, "AVG").tobytes()
        closed = comms.pop(0)
        closed.close()
        comms.append(Communicator(group, plan, closed.topology))


def test_communicators_of_other_node_sizes_over_one_gloo_group(torch_world):
    torch_world.run(check_node_sizes_over_gloo)


def check_halves_over_mpi() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, -world.rank)  # ranks in the reverse order of the world's
    with zcomm.mpi.Comm(world, "int4") as whole, zcomm.mpi.Comm(half, "raw") as part:
        for step in range(20):
            x = values(world.rank + 4 * step, 700 + step)
            whole.Allreduce(MPI.IN_PLACE, x)
            gathered = np.empty(2 * (3 + world.rank % 2), np.float32)
            part.Allgather(np.full(3 + world.rank % 2, world.rank, np.float32), gathered)
            assert gathered.reshape(2, -1)[:, 0].tolist() == [2 + world.rank % 2, world.rank % 2]
            assert len(set(world.allgather(x.tobytes()))) == 1
    half.Free()


def test_halves_and_the_whole_over_mpi(mpi_world):
    mpi_world.run(check_halves_over_mpi)
