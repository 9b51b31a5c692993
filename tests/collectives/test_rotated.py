"""Collectives behind a rotation: sums stay rotated from the first hop to the last, bit for bit."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.wire.hadamard import Hadamard, rotated, rotated_back

PLACEMENTS = {"3 flat": Topology(nodes=1, ranks_per_node=3), "2x2": Topology(nodes=2, ranks_per_node=2)}
N_ELEMS = 20_000  # a multiple of 32, so that shards of rotated elements are those of elements


@pytest.mark.parametrize(("chunk_elems", "one_shot_bytes"), [(1, 0), (1 << 30, 0), (1, 2000)])
@pytest.mark.parametrize("name", ["hadamard:int4", "hadamard:int8:8", "hadamard:fp8_e4m3"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_all_reduce_rotates_once_at_each_end(placement, name, chunk_elems, one_shot_bytes):
    topology = PLACEMENTS[placement]
    inputs = [oracle.values(rank, N_ELEMS, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(transport):
        plan = Plan(name, chunk_elems=chunk_elems, one_shot_bytes=one_shot_bytes)
        with Communicator(transport, plan, topology) as comm:
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, "avg")
            return x

    results = local.run(topology.size, program)

    codec = zcomm.codec(name)
    assert isinstance(codec, Hadamard)
    two_hops = topology if topology.has_two_levels else None
    coded = [rotated(x) for x in inputs]
    if two_hops and one_shot_bytes:  # a short call between two nodes
        expected = rotated_back(oracle.two_nodes_all_reduce(codec.inner, codec.inner, coded, topology, "AVG"))
    else:
        expected = rotated_back(oracle.all_reduce(codec.inner, codec.inner, coded, two_hops, "AVG"))
    for result in results:
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["hadamard:int8", "mxfp4", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_reduce_scatter_of_any_count_is_close_and_cutting_changes_nothing(placement, name):
    topology, n = PLACEMENTS[placement], 3001
    inputs = [oracle.values(rank, n * topology.size, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(transport, chunk_elems):
        with Communicator(transport, Plan(name, chunk_elems=chunk_elems), topology) as comm:
            out = np.empty(n, np.float32)
            comm.reduce_scatter_single(out, inputs[comm.rank])
            return out

    whole, cut = (
        local.run(topology.size, lambda t, elems=chunk_elems: program(t, elems)) for chunk_elems in (1 << 30, 1)
    )

    for rank in range(topology.size):
        exact = sum(x[rank * n : (rank + 1) * n].astype(np.float64) for x in inputs)
        assert whole[rank].tobytes() == cut[rank].tobytes()
        assert np.sqrt(np.mean((whole[rank] - exact) ** 2)) < 0.3 * np.sqrt(np.mean(exact**2))
