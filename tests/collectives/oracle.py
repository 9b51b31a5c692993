"""What collectives must return, by the codecs' numpy definitions alone: no schedule, chunk or engine in sight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zcomm.topology import Topology
from zcomm.wire.codec import Codec

SHARD_ALIGNMENT = 256  # docs/architecture.md: shards of an all-reduce begin at multiples of it


def values(rank: int, n_elems: int, dtype: np.dtype) -> np.ndarray:
    """Numbers that depend on rank and position, of mixed size and sign."""
    generator = np.random.default_rng(1000 + rank)
    x = generator.standard_normal(n_elems) * np.exp2(np.arange(n_elems) % 7 - 3.0) + (rank + 1) / 8
    return x.astype(np.float32).astype(dtype)


def through(codec: Codec, x: np.ndarray) -> np.ndarray:
    """float32 x as its wire bytes decode."""
    wire = np.empty(codec.nbytes(x.size), np.uint8)
    carried = np.ascontiguousarray(x, codec.dtype.numpy if str(codec).startswith("raw") else np.float32)
    codec.encode(carried, wire)
    out = np.empty_like(carried)
    codec.decode(wire, out)
    return out.astype(np.float32)


def added(terms: Sequence[np.ndarray]) -> np.ndarray:
    """fp32 sum in the order given."""
    total = terms[0].astype(np.float32)
    for term in terms[1:]:
        total = (total + term).astype(np.float32)
    return total


def finished(total: np.ndarray, op: str, size: int, factor: float) -> np.ndarray:
    """AVG's division or PREMUL_SUM's factor, in fp32."""
    if op == "AVG":
        return (total / np.float32(size)).astype(np.float32)
    if op == "PREMUL_SUM":
        return (total * np.float32(factor)).astype(np.float32)
    return total


def all_gather(codec: Codec, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Every rank's result."""
    return np.concatenate([through(codec, x.astype(np.float32)) for x in inputs]).astype(inputs[0].dtype)


def reduced_shard(
    codec: Codec,
    intra_codec: Codec,
    parts: Sequence[np.ndarray],  # every rank's contribution to one shard, float32
    topology: Topology | None,  # None: one hop
    op: str,
    factor: float,
) -> np.ndarray:
    """The float32 sum that the owner of a shard forms."""
    if topology is None:
        return finished(added([through(codec, part) for part in parts]), op, len(parts), factor)
    early = not codec.holds_sums
    partial = []
    for ranks in topology.ranks_of_node:
        node_sum = added([through(intra_codec, parts[rank]) for rank in ranks])
        if early:
            node_sum = finished(node_sum, op, len(parts), factor)
        partial.append(through(codec, node_sum))
    total = added(partial)
    return total if early else finished(total, op, len(parts), factor)


def reduce_scatter(
    codec: Codec,
    intra_codec: Codec,
    inputs: Sequence[np.ndarray],
    topology: Topology | None,
    op: str,
    factor: float = 1.0,
) -> list[np.ndarray]:
    """Every rank's shard."""
    n = inputs[0].size // len(inputs)
    return [
        reduced_shard(
            codec,
            intra_codec,
            [x[rank * n : (rank + 1) * n].astype(np.float32) for x in inputs],
            topology,
            op,
            factor,
        ).astype(inputs[0].dtype)
        for rank in range(len(inputs))
    ]


def all_reduce(
    codec: Codec,
    intra_codec: Codec,
    inputs: Sequence[np.ndarray],
    topology: Topology | None,
    op: str,
    factor: float = 1.0,
) -> np.ndarray:
    """The result of every rank."""
    size, n = len(inputs), inputs[0].size
    shard = math.ceil(n / size / SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    out = np.empty(n, inputs[0].dtype)
    for rank in range(size):
        cut = slice(min(rank * shard, n), min((rank + 1) * shard, n))
        parts = [x[cut].astype(np.float32) for x in inputs]
        out[cut] = through(codec, reduced_shard(codec, intra_codec, parts, topology, op, factor)).astype(out.dtype)
    return out


def two_nodes_all_reduce(
    codec: Codec, intra_codec: Codec, inputs: Sequence[np.ndarray], topology: Topology, op: str, factor: float = 1.0
) -> np.ndarray:
    """The result of every rank where two nodes swap their sums, slice by slice, a slice for each rank of a node."""
    n, slices = inputs[0].size, topology.ranks_per_node
    each = math.ceil(n / slices / SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    out = np.empty(n, inputs[0].dtype)
    for number in range(slices):
        cut = slice(min(number * each, n), min((number + 1) * each, n))
        parts = [x[cut].astype(np.float32) for x in inputs]
        out[cut] = reduced_shard(codec, intra_codec, parts, topology, op, factor).astype(out.dtype)
    return out


def one_shot_all_reduce(codec: Codec, inputs: Sequence[np.ndarray], op: str, factor: float = 1.0) -> np.ndarray:
    """The result of every rank where all gather everything and add it themselves."""
    parts = [x.astype(np.float32) for x in inputs]
    return reduced_shard(codec, codec, parts, None, op, factor).astype(inputs[0].dtype)
