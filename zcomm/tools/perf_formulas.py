"""What `zcomm perf` computes from bytes and seconds: nccl-tests' bandwidths, and the link at which a codec breaks even.

Pure functions. Sizes are bytes of the whole tensor on one rank: an all-reduce's tensor, an all-gather's output, a
reduce-scatter's input (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
GIGA = 1e9


def algorithm_bandwidth_gb_s(size_bytes_total: int, time_s: float) -> float:
    """What the caller sees: bytes of the tensor per second."""
    return size_bytes_total / time_s / GIGA


def bus_bandwidth_gb_s(collective: str, size_bytes_total: int, n_ranks: int, time_s: float) -> float:
    """algbw times the share of the tensor that must cross each rank's link, uncompressed: comparable between sizes of
    the group and with the link's speed."""
    crossings = 2 if collective == "all_reduce" else 1
    return algorithm_bandwidth_gb_s(size_bytes_total, time_s) * crossings * (n_ranks - 1) / n_ranks


def break_even_gbit_s(
    saved_bytes: float,  # on the link, compared with bf16
    added_codec_s: float,  # coding time, compared with bf16
) -> float:
    """The speed of the link below which the bytes saved are worth the coding added.

    0: nothing is saved, so never. Infinite: coding takes no longer, so always.
    """
    if saved_bytes <= 0:
        return 0.0
    return 8 * saved_bytes / added_codec_s / GIGA if added_codec_s > 0 else math.inf
