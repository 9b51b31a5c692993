"""What a measured collective must return: exact sums, and how far off each element may be.

Inputs are made from seeds, so every rank knows all ranks' inputs. A rank checks one part of the result: of a
reduce-scatter what it received, of an all-gather its own shard, of an all-reduce one shard; that replicas are equal
is checked by a hash, so together the ranks check every element. Sums are float64; bounds follow docs/numbers.md with
`codec.error_bound` of the elements themselves in place of the worst case: what is encoded at a later hop is at most
|exact sum| + error so far, and that is the argument of the later hop's bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zcomm.collectives.choice import Way, way_of
from zcomm.collectives.request import Pattern
from zcomm.collectives.shards import Extent, balanced_shards, shards_of
from zcomm.plan import Plan
from zcomm.topology import Topology
from zcomm.wire.codec import Codec

SEED = 20
PIECE_ELEMS = 1 << 16  # made from one seed, so that any part can be made alone
FLOAT32_ROUNDOFF = 2.0**-24  # half a unit in the last place, of an element
BFLOAT16_ROUNDOFF = 2.0**-8


class Expected(NamedTuple):
    """What one part of a result must be."""

    exact: np.ndarray  # float64 (n,)
    bound: np.ndarray  # float64 (n,), largest |result - exact|
    ordered: np.ndarray | None  # float32 (n,): the very bits, of raw, whose sums have a fixed order; None: any in bound


class Check(NamedTuple):
    """How a result compares."""

    wrong_elems: int
    max_error: float
    error_over_bound: float  # the largest of any element; 1 is still right


class _NodeSum(NamedTuple):
    """The sum of some ranks' inputs, as it is before any of it is rounded to float32."""

    exact: np.ndarray  # float64 (n,)
    magnitude: np.ndarray  # float64 (n,), sum of the largest magnitudes that the decoded terms can have
    coded: np.ndarray  # float64 (n,), error of the decoded terms


