"""Every collective, flat and in two hops, returns what the codecs' definitions say, on every rank, bit for bit."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from placements import TWO_HOPS, run

import zcomm
from zcomm import Communicator, Topology, local
from zcomm.buffers import DType
from zcomm.collectives import choice, settle
from zcomm.collectives.shards import balanced_shards

CODECS = ["raw", "fp16", "int8", "int4", "int3:64"]
SIZES = [0, 1, 7, 129, 2305, 70_001]


def resolved(name: str, dtype: np.dtype):
    return zcomm.codec(name).for_dtype(DType[dtype.name.upper()])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n_elems", SIZES)
def test_all_reduce_is_the_definition_on_every_rank(placement, name, n_elems):
    topology, two_hops = placement
    inputs = [oracle.values(rank, n_elems, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.all_reduce(x, "avg", name)
        return x

    results = run(placement, program)

    codec = zcomm.codec(name)
    expected = oracle.all_reduce(codec, codec, inputs, topology if two_hops else None, "AVG")
    for result in results:
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n_elems", SIZES)
def test_reduce_scatter_is_the_definition(placement, name, n_elems):
    topology, two_hops = placement
    inputs = [oracle.values(rank, n_elems * topology.size, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        out = np.full(n_elems, np.nan, np.float32)
        before = inputs[comm.rank].copy()
        comm.reduce_scatter_single(out, inputs[comm.rank], zcomm.premul_sum(0.375), name)
        assert before.tobytes() == inputs[comm.rank].tobytes()
        return out

    results = run(placement, program)

    codec = zcomm.codec(name)
    expected = oracle.reduce_scatter(codec, codec, inputs, topology if two_hops else None, "PREMUL_SUM", 0.375)
    for result, wanted in zip(results, expected, strict=True):
        assert result.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n_elems", SIZES)
def test_all_gather_is_the_definition_on_every_rank(placement, name, n_elems):
    topology, _ = placement
    inputs = [oracle.values(rank, n_elems, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        out = np.full(n_elems * comm.size, np.nan, np.float32)
        comm.all_gather_single(out, inputs[comm.rank], name)
        return out

    results = run(placement, program)

    expected = oracle.all_gather(zcomm.codec(name), inputs)
    for result in results:
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.spelling)
@pytest.mark.parametrize("name", ["raw", "bf16", "int8", "int4"])
def test_every_dtype_comes_back_as_itself(placement, dtype, name):
    topology, two_hops = placement
    inputs = [oracle.values(rank, 1031, dtype.numpy) for rank in range(topology.size)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.all_reduce(x, "sum", name)
        return x

    results = run(placement, program)

    if (name, dtype) == ("raw", DType.FLOAT64):  # summed in float64; compared with the plain sum
        assert np.allclose(results[0], sum(inputs), rtol=1e-15, atol=1e-15)
        assert all(result.tobytes() == results[0].tobytes() for result in results)
        return
    codec = resolved(name, dtype.numpy)
    expected = oracle.all_reduce(codec, codec, inputs, topology if two_hops else None, "SUM")
    for result in results:
        assert result.dtype == dtype.numpy
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("chunk_elems", [1, 1000, 5000, 1 << 30])
def test_chunking_never_changes_a_result(placement, chunk_elems):
    topology, two_hops = placement
    inputs = [oracle.values(rank, 20_011, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.all_reduce(x, "sum")
        gathered = np.empty(comm.size * 5003, np.float32)
        comm.all_gather_single(gathered, inputs[comm.rank][:5003])
        return x, gathered

    results = run(placement, program, codec="int4", chunk_elems=chunk_elems)

    codec = zcomm.codec("int4")
    expected = oracle.all_reduce(codec, codec, inputs, topology if two_hops else None, "SUM")
    gathered = oracle.all_gather(codec, [x[:5003] for x in inputs])
    for x, everything in results:
        assert x.tobytes() == expected.tobytes()
        assert everything.tobytes() == gathered.tobytes()


def test_another_codec_inside_the_node(placement):
    topology, two_hops = placement
    inputs = [oracle.values(rank, 3001, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.all_reduce(x, "avg")
        return x

    results = run(placement, program, codec="int4", intra_codec="int8:512")

    outer, inner = zcomm.codec("int4"), zcomm.codec("int8:512")
    expected = oracle.all_reduce(outer, inner if two_hops else outer, inputs, topology if two_hops else None, "AVG")
    for result in results:
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("topology", [Topology(nodes=4, ranks_per_node=1), Topology(nodes=1, ranks_per_node=4)])
def test_one_level_is_reduced_in_one_hop(topology):
    inputs = [oracle.values(rank, 3001, np.dtype(np.float32)) for rank in range(4)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.all_reduce(x, "sum", "int4")
        return x

    results = run((topology, True), program)

    codec = zcomm.codec("int4")
    for result in results:
        assert result.tobytes() == oracle.all_reduce(codec, codec, inputs, None, "SUM").tobytes()


def test_flat_and_two_hops_agree_under_raw_where_sums_are_exact():
    whole = [np.arange(997, dtype=np.float32) * (rank + 1) for rank in range(6)]

    def program(comm):
        x = whole[comm.rank].copy()
        comm.all_reduce(x, "avg", "raw")
        return x

    flat = run((Topology(nodes=3, ranks_per_node=2), False), program)
    two_hops = run((Topology(nodes=3, ranks_per_node=2), True), program)

    expected = (np.arange(997, dtype=np.float32) * 21) / np.float32(6)
    for result in [*flat, *two_hops]:
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("op", ["sum", "avg", zcomm.premul_sum(0.5)])
def test_one_rank_gets_its_own_values_back(op):
    x = oracle.values(0, 333, np.dtype(np.float32))
    factor = np.float32(0.5) if op == zcomm.premul_sum(0.5) else np.float32(1)

    def program(transport):
        comm = Communicator(transport, "int4")
        reduced, scattered, gathered = x.copy(), np.empty_like(x), np.empty_like(x)
        comm.all_reduce(reduced, op)
        comm.reduce_scatter_single(scattered, x, op)
        comm.all_gather_single(gathered, x)
        assert transport.wire_bytes_sent == 0
        return reduced, scattered, gathered

    ((reduced, scattered, gathered),) = local.run(1, program)

    assert reduced.tobytes() == scattered.tobytes() == (x * factor).tobytes()
    assert gathered.tobytes() == x.tobytes()


def test_strided_arrays_and_any_number_of_dimensions():
    base = [oracle.values(rank, 4 * 6 * 10, np.dtype(np.float32)).reshape(4, 6, 10) for rank in range(2)]

    def program(comm):
        views = {}
        for name, pick in {
            "transposed": lambda x: x.T,
            "every second": lambda x: x[::2, :, 1::3],
            "backwards": lambda x: x[:, ::-1, :],
            "0-d": lambda x: x[1, 2, 3, ...],
            "5-d": lambda x: x.reshape(2, 2, 3, 2, 10),
        }.items():
            whole = base[comm.rank].copy()
            view = pick(whole)
            outside = whole.copy()
            comm.all_reduce(view, "sum", "raw")
            pick(outside)[...] = pick(whole)
            assert outside.tobytes() == whole.tobytes()  # nothing outside the view was touched
            views[name] = (view.copy(), pick(base[0] + base[1]))
        return views

    for views in run((Topology(nodes=1, ranks_per_node=2), False), program):
        for got, wanted in views.values():
            assert got.shape == wanted.shape
            assert np.array_equal(got, wanted)


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
@pytest.mark.parametrize("n_elems", [0, 1, 257, 4096, 4097])
def test_small_all_reduces_are_done_in_one_exchange_with_one_quantization(placement, name, n_elems):
    topology, two_hops = placement
    inputs = [oracle.values(rank, n_elems, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.all_reduce(x, "avg", name)
        return x

    codec = zcomm.codec(name)
    results = run(placement, program, one_shot_bytes=codec.nbytes(4096) * (topology.size - 1))
    if n_elems <= 4096:
        expected = oracle.one_shot_all_reduce(codec, inputs, "AVG")
    elif topology.nodes == 2 and topology.ranks_per_node > 1 and two_hops:
        expected = oracle.two_nodes_all_reduce(codec, codec, inputs, topology, "AVG")
    else:
        expected = oracle.all_reduce(codec, codec, inputs, topology if two_hops else None, "AVG")
    for result in results:
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("op", ["sum", "avg", zcomm.premul_sum(0.3)])
@pytest.mark.parametrize("name", ["raw", "fp16", "int8", "int4", "int3:64"])
@pytest.mark.parametrize("which", ["2x2", "2x2 round robin", "2x4"])
def test_two_nodes_alike_swap_their_sums_of_short_messages(which, name, op):
    topology, _ = TWO_HOPS[which]
    codec, intra_codec, per_node = zcomm.codec(name), zcomm.codec("int8"), topology.ranks_per_node
    operator, factor = (op.upper(), 1.0) if isinstance(op, str) else ("PREMUL_SUM", 0.3)
    for n_elems in (257, 2305, 20_011):
        inputs = [oracle.values(rank, n_elems, np.dtype(np.float32)) for rank in range(topology.size)]

        def program(comm, inputs=inputs):
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, op)
            stats = comm.stats()["all_reduce"]
            return x, stats.wire_bytes_intra, stats.wire_bytes_inter, comm._transport.wire_bytes_sent

        limit = -(-codec.nbytes(n_elems) // choice.TWO_NODES_FACTOR)
        settings = {"codec": codec, "intra_codec": intra_codec, "check": "never"}
        swapped = run((topology, True), program, one_shot_bytes=limit, **settings)
        expected = oracle.two_nodes_all_reduce(codec, intra_codec, inputs, topology, operator, factor)
        slices = [extent.n_elems for extent in balanced_shards(n_elems, per_node)]
        for rank, (x, intra, inter, by_transport) in enumerate(swapped):
            assert x.tobytes() == expected.tobytes()
            mine = slices[topology.ranks_of_node[topology.node_of_rank[rank]].index(rank)]
            assert inter == codec.nbytes(mine)
            given = sum(map(intra_codec.nbytes, slices)) - intra_codec.nbytes(mine)
            assert intra == given + (per_node - 1) * 2 * codec.nbytes(mine)
            assert by_transport >= intra + inter

        longer = run((topology, True), program, one_shot_bytes=limit - 1, **settings)
        expected = oracle.all_reduce(codec, intra_codec, inputs, topology, operator, factor)
        for x, *_ in longer:
            assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("which", ["3x2", "2+1", "1+3", "3+1+2"])
def test_other_nodes_do_not_swap(which):
    topology, _ = TWO_HOPS[which]
    inputs = [oracle.values(rank, 2305, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.all_reduce(x)
        return x

    int8 = zcomm.codec("int8")
    expected = oracle.all_reduce(int8, int8, inputs, topology, "SUM")
    for x in run((topology, True), program, one_shot_bytes=int8.nbytes(2305)):
        assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
@pytest.mark.parametrize("n_elems", [0, 1, 257, 2000, 2305])
def test_small_reduce_scatters_and_all_gathers_are_done_in_one_exchange(placement, name, n_elems):
    topology, two_hops = placement
    size, codec = topology.size, zcomm.codec(name)
    inputs = [oracle.values(rank, n_elems * size, np.dtype(np.float32)) for rank in range(size)]

    def program(comm):
        scattered, gathered = np.empty(n_elems, np.float32), np.empty(n_elems * size, np.float32)
        comm.reduce_scatter_single(scattered, inputs[comm.rank], "avg", name)
        comm.all_gather_single(gathered, inputs[comm.rank][:n_elems].copy(), name)
        return scattered, gathered, {which: stats.wire_bytes_inter for which, stats in comm.stats().items()}

    results = run(placement, program, one_shot_bytes=4 * codec.nbytes(2000) * (size - 1))
    in_two_hops = topology if two_hops and n_elems > 2000 else None
    reduced = oracle.reduce_scatter(codec, codec, inputs, in_two_hops, "AVG")
    whole = oracle.all_gather(codec, [x[:n_elems] for x in inputs])
    for rank, (scattered, gathered, inter) in enumerate(results):
        others = size - len(topology.ranks_of_node[topology.node_of_rank[rank]])
        if in_two_hops is None:
            assert inter == dict.fromkeys(inter, others * codec.nbytes(n_elems))
        assert scattered.tobytes() == reduced[rank].tobytes()
        assert gathered.tobytes() == whole.tobytes()


def test_an_uneven_call_is_short_if_it_is_for_the_rank_that_sends_most():
    counts = [100, 0, 3000, 8]
    topology = Topology(nodes=2, ranks_per_node=2)

    def sent(limit):
        def program(comm):
            mine = np.ones(counts[comm.rank], np.float32)
            comm.all_gather_single(whole := np.empty(sum(counts), np.float32), mine, counts=counts)
            comm.reduce_scatter_single(mine, whole, counts=counts)
            stats = comm.stats()
            return stats["all_gather"].wire_bytes_inter, stats["reduce_scatter"].wire_bytes_inter

        return run((topology, True), program, codec="raw", one_shot_bytes=limit)

    gathered, scattered = 4 * 3000 * 3, 4 * (100 + 3000 + 8)
    per_rank = [(2 * 4 * n, 4 * (sum(counts) - n - counts[rank ^ 1])) for rank, n in enumerate(counts)]
    assert sent(4 * gathered) == per_rank
    assert [one for one, _ in sent(4 * gathered - 1)] == [4 * n for n in counts]
    assert [one for _, one in sent(4 * scattered)] == [one for _, one in per_rank]
    assert [one for _, one in sent(4 * scattered - 1)] != [one for _, one in per_rank]


def test_the_number_of_chunks_is_bounded_whatever_the_plan_says():
    x = [oracle.values(rank, 600_001, np.dtype(np.float32)) for rank in range(2)]

    def program(comm):
        mine = x[comm.rank].copy()
        comm.all_reduce(mine, "sum", "raw")
        (settled,) = comm._conductor._settler._kept.values()
        assert len(settled.schedule.chunks) <= settle.MOST_CHUNKS + 1
        return mine

    for result in run((Topology(nodes=1, ranks_per_node=2), False), program, chunk_elems=1):
        assert result.tobytes() == (x[0] + x[1]).tobytes()
