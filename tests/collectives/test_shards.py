"""Shards cover the array once; chunks cover the shards once and are cut between blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zcomm.collectives.shards import SHARD_ALIGNMENT, balanced_shards, chunks, shards_of

COUNTS = st.one_of(st.integers(0, 5000), st.sampled_from([2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40]))


@given(COUNTS, st.integers(1, 64))
def test_balanced_shards_cover_the_array_in_rank_order(n_elems, size):
    shards = balanced_shards(n_elems, size)

    assert len(shards) == size
    at = 0
    for start, n in shards:
        assert start == at
        assert n == 0 or start % SHARD_ALIGNMENT == 0
        at += n
    assert at == n_elems


@given(st.integers(0, 10**12), st.integers(1, 64))
def test_shards_of_lie_in_rank_order(n_elems, size):
    assert [tuple(extent) for extent in shards_of((n_elems,) * size)] == [(r * n_elems, n_elems) for r in range(size)]


@given(
    st.integers(0, 200_000),
    st.integers(1, 9),
    st.integers(1, 1 << 20),
    st.lists(st.sampled_from([1, 8, 24, 100, 128, 256, 2048]), max_size=2),
)
def test_chunks_cover_every_shard_and_respect_blocks(n_elems, size, chunk_elems, blocks):
    shards = balanced_shards(n_elems, size)

    cuts = chunks(shards, chunk_elems, blocks)

    assert len(cuts) >= 1
    for rank, (start, n) in enumerate(shards):
        at = start
        for cut in cuts:
            assert cut[rank].start == at
            assert all((cut[rank].start - start) % block == 0 for block in blocks) or cut[rank].n_elems == 0
            at += cut[rank].n_elems
        assert at == start + n
    for rank in range(size):  # a ring of scratch relies on it
        sizes = [cut[rank].n_elems for cut in cuts]
        assert sizes == sorted(sizes, reverse=True)


def test_counts_past_two_to_the_31_need_no_memory_to_be_cut():
    shards = balanced_shards(2**33 + 3, 3)

    cuts = chunks(shards, 1 << 30, [256])

    assert sum(extent.n_elems for cut in cuts for extent in cut) == 2**33 + 3
