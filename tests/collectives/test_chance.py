"""Collectives with codecs that round by chance: unbiased, reproducible, independent where they must be."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.errors import CodecError

PLACEMENTS = {
    "3 flat": Topology(nodes=1, ranks_per_node=3),
    "2x2": Topology(nodes=2, ranks_per_node=2),
}
N_ELEMS = 3000


@pytest.fixture(params=PLACEMENTS)
def topology(request: pytest.FixtureRequest) -> Topology:
    return PLACEMENTS[request.param]


def run(topology: Topology, program, **settings):
    """The program's results on every rank, called with a communicator."""
    plan = Plan(**{"codec": "int4:stochastic", "one_shot_bytes": 0} | settings)

    def main(transport):
        with Communicator(transport, plan, topology) as comm:
            return program(comm)

    return local.run(topology.size, main)


def reduced(comm: Communicator) -> np.ndarray:
    """Each rank's values, averaged over all."""
    x = oracle.values(comm.rank, N_ELEMS, np.dtype(np.float32))
    comm.all_reduce(x, "avg")
    return x


def test_an_all_reduce_is_the_same_on_all_ranks_and_again_with_the_same_seed(topology):
    first, again, other = (run(topology, reduced, seed=seed) for seed in (7, 7, 8))

    assert len({result.tobytes() for result in first + again}) == 1
    assert other[0].tobytes() != first[0].tobytes()


def test_calls_of_one_communicator_round_independently(topology):
    first, second = run(topology, lambda comm: (reduced(comm), reduced(comm)))[0]

    assert (first != second).mean() > 0.3


def test_communicators_with_one_seed_round_independently_and_alike_in_every_run(topology):
    def of_rank(transport):
        plan = Plan("int4:stochastic", one_shot_bytes=0)
        with Communicator(transport, plan, topology) as one, Communicator(transport, plan, topology) as other:
            return reduced(one), reduced(other)

    first, again = local.run(topology.size, of_rank), local.run(topology.size, of_rank)

    assert len({result.tobytes() for result, _ in first + again}) == 1
    assert len({result.tobytes() for _, result in first + again}) == 1
    assert (first[0][0] != first[0][1]).mean() > 0.3


def test_chunking_does_not_change_what_chance_decides(topology):
    whole, cut = (run(topology, reduced, chunk_elems=chunk_elems) for chunk_elems in (1 << 30, 1))

    assert whole[0].tobytes() == cut[0].tobytes()


def test_the_mean_over_many_calls_is_the_exact_result(topology):
    calls = 400
    inputs = [oracle.values(rank, N_ELEMS, np.dtype(np.float32)).astype(np.float64) for rank in range(topology.size)]

    def program(comm):
        return sum(reduced(comm).astype(np.float64) for _ in range(calls)) / calls

    mean = run(topology, program)[0]

    single = run(topology, reduced)[0]
    spread = np.sqrt(np.mean((single - sum(inputs) / topology.size) ** 2))  # of one call
    error = mean - sum(inputs) / topology.size
    assert np.sqrt(np.mean(error**2)) < 1.2 * spread / np.sqrt(calls)
    assert abs(error.mean()) < 5 * spread / np.sqrt(calls * N_ELEMS)


def test_ranks_and_hops_round_independently(topology):
    # Equal values on every rank: with equal random bits the average would be as far off as one rank's.
    x = np.random.default_rng(0).uniform(-1, 1, N_ELEMS * topology.size).astype(np.float32)

    def program(comm):
        gathered = np.empty(x.size * comm.size, np.float32)
        comm.all_gather_single(gathered, x)
        total = np.empty(N_ELEMS, np.float32)
        comm.reduce_scatter_single(total, x, "avg")
        return gathered.reshape(comm.size, -1) - x, total - x[comm.rank * N_ELEMS : (comm.rank + 1) * N_ELEMS]

    results = run(topology, program)

    of_ranks = results[0][0]
    assert np.abs(np.corrcoef(of_ranks) - np.eye(topology.size)).max() < 0.08
    assert np.abs(np.corrcoef([rest for _, rest in results]) - np.eye(topology.size)).max() < 0.1
    alone, averaged = np.std(of_ranks), np.std([rest for _, rest in results])
    hops = 2 if topology.has_two_levels else 1  # of a two-hop reduction, each averages its own errors
    assert averaged < 1.1 * alone * np.sqrt(1 / topology.size + (hops - 1) / topology.nodes)


def test_messages_between_two_ranks_are_rounded_by_chance_too():
    x = np.random.default_rng(1).uniform(-1, 1, 1000).astype(np.float32)

    def program(comm):
        if comm.rank == 0:
            for _ in range(2):
                comm.send(x, 1)
            return None
        results = np.empty((2, 1000), np.float32)
        for result in results:
            comm.recv(result, 0)
        return results

    first, second = run(Topology(nodes=1, ranks_per_node=2), program)[1]

    assert (first != second).any()
    assert (np.abs(first - x) <= zcomm.codec("int4:stochastic").error_bound(x)).all()


def test_messages_to_different_ranks_are_rounded_independently():
    x = np.random.default_rng(1).uniform(-1, 1, 1000).astype(np.float32)

    def program(comm):
        came = np.empty_like(x)
        if comm.rank == 0:
            for peer in (1, 2):
                comm.send(x, peer)
        else:
            comm.recv(came, 0)
        return came

    _, first, second = run(Topology(nodes=1, ranks_per_node=3), program)

    assert (first != second).mean() > 0.1


def check_seeds() -> list[int]:
    import torch.distributed as dist

    groups = [
        None,
        dist.new_group([0, 1, 2, 3]),
        [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2],
    ]
    return [Communicator(group, Plan(seed=3))._conductor.seed % (1 << 32) for group in groups for _ in range(2)]


def check_seeds_over_mpi() -> list[int]:
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
    comms = [Communicator(comm, Plan(seed=3)) for comm in (MPI.COMM_WORLD, half) for _ in range(2)]
    seeds = [comm._conductor.seed % (1 << 32) for comm in comms]
    for comm in comms:
        comm.close()
    half.Free()
    return seeds


@pytest.mark.parametrize("world", ["torch_world", "mpi_world"])
def test_every_communicator_of_a_program_has_random_bits_of_its_own(world, request):
    check = check_seeds if world == "torch_world" else check_seeds_over_mpi

    by_rank = request.getfixturevalue(world).run(check)

    whole = len(by_rank[0]) - 2  # communicators of all four ranks; the last two are of halves
    assert all(seeds[:whole] == by_rank[0][:whole] for seeds in by_rank)
    assert by_rank[0] == by_rank[1] != by_rank[2] == by_rank[3]
    assert len({seed for seeds in by_rank for seed in seeds}) == whole + 4


def test_a_codec_that_rounds_by_chance_is_not_encoded_without_a_draw():
    codec = zcomm.codec("int8:stochastic")

    with pytest.raises(CodecError, match="pass draw=Draw"):
        codec.encode(np.ones(8, np.float32), np.empty(codec.nbytes(8), np.uint8))
