"""zcomm perf's correctness column: every element has a bound of its own, which zcomm keeps and a fault does not."""

from __future__ import annotations

import numpy as np
import pytest

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.tools.perf_formulas import COLLECTIVES
from zcomm.tools.perf_truth import Truth, compare, values

TOPOLOGIES = {"2x2": Topology(2, 2), "2+1": Topology(node_of_rank=(0, 0, 1))}
SHARDS = {"2x2": (1031, 30_011), "2+1": (1, 1031)}  # one exchange, a part of a block at the end, inputs of two pieces
CODECS = ("raw", "bf16", "int8:512", "int3:64", "int4:stochastic")


def results(collective: str, per_rank: int, codec: str, hops: int, topology: Topology) -> list[np.ndarray]:
    """What zcomm returns on every rank for the inputs that perf makes."""
    n = per_rank * topology.size

    def program(transport):
        comm = Communicator(transport, Plan(codec, hierarchical=hops == 2, check="never"), topology)
        if collective == "all_gather":
            comm.all_gather_single(out := np.empty(n, np.float32), values(comm.rank, 0, per_rank))
        elif collective == "reduce_scatter":
            comm.reduce_scatter_single(out := np.empty(per_rank, np.float32), values(comm.rank, 0, n))
        else:
            comm.all_reduce(out := values(comm.rank, 0, n))
        return out

    return local.run(topology.size, program)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_zcomm_keeps_every_element_s_bound(collective: str, codec: str):
    for name, topology in TOPOLOGIES.items():
        for hops in (1, 2):
            for per_rank in SHARDS[name]:
                found = results(collective, per_rank, codec, hops, topology)
                for rank, result in enumerate(found):
                    truth = Truth(collective, per_rank * topology.size, rank, topology)
                    check = compare(result[truth.part], truth.of_codec(zcomm.codec(codec), hops))

                    assert check.wrong_elems == 0, (topology, hops, per_rank, rank, check)
                    assert check.error_over_bound <= 1


def test_the_ranks_parts_make_up_the_whole():
    for collective in COLLECTIVES:
        for n_elems in (4 * 1031, 4 * 30_011):
            n_out = n_elems // 4 if collective == "reduce_scatter" else n_elems
            covered = np.zeros(n_out, int)
            for rank in range(4):
                covered[Truth(collective, n_elems, rank, TOPOLOGIES["2x2"]).part] += 1
            assert covered.min() >= 1


def test_bounds_are_no_looser_than_the_worst_case_of_the_docs():
    """docs/numbers.md, error bounds of int_block: M is the largest magnitude on any rank."""
    topology, n = TOPOLOGIES["2x2"], 4 * 8192
    M = max(np.abs(values(rank, 0, n)).max() for rank in range(4))
    a, h = 1 + 2**-7, (1 + 2**-7) / (2 * 7) + 2**-21
    worst = {
        ("all_gather", 1): h * M,
        ("reduce_scatter", 1): 4 * h * M,
        ("all_reduce", 1): 4 * (h + a * h) * M,
        ("reduce_scatter", 2): 4 * (h + a * h) * M,
        ("all_reduce", 2): 4 * (h + a * h + a * a * h) * M,
    }
    for (collective, hops), most in worst.items():
        bound = Truth(collective, n, 1, topology).of_codec(zcomm.codec("int4"), hops).bound
        assert most / 8 < bound.max() <= most * (1 + 1e-5), (collective, hops)


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_one_element_off_by_a_little_more_than_its_bound_is_counted_though_the_mean_looks_fine(codec: str, hops: int):
    topology, n = TOPOLOGIES["2x2"], 4 * 8192
    result = results("all_reduce", n // 4, codec, hops, topology)[0]
    truth = Truth("all_reduce", n, 0, topology)
    expected = truth.of_codec(zcomm.codec(codec), hops)
    part = result[truth.part].copy()
    before = np.abs(part - expected.exact).mean()
    part[4321] = expected.exact[4321] + 1.01 * expected.bound[4321]

    assert compare(part, expected).wrong_elems == 1
    assert np.abs(part - expected.exact).mean() < 1.01 * before < expected.bound.mean()


def test_raw_must_be_the_sum_in_its_fixed_order_to_the_bit():
    topology, n = TOPOLOGIES["2x2"], 4 * 8192
    for hops in (1, 2):
        part = results("reduce_scatter", n // 4, "raw", hops, topology)[2]
        expected = Truth("reduce_scatter", n, 2, topology).of_codec(zcomm.codec("raw"), hops)
        assert compare(part, expected).wrong_elems == 0
        part[7] = np.nextafter(part[7], np.float32(9))
        assert compare(part, expected).wrong_elems == 1


def test_not_a_number_and_a_stale_buffer_are_wrong():
    truth = Truth("reduce_scatter", 4 * 1024, 0, TOPOLOGIES["2x2"])
    expected = truth.of_codec(zcomm.codec("int4"), 1)
    result = truth.exact.astype(np.float32)
    result[:3] = np.nan

    assert compare(result, expected).wrong_elems == 3
    assert compare(np.zeros_like(result), expected).wrong_elems > 500


def test_a_library_s_sum_may_be_in_any_order():
    truth = Truth("all_reduce", 4 * 8192, 1, TOPOLOGIES["2x2"])
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        total = np.zeros(truth.exact.size, np.float32)
        for rank in order:
            total += truth.terms[rank]
        assert compare(total, truth.of_library("float32")).wrong_elems == 0
    assert compare(total + np.float32(1e-3), truth.of_library("float32")).wrong_elems > 8000


def test_any_part_of_an_input_can_be_made_alone_and_no_two_ranks_have_the_same():
    whole = values(3, 0, 200_000)

    assert (values(3, 65_000, 140_001) == whole[65_000:140_001]).all()
    assert values(3, 5, 5).size == 0
    assert np.count_nonzero(values(2, 0, 200_000) == whole) < 100
