"""What a call costs besides the wire: Python and codec, for a small message, with a transport that moves nothing.

    python bench/overhead.py --json bench/results/overhead.json

Rank 0 of four ranks is played in one process. Its peers are silent: sends are dropped, receives are full at once, so
what is left is what zcomm adds to the backend's own time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zcomm
from zcomm.collectives.agreement import CARD_BYTES
from zcomm.tools.about import about
from zcomm.tools.output_file import why_not_writable, write_json
from zcomm.transports.local import LocalTransport, LocalWorld
from zcomm.transports.transport import Parcel


class SilentTransport(LocalTransport):
    """Rank 0 of four ranks of which only this one exists."""

    name = "silent"

    def __init__(self) -> None:
        super().__init__(LocalWorld(4), 0)

    def empty(self, nbytes: int) -> np.ndarray:
        """Zeros, which decode as zero blocks."""
        return np.zeros(nbytes, np.uint8)

    def open(
        self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], tag: int, timeout_s: float | None
    ) -> SilentExchange:
        """Nothing to post."""
        return SilentExchange(outgoing, incoming if all(p.payload.size == CARD_BYTES for p in incoming) else ())


class SilentExchange:
    """Echoes the cards that ranks compare, drops everything else."""

    def __init__(self, outgoing: Sequence[Parcel], cards: Sequence[Parcel]) -> None:
        self._outgoing = outgoing
        self._cards = cards

    def start(self) -> None:
        """Peers make the calls that this rank makes."""
        for parcel, answer in zip(self._outgoing, self._cards, strict=False):
            answer.payload[:] = parcel.payload

    def wait(self) -> None:
        """Everything is there."""

    def close(self) -> None:
        """Everything is taken."""


def main() -> None:
    """Print and write one row per collective, codec and way that calls go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=int, default=4096, help="of the float32 input (default 4096)")
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if problem := why_not_writable("--json", args.json):
        parser.error(problem)
    try:
        import torch

        def array(n_elems: int) -> Any:
            return torch.ones(n_elems)
    except ImportError:

        def array(n_elems: int) -> Any:
            return np.ones(n_elems, np.float32)

    n_elems = args.nbytes // 16 * 4  # four equal shards
    rows = []
    print(f"{'collective':<16}{'codec':<8}{'way':<14}{'us per call':>12}{'p90':>8}")
    flat, two_by_two = zcomm.Topology(nodes=1, ranks_per_node=4), zcomm.Topology(nodes=2, ranks_per_node=2)
    for way, plan, topology in (
        ("one exchange", zcomm.Plan(), two_by_two),  # as calls of this size go
        ("one hop", zcomm.Plan(one_shot_bytes=0), flat),
        ("two hops", zcomm.Plan(one_shot_bytes=0), two_by_two),
    ):
        comm = zcomm.Communicator(SilentTransport(), plan, topology)
        for codec in ("raw", "int8", "int4"):
            whole, part = array(n_elems), array(n_elems // 4)
            for name, call in {
                "all_reduce": partial(comm.all_reduce, whole, "avg", codec),
                "all_gather": partial(comm.all_gather_single, whole, part, codec),
                "reduce_scatter": partial(comm.reduce_scatter_single, part, whole, "avg", codec),
            }.items():
                times = times_us(call, args.calls)
                row = {
                    "collective": name,
                    "codec": codec,
                    "way": way,
                    "nbytes": 4 * n_elems,
                    "median_us": statistics.median(times),
                    "p90_us": times[len(times) * 9 // 10],
                }
                rows.append(row)
                print(f"{name:<16}{codec:<8}{way:<14}{row['median_us']:>12.1f}{row['p90_us']:>8.1f}")
    if args.json:
        write_json(args.json, {"about": about("python bench/overhead.py"), "rows": rows})


def times_us(call: Callable[[], object], n_calls: int) -> list[float]:
    """Microseconds of each call after a warm-up, ascending."""
    for _ in range(50):
        call()
    times = []
    for _ in range(n_calls):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e6)
    return sorted(times)


if __name__ == "__main__":
    main()
