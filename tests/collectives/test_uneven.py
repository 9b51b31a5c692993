"""Uneven shards, and what falls out of them: broadcast, reduce, gather, scatter. The definition on every rank."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from placements import PLACEMENTS, run

import zcomm
from zcomm import Topology, local

WORLDS = {**PLACEMENTS, "1": (Topology(nodes=1, ranks_per_node=1), True)}


def uneven(size: int) -> list[int]:
    """Elements of each rank's shard: some none, some many."""
    return [(0, 5000, 1, 129, 0, 3000, 17, 256)[rank % 8] for rank in range(size)]


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
@pytest.mark.parametrize("chunk_elems", [2000, 1 << 20])
def test_uneven_shards_are_gathered_and_reduced(placement, name, chunk_elems):
    topology, two_hops = placement
    counts = uneven(topology.size)
    starts = np.cumsum([0, *counts])
    whole = [oracle.values(rank, sum(counts), np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        own = slice(starts[comm.rank], starts[comm.rank + 1])
        gathered = np.full(sum(counts), np.nan, np.float32)
        comm.all_gather_single(gathered, whole[comm.rank][own].copy(), counts=counts)
        reduced = np.full(counts[comm.rank], np.nan, np.float32)
        comm.reduce_scatter_single(reduced, whole[comm.rank], "avg", counts=counts)
        return gathered, reduced

    results = run(placement, program, codec=name, chunk_elems=chunk_elems)

    codec = zcomm.codec(name)
    shards = [whole[rank][starts[rank] : starts[rank + 1]] for rank in range(topology.size)]
    gathered = oracle.all_gather(codec, shards)
    for rank, (everything, reduced) in enumerate(results):
        assert everything.tobytes() == gathered.tobytes()
        parts = [x[starts[rank] : starts[rank + 1]] for x in whole]
        wanted = oracle.reduced_shard(codec, codec, parts, topology if two_hops else None, "AVG", 1.0)
        assert reduced.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["raw", "int8"])
def test_broadcast_gives_every_rank_what_the_bytes_say(placement, name):
    topology, _ = placement
    root = topology.size - 1
    inputs = [oracle.values(rank, 3001, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.broadcast(x, root)
        return x

    results = run(placement, program, codec=name)

    expected = oracle.through(zcomm.codec(name), inputs[root])
    for result in results:
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["raw", "int8"])
def test_reduce_gives_the_sum_to_one_rank_and_leaves_the_others_theirs(placement, name):
    topology, two_hops = placement
    inputs = [oracle.values(rank, 3001, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        x = inputs[comm.rank].copy()
        comm.reduce(x, 1, "sum")
        return x

    results = run(placement, program, codec=name)

    codec = zcomm.codec(name)
    wanted = oracle.reduced_shard(codec, codec, inputs, topology if two_hops else None, "SUM", 1.0)
    for rank, result in enumerate(results):
        assert result.tobytes() == (wanted if rank == 1 else inputs[rank]).tobytes()


def test_counts_and_roots_that_make_no_sense_are_refused():
    x = np.ones(10, np.float32)

    def program(comm):
        told = []
        for call in (
            lambda: comm.all_gather_single(np.empty(10, np.float32), x, counts=[10]),
            lambda: comm.all_gather_single(np.empty(10, np.float32), x, counts=[-1, 11]),
            lambda: comm.all_gather_single(np.empty(10, np.float32), x, counts=[3, 7]),
            lambda: comm.reduce_scatter_single(np.empty(4, np.float32), x, counts=[4, 4]),
            lambda: comm.all_to_all_single(x.copy(), np.ones(9, np.float32)),
            lambda: comm.all_to_all_single(x.copy(), x, [5, 5], [9, 9]),
            lambda: comm.broadcast(x.copy(), 2),
            lambda: comm.reduce(x.copy(), -1),
        ):
            with pytest.raises((zcomm.errors.BufferError, zcomm.errors.GroupError)) as caught:
                call()
            told.append(str(caught.value))
        return told

    told = run((Topology(nodes=1, ranks_per_node=2), False), program)

    assert "expected 0 to 1" in told[0][6]


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
@pytest.mark.parametrize("form", ["single", "list"])
@pytest.mark.parametrize("world", WORLDS)
def test_gather_and_scatter_take_uneven_parts_to_and_from_any_root(world, form, name):
    placement = topology, _ = WORLDS[world]
    size = topology.size
    counts = uneven(size)
    starts = np.cumsum([0, *counts])
    whole = [oracle.values(rank, sum(counts), np.dtype(np.float32)) for rank in range(size)]

    def program(comm):
        own = slice(starts[comm.rank], starts[comm.rank + 1])
        kept = []
        for root in range(size):
            part, came = whole[root][own].copy(), np.full(counts[comm.rank], np.nan, np.float32)
            everything = np.full(sum(counts), np.nan, np.float32) if comm.rank == root else None
            if form == "single":
                comm.gather_single(everything, part, root, counts=counts if comm.rank == root else None)
                comm.scatter_single(
                    came, whole[root] if comm.rank == root else None, root, counts=counts if comm.rank == root else None
                )
            else:
                at = comm.rank == root
                comm.gather(part, np.split(everything, starts[1:-1]) if at else None, root)
                works = comm.scatter(came, np.split(whole[root], starts[1:-1]) if at else None, root, async_op=True)
                works.wait()
            kept.append((everything, came))
        return kept

    results = run(placement, program, codec=name)

    codec = zcomm.codec("raw" if size == 1 else name)
    for rank, kept in enumerate(results):
        for root, (everything, came) in enumerate(kept):
            parts = np.split(whole[root], starts[1:-1])
            assert came.tobytes() == oracle.through(codec, parts[rank]).tobytes()
            assert (everything is None) == (rank != root)
            if everything is not None:
                assert everything.tobytes() == oracle.all_gather(codec, parts).tobytes()


def test_gather_and_scatter_send_each_part_once_and_nothing_else():
    def program(transport):
        comm = zcomm.Communicator(transport, zcomm.Plan("int8", check="never"), Topology(nodes=2, ranks_per_node=2))
        everything = np.empty(4000, np.float32) if comm.rank == 3 else None
        sent = [transport.wire_bytes_sent]
        comm.gather_single(everything, np.ones(1000, np.float32), 3)
        sent.append(transport.wire_bytes_sent)
        comm.scatter_single(np.empty(1000, np.float32), everything, 3)
        sent.append(transport.wire_bytes_sent)
        stats = comm.stats()
        assert [stats[name].wire_bytes for name in ("gather", "scatter")] == np.diff(sent).tolist()
        return stats

    part = zcomm.codec("int8").nbytes(1000)
    results = local.run(4, program)
    levels = [[(each.wire_bytes_intra, each.wire_bytes_inter) for each in stats.values()] for stats in results]

    assert levels == [[(0, part), (0, 0)], [(0, part), (0, 0)], [(part, 0), (0, 0)], [(0, 0), (part, 2 * part)]]


@pytest.mark.parametrize("what", ["root", "size", "dtype"])
def test_ranks_that_gather_differently_are_named(what):
    def program(comm):
        comm.gather_single(np.empty(40, np.float32) if comm.rank == 1 else None, np.ones(10, np.float32), 1)
        odd = comm.rank == 2
        root = 2 if what == "root" and odd else 0
        part = np.ones(9 if what == "size" and odd else 10, np.float64 if what == "dtype" and odd else np.float32)
        out = np.empty(40, part.dtype) if comm.rank == root else None
        with pytest.raises(zcomm.errors.MismatchError) as caught:
            comm.gather_single(out, part, root)
        return str(caught.value)

    told = run((Topology(nodes=2, ranks_per_node=2), True), program, check="always")

    assert told.count(told[0]) == 4
    assert {"root": "rank 2 has root 2", "size": "rank 2 sends 9", "dtype": "rank 2 has dtype float64"}[what] in told[0]


@pytest.mark.parametrize("name", ["raw", "int8"])
@pytest.mark.parametrize("n_elems", [0, 1, 257, 20_011])
@pytest.mark.parametrize("world", WORLDS)
def test_an_all_reduce_into_another_array_is_the_same_and_leaves_its_input(world, n_elems, name):
    placement = topology, _ = WORLDS[world]
    inputs = [oracle.values(rank, n_elems, np.dtype(np.float32)) for rank in range(topology.size)]

    def program(comm):
        in_place, given, out = inputs[comm.rank].copy(), inputs[comm.rank].copy(), np.full((n_elems, 2), np.nan)
        out = out.astype(np.float32)
        given.flags.writeable = False
        comm.all_reduce(in_place, "avg")
        comm.all_reduce(given, "avg", output=out[:, 1])  # strided
        assert given.tobytes() == inputs[comm.rank].tobytes()
        assert out[:, 1].tobytes() == in_place.tobytes()
        assert np.isnan(out[:, 0]).all()
        separate = np.full_like(given, np.nan)
        comm.all_reduce(given, "avg", output=separate, async_op=True).wait()
        return in_place, separate

    for in_place, separate in run(placement, program, codec=name, chunk_elems=3000):
        assert separate.tobytes() == in_place.tobytes()


def test_outputs_that_do_not_fit_are_refused():
    def program(comm):
        x = np.ones(10, np.float32)
        for output, told in [
            (np.ones(9, np.float32), "9 elements"),
            (np.ones(10, np.float64), "float64"),
            (x[1:], "9 elements"),
            (np.broadcast_to(np.float32(1), 10), "read-only"),
        ]:
            with pytest.raises(zcomm.errors.BufferError, match=told):
                comm.all_reduce(x, output=output)
        with pytest.raises(zcomm.errors.BufferError, match="overlap"):
            comm.all_reduce(x[:8], output=x[2:])
        for call in (
            lambda: comm.gather_single(None, x, comm.rank),
            lambda: comm.gather_single(np.empty(19, np.float32), x, comm.rank),
            lambda: comm.gather(x, [x.copy()], comm.rank),
            lambda: comm.scatter_single(x, np.ones(19, np.float32), comm.rank),
            lambda: comm.scatter(x, None, comm.rank),
        ):
            with pytest.raises(zcomm.errors.BufferError):
                call()
        comm.all_reduce(x, codec="raw", output=x)  # itself is in place
        return x

    for x in run((Topology(nodes=1, ranks_per_node=2), False), program):
        assert (x == 2).all()
