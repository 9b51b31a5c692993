"""What one FSDP step must move, and what that takes at least: formulas, from codecs and shapes alone.

Bytes are those of docs/numbers.md (Bytes sent); the tests compare them with what communicators count. A step gathers
each unit's weights for the forward and again for the backward, and reduces its gradients. Times are bytes over a link's
rate: a lower bound, without latency and coding. Units so small that they go in one exchange (Plan.one_shot_bytes) are
counted in two hops like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec as parse_codec

STATE_BYTES = 16  # per parameter, sharded: float32 weight, gradient and Adam's two moments


@dataclass(frozen=True)
class Nodes:
    """Where the ranks sit."""

    nodes: int  # K
    ranks_per_node: int  # L

    @property
    def n_ranks(self) -> int:
        """On all nodes together."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Recipe:
    """How a step's collectives travel."""

    name: str
    weights: str  # codec of the gathers over all ranks
    gradients: str  # codec of the reductions
    two_hops: bool  # inside the node, then between nodes; else flat, as a ring between all ranks
    node_weights: str | None = None  # of backward gathers, from a copy kept in the node (hpZ); None: as the forward's


RECIPES = (
    Recipe("fp32", "raw", "raw", two_hops=False),
    Recipe("bf16", "bf16", "bf16", two_hops=False),
    Recipe("bf16_two_hop", "bf16", "bf16", two_hops=True),
    Recipe("int8", "int8", "int8", two_hops=True),
    Recipe("int8_int4", "int8", "int4", two_hops=True),
    Recipe("zeropp", "int8", "int4", two_hops=True, node_weights="bf16"),
)
BASELINES = ("fp32", "bf16", "bf16_two_hop")  # of them, those that are not compressed


@dataclass(frozen=True)
class Moved:
    """Bytes that one rank sends."""

    intra: int  # to its own node
    inter: int  # to other nodes

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.intra + other.intra, self.inter + other.inter)


def shard_elems(n_elems: int, n_ranks: int) -> int:
    """Elements of each rank's shard; FSDP pads the last."""
    return -(-n_elems // n_ranks)


def gathered_or_reduced(n_elems: int, shape: Nodes, codec: Codec, two_hops: bool) -> Moved:
    """What a rank sends in one all-gather or reduce-scatter of n_elems.

    Flat is counted as a ring, which NCCL uses: each shard passes each link once, so the last rank of a node sends all
    but one of them on to the next node; the figure here is the mean over the node's ranks.
    """
    nodes, per_node = shape.nodes, shape.ranks_per_node
    chunk = codec.nbytes(shard_elems(n_elems, shape.n_ranks))
    if two_hops and nodes > 1 and per_node > 1:
        return Moved(nodes * (per_node - 1) * chunk, (nodes - 1) * chunk)
    passed_on = (shape.n_ranks - 1) * chunk
    inter = passed_on // per_node if nodes > 1 else 0
    return Moved(passed_on - inter, inter)


def step(units: Sequence[int], shape: Nodes, recipe: Recipe) -> Moved:
    """What a rank sends in one step of a model whose units, wrapped one by one, have so many parameters each."""
    weights, gradients = (parse_codec(name) for name in (recipe.weights, recipe.gradients))
    total = Moved(0, 0)
    for unit in units:
        forward = gathered_or_reduced(unit, shape, weights, recipe.two_hops)
        total += forward + gathered_or_reduced(unit, shape, gradients, recipe.two_hops)
        if recipe.node_weights is None:
            total += forward
        else:
            total += gathered_or_reduced(unit, Nodes(1, shape.ranks_per_node), parse_codec(recipe.node_weights), False)
    return total


def memory_bytes(units: Sequence[int], shape: Nodes, recipe: Recipe) -> int:
    """What a rank must hold beside activations: its shard of weights, gradients and optimizer; two gathered units; its
    part of the node's copy where backward gathers come from it."""
    sharded = sum(shard_elems(unit, shape.n_ranks) for unit in units) * STATE_BYTES
    element_bytes = 4 if recipe.weights == "raw" else 2
    kept = 0
    if recipe.node_weights is not None:
        kept = sum(shard_elems(unit, shape.ranks_per_node) for unit in units) * element_bytes
    return sharded + 2 * max(units) * element_bytes + kept


def wire_s(
    moved: Moved,
    shape: Nodes,
    link_bytes_s: float,  # of a node, each way; infinite: not limited
    node_link_bytes_s: float,  # of a rank inside its node
) -> float:
    """The least time these bytes take: both levels at once, where the slower decides."""
    return max(moved.inter * shape.ranks_per_node / link_bytes_s, moved.intra / node_link_bytes_s)


def coded_bytes(units: Sequence[int], shape: Nodes, recipe: Recipe) -> int:
    """Float32 bytes that a rank's codecs read or write in a step in two hops, where they are more than casts.

    A gather encodes a shard and decodes the whole. A reduction encodes the whole, decodes L contributions to each of K
    shards, encodes K sums, and decodes K.
    """
    n_ranks, nodes, per_node = shape.n_ranks, shape.nodes, shape.ranks_per_node
    elems = 0
    for unit in units:
        shard = shard_elems(unit, n_ranks)
        if recipe.weights not in ("raw", "bf16"):
            elems += (1 if recipe.node_weights else 2) * (n_ranks + 1) * shard
        if recipe.gradients not in ("raw", "bf16"):
            elems += (n_ranks + nodes * per_node + 2 * nodes) * shard
    return 4 * elems