def values(rank: int, start: int, stop: int) -> np.ndarray:
    """float32 elements start to stop of a rank's input: normally distributed, unlike any other rank's."""
    first = start // PIECE_ELEMS
    pieces = [
        np.random.default_rng((SEED, rank, piece)).standard_normal(PIECE_ELEMS, np.float32)
        for piece in range(first, -(-stop // PIECE_ELEMS))
    ]
    at = first * PIECE_ELEMS
    return np.concatenate([np.empty(0, np.float32), *pieces])[start - at : stop - at]


class Truth:
    """The part of one collective's result that one rank checks."""

    def __init__(
        self,
        collective: str,
        n_elems: int,  # of the whole array
        rank: int,
        topology: Topology,
        extent: Extent | None = None,  # the part, and what is encoded together; None: the rank's shard
    ) -> None:
        self._collective = collective
        self._n_elems = n_elems
        self._rank = rank
        self._topology = topology
        size = topology.size
        shards = balanced_shards(n_elems, size) if collective == "all_reduce" else shards_of((n_elems // size,) * size)
        start, n = extent or shards[rank]
        if collective == "all_gather":
            self.terms = [values(rank, 0, n)]
        else:
            self.terms = [values(each, start, start + n) for each in range(size)]
        self.part = slice(0, n) if collective == "reduce_scatter" else slice(start, start + n)  # of the result
        self.exact = summed(self.terms)
        self._node_sums: tuple[Codec, list[_NodeSum]] | None = None  # of the codec asked for last

    def of_codec(self, codec: Codec, hops: int) -> Expected:
        """What zcomm must return."""
        all_reduce, size = self._collective == "all_reduce", self._topology.size
        counts = (self._n_elems,) if all_reduce else (self._n_elems // size,) * size
        plan = Plan(hierarchical=hops == 2)
        way = way_of(plan, self._topology, Pattern[self._collective.upper()], codec, counts)
        if all_reduce and way is Way.ONE_EXCHANGE:
            everything = Truth("reduce_scatter", self._n_elems, self._rank, self._topology, Extent(0, self._n_elems))
            exact, bound, ordered = everything.of_codec(codec, 1)
            return Expected(exact[self.part], bound[self.part], None if ordered is None else ordered[self.part])
        two_hops = way in (Way.TWO_NODES, Way.TWO_HOPS)
        ordered = self._ordered(two_hops) if str(codec) == "raw" else None
        if self._collective == "all_gather":
            return Expected(self.exact, codec.error_bound(self.terms[0]), ordered)
        sums = self._sums_of_nodes(codec)
        if two_hops:
            magnitude, bound = np.zeros_like(self.exact), np.zeros_like(self.exact)
            for ranks, one in zip(self._topology.ranks_of_node, sums, strict=True):
                partial = one.coded + rounding(FLOAT32_ROUNDOFF, len(ranks) - 1) * one.magnitude
                partial += codec.error_bound(_largest(one.exact, partial))
                bound += partial
                magnitude += np.abs(one.exact) + partial
            bound += rounding(FLOAT32_ROUNDOFF, len(sums) - 1) * magnitude
        else:
            bound = summed([one.coded for one in sums])
            bound += rounding(FLOAT32_ROUNDOFF, len(self.terms) - 1) * summed([one.magnitude for one in sums])
        if all_reduce and way is not Way.TWO_NODES:
            bound = bound + codec.error_bound(_largest(self.exact, bound))
        return Expected(self.exact, bound, ordered)

    def of_library(self, dtype: str) -> Expected:
        """What a library's own collective must return: sums in any order, each addition rounded to the dtype."""
        roundoff = BFLOAT16_ROUNDOFF if dtype == "bfloat16" else FLOAT32_ROUNDOFF
        roundings = len(self.terms) - 1 + (dtype == "bfloat16")  # the additions, and of the input
        magnitude = summed([np.abs(term) for term in self.terms])
        return Expected(self.exact, rounding(roundoff, roundings) * magnitude, None)

    def _sums_of_nodes(self, codec: Codec) -> list[_NodeSum]:
        if self._node_sums is None or self._node_sums[0] != codec:
            self._node_sums = None  # before as much is taken again
            self._node_sums = codec, [self._node_sum(codec, ranks) for ranks in self._topology.ranks_of_node]
        return self._node_sums[1]

    def _node_sum(self, codec: Codec, ranks: Sequence[int]) -> _NodeSum:
        total = _NodeSum(*(np.zeros_like(self.exact) for _ in range(3)))
        for rank in ranks:
            term, error = self.terms[rank], codec.error_bound(self.terms[rank])
            total.exact[:] += term
            total.magnitude[:] += np.abs(term) + error
            total.coded[:] += error
        return total

    def _ordered(self, two_hops: bool) -> np.ndarray:
        """The float32 sum in rank order; in two hops inside each node first, then in node order."""
        if not two_hops or self._collective == "all_gather":
            return added(self.terms)
        return added([added([self.terms[rank] for rank in ranks]) for ranks in self._topology.ranks_of_node])


def summed(
    terms: Sequence[np.ndarray],  # each (n,)
) -> np.ndarray:  # float64 (n,)
    """Their sum in float64."""
    total = np.zeros(terms[0].size, np.float64)
    for term in terms:
        total += term
    return total


def added(terms: Sequence[np.ndarray]) -> np.ndarray:
    """float32 sum in the order given."""
    total = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


def rounding(roundoff: float, times: int) -> float:
    """Largest error of a sum in any order, relative to the sum of magnitudes, if a term is rounded at most `times`
    times."""
    return float((1 + roundoff) ** times - 1)


def compare(
    result: np.ndarray,  # float32 (n,)
    expected: Expected,
) -> Check:
    """Count the elements that are off by more than their bound; not a number is infinitely off."""
    with np.errstate(invalid="ignore"):
        error = np.abs(result - expected.exact)
    error[np.isnan(error)] = np.inf
    right = error <= expected.bound
    if expected.ordered is not None:
        right &= result == expected.ordered
    share = np.divide(error, expected.bound, out=np.where(error == 0, 0.0, np.inf), where=expected.bound > 0)
    return Check(int(np.count_nonzero(~right)), float(error.max(initial=0.0)), float(share.max(initial=0.0)))


def _largest(exact: np.ndarray, error: np.ndarray) -> np.ndarray:
    """|exact| + error as float32, rounded up."""
    return np.nextafter((np.abs(exact) + error).astype(np.float32), np.float32(np.inf))
