"""Counts that fit no block, no rank, no node: padding is internal, and nothing of it shows in a result."""

from __future__ import annotations

import forms
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zcomm
from zcomm import Communicator, Plan, Topology, local

ODD_SIZES = (1, 2, 3, 7, 8, 9, 127, 129, 257, 2305)


def guarded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy of x inside memory filled with a pattern, and that memory."""
    whole = np.full(x.size + 128, -12345.0, x.dtype)
    inside = whole[64 : 64 + x.size]
    inside[...] = x
    return inside, whole


@pytest.mark.parametrize("placement", forms.PLACEMENTS)
def test_any_count_gives_the_exact_result_and_nothing_around_it_is_touched(placement):
    size = forms.PLACEMENTS[placement].size

    def values(rank: int, n: int) -> np.ndarray:
        return (np.arange(n * size) % 11 + rank + 1).astype(np.float32)

    def program(comm):
        for name in forms.FORMS:
            for n in ODD_SIZES[:8]:
                around = []

                def make(x, around=around):
                    inside, whole = guarded(x)
                    around.append(whole)
                    return inside

                got = forms.carry_out(forms.FORMS[name](comm, values(comm.rank, n), "sum", make), codec="raw")
                wanted = forms.exact(name, [values(rank, n) for rank in range(size)], comm.rank)
                assert got.shape == wanted.shape, (name, n)
                assert np.array_equal(got, wanted), (name, n)
                assert all((whole[:64] == -12345).all() and (whole[-64:] == -12345).all() for whole in around)

    forms.run(placement, program, check="never")


@pytest.mark.parametrize("placement", ["3", "4", "2+1", "2x2"])
def test_every_codec_at_odd_counts_stays_in_its_own_bound(placement):
    """Each element by the bound of its own block, also where a shard ends inside a block."""
    size = forms.PLACEMENTS[placement].size

    def program(comm):
        for codec in map(zcomm.codec, forms.CODECS):
            resolved = codec.for_dtype(zcomm.buffers.DType.FLOAT32)
            for n in ODD_SIZES:
                xs = [oracle.values(rank, n, np.dtype(np.float32)) for rank in range(size)]
                out = np.full(n * size, np.nan, np.float32)
                comm.all_gather_single(out, xs[comm.rank], codec)
                for rank, x in enumerate(xs):
                    error = np.abs(out[rank * n : (rank + 1) * n].astype(np.float64) - x)
                    assert (error <= resolved.error_bound(x)).all(), (str(codec), n, rank)

    forms.run(placement, program, check="never")


@pytest.mark.parametrize("placement", ["4", "8", "2x2", "2x4"])
@pytest.mark.parametrize("n_elems", [1, 2, 3])
def test_ranks_may_own_nothing(placement, n_elems):
    """Fewer elements than ranks: most shards of the all-reduce, and of the uneven forms, are empty."""
    size = forms.PLACEMENTS[placement].size

    def program(comm):
        x = np.arange(n_elems, dtype=np.float32) + comm.rank
        comm.all_reduce(x, "sum", "raw")
        counts = [n_elems if rank == size - 1 else 0 for rank in range(size)]
        gathered = np.full(n_elems, np.nan, np.float32)
        comm.all_gather_single(gathered, x[: counts[comm.rank]].copy(), "raw", counts=counts)
        reduced = np.full(counts[comm.rank], np.nan, np.float32)
        comm.reduce_scatter_single(reduced, x, "avg", "raw", counts=counts)
        return x, gathered, reduced

    total = np.arange(n_elems) * size + sum(range(size))
    for rank, (x, gathered, reduced) in enumerate(forms.run(placement, program, one_shot_bytes=0)):
        assert x.tolist() == total.tolist()
        assert gathered.tolist() == total.tolist()
        assert reduced.tolist() == (total.tolist() if rank == size - 1 else [])


def poisoned(transport):
    """A transport whose memory is full of NaN, in every dtype and codec, before it is written."""
    inner = transport.empty

    def empty(nbytes: int) -> np.ndarray:
        memory = inner(nbytes)
        memory[:] = 0xFF
        return memory

    transport.empty = empty
    return transport


@pytest.mark.parametrize("placement", ["2", "3", "2+1", "2x2", "3+1+2+2 mixed"])
def test_what_nobody_wrote_contributes_nothing(placement):
    topology = forms.PLACEMENTS[placement]
    size = topology.size

    def program(transport):
        with Communicator(poisoned(transport), Plan(check="never", one_shot_bytes=0), topology) as comm:
            for codec in forms.CODECS:
                for name in forms.FORMS:
                    x = oracle.values(comm.rank, 37 * size, np.dtype(np.float32))
                    got = forms.carry_out(forms.FORMS[name](comm, x, "sum", np.copy), codec=codec)
                    assert np.isfinite(got).all(), (codec, name)
                    zeros = forms.carry_out(forms.FORMS[name](comm, 0 * x, "sum", np.copy), codec=codec)
                    assert not zeros.any(), (codec, name)

    local.run(size, program)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_counts_on_any_nodes(data):
    """Uneven shards over any placement of up to five ranks, against sums that are exact."""
    node_of_rank = tuple(data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=5), label="node of rank"))
    size = len(node_of_rank)
    counts = data.draw(st.lists(st.integers(0, 700), min_size=size, max_size=size), label="counts")
    chunk_elems = data.draw(st.sampled_from([1, 256, 1 << 20]), label="chunk_elems")
    total = sum(counts)
    starts = np.cumsum([0, *counts])
    inputs = [(np.arange(total) % 17 + rank).astype(np.float32) for rank in range(size)]

    def program(transport):
        with Communicator(transport, Plan("raw", chunk_elems=chunk_elems), Topology(node_of_rank=node_of_rank)) as comm:
            mine = slice(starts[comm.rank], starts[comm.rank + 1])
            gathered = np.full(total, np.nan, np.float32)
            comm.all_gather_single(gathered, inputs[comm.rank][mine].copy(), counts=counts)
            reduced = np.full(counts[comm.rank], np.nan, np.float32)
            comm.reduce_scatter_single(reduced, inputs[comm.rank], counts=counts)
            everything = inputs[comm.rank].copy()
            comm.all_reduce(everything)
            return gathered, reduced, everything

    wanted = np.concatenate([inputs[rank][starts[rank] : starts[rank + 1]] for rank in range(size)])
    for rank, (gathered, reduced, everything) in enumerate(local.run(size, program)):
        assert np.array_equal(gathered, wanted)
        assert np.array_equal(reduced, sum(inputs)[starts[rank] : starts[rank + 1]])
        assert np.array_equal(everything, sum(inputs))
