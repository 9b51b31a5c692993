"""Which elements belong to which rank, and how they are cut into pipeline chunks. Pure arithmetic.

Every rank computes the same cuts from the same counts, so nothing about them travels.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

SHARD_ALIGNMENT = 256  # elements; shards of an all-reduce begin at multiples of it, which keeps blocks whole


class Extent(NamedTuple):
    """Elements start to start + n_elems of a flat array."""

    start: int
    n_elems: int


def shards_of(
    counts: tuple[int, ...],  # elements of each rank's shard
) -> list[Extent]:
    """Shards that lie in rank order, one behind another."""
    starts = [0, *accumulate(counts)]
    return [Extent(start, count) for start, count in zip(starts, counts, strict=False)]


def balanced_shards(
    n_elems: int,  # of the whole array
    size: int,
) -> list[Extent]:
    """Shards of an all-reduce: equal and aligned, the last ones shorter or empty."""
    shard = -(-n_elems // size)
    shard = -(-shard // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    starts = [min(rank * shard, n_elems) for rank in range(size + 1)]
    return [Extent(starts[rank], starts[rank + 1] - starts[rank]) for rank in range(size)]


def chunks(
    shards: list[Extent],
    chunk_elems: int,  # elements of all shards together that one chunk should hold
    blocks: list[int],  # of the codecs, in elements; chunks are cut between blocks, so that cutting changes no result
) -> list[list[Extent]]:
    """Cut all shards alike: chunk c of every shard, for each c. One chunk, maybe of nothing, at least."""
    longest = max(extent.n_elems for extent in shards)
    unit = math.lcm(SHARD_ALIGNMENT, *blocks)
    whole = max(1, sum(extent.n_elems for extent in shards))
    wanted = max(unit, chunk_elems * longest // whole)
    count = max(1, -(-longest // wanted))
    step = -(-longest // count)
    step = max(unit, -(-step // unit) * unit)
    return [
        [Extent(start + min(at, n), max(0, min(n - at, step))) for start, n in shards]
        for at in range(0, max(longest, 1), step)
    ]
