"""Which way a call goes, and which codecs it travels in: those it asks for, or raw where they are not worth it.

Decided from facts that all ranks share, so that all decide alike: the plan, the topology, counts, dtype and codec. An
all-to-all's counts differ from rank to rank, so its size decides nothing. A call is never made lossier than it asks.

Plan.min_elems sends whatever is smaller raw. Plan.auto sends raw: 1. what stays inside one node, where links are fast;
2. what the codec would make smaller by less than a quarter, as bf16 would float16; 3. a call of at most AUTO_RAW_BYTES.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from zcomm.collectives.request import Pattern, Request
from zcomm.plan import AUTO_RAW_BYTES, Plan
from zcomm.topology import Topology
from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec as parse_codec

ONE_EXCHANGE_DIVISOR = 4  # of Plan.one_shot_bytes: what all-gathers and reduce-scatters may send in one exchange
TWO_NODES_FACTOR = 16  # of Plan.one_shot_bytes: the most encoded bytes of an array for which two nodes swap sums
_MANY = 1 << 16  # elements, to see how much smaller a codec makes them


class Way(enum.Enum):
    """How a call goes between ranks."""

    ONE_EXCHANGE = enum.auto()  # every rank sends directly to every other, once
    ONE_HOP = enum.auto()  # and so does an all-reduce, twice: flat.py
    TWO_NODES = enum.auto()  # an all-reduce that swaps nodes' sums: two_nodes.py
    TWO_HOPS = enum.auto()  # hierarchical.py


class Choice(NamedTuple):
    """What a call travels in."""

    codec: Codec
    intra_codec: Codec
    uncompressed: str | None  # why it is raw where another codec was asked for


def choose(plan: Plan, topology: Topology, request: Request) -> Choice:
    """The codecs of a call, for its dtype."""
    dtype = request.source.dtype
    raw = parse_codec("raw").for_dtype(dtype)
    codec, intra_codec = request.codec.for_dtype(dtype), request.intra_codec.for_dtype(dtype)
    reason = None if codec == raw else _why_raw(plan, topology, request, codec, raw)
    return Choice(codec, intra_codec, None) if reason is None else Choice(raw, raw, reason)


def way_of(
    plan: Plan,
    topology: Topology,
    pattern: Pattern,  # an all-gather, reduce-scatter or all-reduce
    codec: Codec,
    counts: tuple[int, ...],  # as Request.counts
) -> Way:
    """How such a call goes between ranks. Steps cost a short one more than bytes do.

    In one exchange an all-reduce sends all it has, size / 2 times the bytes, and adds what comes; that spares it up to
    three exchanges, so it may send plan.one_shot_bytes. An all-gather or reduce-scatter spares one, and may send a
    quarter of that. The default is what a link of a few hundred Mbit/s carries in the time that three exchanges take
    over gloo. Between two nodes an all-reduce of sixteen times the bytes spares an exchange by sending more inside
    nodes only.
    """
    nbytes = [codec.nbytes(count) for count in counts]
    if pattern is Pattern.ALL_REDUCE:
        sent = nbytes[0] * (topology.size - 1)
    elif pattern is Pattern.ALL_GATHER:
        sent = ONE_EXCHANGE_DIVISOR * max(nbytes) * (topology.size - 1)
    else:
        sent = ONE_EXCHANGE_DIVISOR * (sum(nbytes) - min(nbytes))
    if sent <= plan.one_shot_bytes:
        return Way.ONE_EXCHANGE
    if not (plan.hierarchical and topology.has_two_levels):
        return Way.ONE_HOP
    are_two_alike = topology.nodes == 2 and topology.ranks_per_node > 0
    if pattern is Pattern.ALL_REDUCE and are_two_alike and nbytes[0] <= TWO_NODES_FACTOR * plan.one_shot_bytes:
        return Way.TWO_NODES
    return Way.TWO_HOPS


def _why_raw(plan: Plan, topology: Topology, request: Request, codec: Codec, raw: Codec) -> str | None:
    n_elems = None if request.counts_differ else sum(request.counts)
    if n_elems is not None and n_elems < plan.min_elems:
        return f"fewer than min_elems={plan.min_elems} elements"
    if not plan.auto:
        return None
    if topology.nodes == 1:
        return "auto: all ranks are on one node"
    if 4 * codec.nbytes(_MANY) > 3 * raw.nbytes(_MANY):
        return f"auto: {codec} makes {request.source.dtype.spelling} smaller by less than a quarter"
    if n_elems is not None and n_elems * request.source.dtype.itemsize <= AUTO_RAW_BYTES:
        return f"auto: {AUTO_RAW_BYTES} bytes or fewer"
    return None
