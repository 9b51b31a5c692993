"""Bytes: what is sent is codec.nbytes summed, by level, as the transport counts it; scratch stays in its bound."""

from __future__ import annotations

import numpy as np
import pytest

import zcomm
from zcomm import Communicator, Plan, Topology, local
from zcomm.collectives.scratch import ScratchPool

PLACEMENTS = {
    "4 flat": (Topology(nodes=1, ranks_per_node=4), False),
    "2 flat": (Topology(nodes=1, ranks_per_node=2), False),
    "2x2": (Topology(nodes=2, ranks_per_node=2), True),
    "2x4": (Topology(nodes=2, ranks_per_node=4), True),
    "3x2": (Topology(nodes=3, ranks_per_node=2), True),
}


def sent(placement: str, n_elems: int, codec: str, dtype: type = np.float32, **settings):
    """Per rank: stats by collective, bytes the transport sent for each, free scratch after each."""
    topology, two_hops = PLACEMENTS[placement]

    def program(transport):
        comm = Communicator(
            transport, Plan(codec, hierarchical=two_hops, check="never", one_shot_bytes=0, **settings), topology
        )
        whole = np.arange(n_elems * comm.size, dtype=np.float32).astype(dtype)
        part = whole[:n_elems].copy()
        counted = {}
        for name, call in {
            "all_reduce": lambda: comm.all_reduce(whole.copy()),
            "all_gather": lambda: comm.all_gather_single(np.empty_like(whole), part),
            "reduce_scatter": lambda: comm.reduce_scatter_single(part, whole),
        }.items():
            before = transport.wire_bytes_sent
            comm._conductor.scratch.clear()
            call()
            counted[name] = (comm.stats()[name], transport.wire_bytes_sent - before, comm._conductor.scratch.free_bytes)
        return counted

    return local.run(topology.size, program)


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "int4", "int3:64"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_wire_bytes_are_the_codec_s_summed_by_level(placement, codec):
    topology, two_hops = PLACEMENTS[placement]
    n, size, nodes = 4096, topology.size, topology.nodes
    per_node = size // nodes
    shard = zcomm.codec(codec).nbytes(n)  # an all-reduce of size * n elements has shards of n too

    for counted in sent(placement, n, codec, chunk_elems=1 << 30):
        if two_hops:
            scatter = ((per_node - 1) * nodes * shard, (nodes - 1) * shard)
            # own shard to neighbours; other nodes' shards that this porter hands round
            gather = ((per_node - 1) * nodes * shard, (nodes - 1) * shard)
        else:
            scatter = gather = ((size - 1) * shard, 0)
        expected = {
            "all_gather": gather,
            "reduce_scatter": scatter,
            "all_reduce": (scatter[0] + gather[0], scatter[1] + gather[1]),
        }
        for name, (stats, by_transport, _) in counted.items():
            assert (stats.wire_bytes_intra, stats.wire_bytes_inter) == expected[name], name
            assert stats.wire_bytes == by_transport
            assert stats.raw_bytes == sum(expected[name]) // shard * n * 4
            assert stats.calls == 1


def test_every_dtype_sends_the_same_bytes():
    for name in ("int8", "int4", "bf16"):
        by_dtype = [sent("2x2", 1031, name, dtype) for dtype in (np.float32, np.float16, np.float64)]

        wire = [[counted["all_reduce"][0].wire_bytes for counted in ranks] for ranks in by_dtype]
        assert wire[0] == wire[1] == wire[2]


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("chunk_elems", [8192, 1 << 30])
def test_scratch_is_at_most_twice_the_wire_bytes_and_a_chunk(placement, codec, chunk_elems):
    topology, _ = PLACEMENTS[placement]
    n = 20_000
    chunk = min(chunk_elems + 256 * topology.size, n * topology.size) * 4  # bytes of one chunk's elements

    for counted in sent(placement, n, codec, chunk_elems=chunk_elems):
        for name, (stats, _, scratch) in counted.items():
            assert scratch <= 2 * stats.wire_bytes + chunk, name


def test_small_tensors_travel_raw_where_the_plan_says_so_and_are_counted():
    for counted in sent("2x2", 100, "int4", min_elems=401):
        stats, _, _ = counted["all_reduce"]  # 400 elements
        assert stats.uncompressed == {"fewer than min_elems=401 elements": 1}
        assert stats.compression_ratio <= 1
    for counted in sent("2x2", 100, "int4", min_elems=400):
        assert counted["all_reduce"][0].uncompressed == {}


def test_the_pool_holds_no_more_slabs_than_calls_were_in_flight():
    world = local.LocalWorld(1)
    pool = ScratchPool(world.transport(0), cap_bytes=1 << 30)
    generator = np.random.default_rng(0)

    for nbytes in generator.integers(1, 1_000_000, 2000):
        pool.give_back(pool.take(int(nbytes)))
    assert pool.free_bytes < 1_000_000  # one slab, as large as the largest call

    held = [pool.take(1000) for _ in range(5)]
    for slab in held:
        pool.give_back(slab)
    assert len(pool._free) == 5


def test_the_pool_frees_the_longest_unused_above_its_cap():
    pool = ScratchPool(local.LocalWorld(1).transport(0), cap_bytes=2500)
    first, second, third = pool.take(1000), pool.take(1000), pool.take(1000)
    for slab in (first, second, third):
        pool.give_back(slab)

    assert pool._free == [second, third]
    pool.clear()
    assert pool.free_bytes == 0


def test_closing_frees_scratch_thread_and_refuses_further_calls():
    def program(transport):
        comm = Communicator(transport)
        x = np.ones(1000, np.float32)
        comm.all_reduce(x, async_op=True).wait()
        assert comm._conductor.scratch.free_bytes > 0
        comm.close()
        assert comm._conductor.scratch.free_bytes == 0
        with pytest.raises(zcomm.errors.GroupError, match="closed"):
            comm.all_reduce(x)
        comm.close()  # twice is fine

    local.run(2, program)
