"""Times of calls beside a memcpy's in the same moment: what kernels.py and kernels_others.py measure with."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from zcomm.buffers import DType


class Run(NamedTuple):
    """One verb on memory that is there: what a row measures."""

    engine: str
    codec: str
    op: str
    dtype: DType
    n_elems: int
    in_nbytes: int  # read
    out_nbytes: int  # written
    call: Callable[[], Any]
    exact: bool | None  # None: bytes of another format


class Memcpy:
    """The yardstick: copies of n float32 elements."""

    def __init__(self, n_elems: int, clock: Callable[[], float] = time.thread_time) -> None:
        self.n_elems, self.nbytes, self.clock = n_elems, 4 * n_elems, clock
        self.source = aligned(np.random.default_rng(0).standard_normal(n_elems, dtype=np.float32))
        self.target = aligned(np.ones(n_elems, np.float32))
        self.repeats = repeats_of(n_elems)

    def seconds_per_byte(self) -> float:
        """Of bytes moved: read and written."""
        to, source, nbytes = self.target.ctypes.data, self.source.ctypes.data, self.nbytes
        return self.seconds(lambda: ctypes.memmove(to, source, nbytes), self.repeats) / (2 * nbytes)

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        """Time of one call by the same clock, the mean of `repeats` in a row."""
        start = self.clock()
        for _ in range(repeats):
            call()
        return max(self.clock() - start, 1e-9) / repeats


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy of x that begins on a cache line, as torch's memory does."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + x.nbytes].view(x.dtype)
    copy[:] = x
    return copy


class Memory:
    """Places by name, each as large as was ever asked for, its pages there: rows after one another share them."""

    def __init__(self) -> None:
        self._places: dict[str, np.ndarray] = {}

    def take(self, name: str, nbytes: int) -> np.ndarray:  # uint8 (nbytes,)
        """What lies there is whatever was left."""
        if name not in self._places or self._places[name].size < nbytes:
            self._places[name] = aligned(np.ones(nbytes, np.uint8))
        return self._places[name][:nbytes]


def repeats_of(n_elems: int) -> int:
    """A short operation is repeated, so that a round of it lasts about a millisecond."""
    return max(1, 2**20 // max(1, n_elems))


def measure(runs: Iterable[Run], memcpy: Memcpy, rounds: int) -> list[dict[str, Any]]:
    """Rows, in the order of the runs, which take turns with the memcpy and each other. One round warms up."""
    runs = list(runs)
    times: list[list[float]] = [[] for _ in runs]
    copies: list[list[float]] = [[] for _ in runs]
    for round_ in range(rounds + 1):
        for i, run in enumerate(runs):
            per_byte = memcpy.seconds_per_byte()
            took = memcpy.seconds(run.call, repeats_of(run.n_elems) if run.engine.startswith("native") else 1)
            if round_:
                times[i].append(took)
                copies[i].append(per_byte)
    return [row_of(run, *of) for run, *of in zip(runs, times, copies, strict=True)]


def row_of(run: Run, times: list[float], copies: list[float]) -> dict[str, Any]:
    """Medians of one run, units in the keys."""
    moved, took, per_byte = run.in_nbytes + run.out_nbytes, statistics.median(times), statistics.median(copies)
    shares = [copy * moved / time_s for time_s, copy in zip(times, copies, strict=True)]
    of_copy = [time_s / (copy * 2 * run.in_nbytes) for time_s, copy in zip(times, copies, strict=True)]
    return {
        "engine": run.engine,
        "codec": run.codec,
        "op": run.op,
        "dtype": run.dtype.spelling,
        "n_elems": run.n_elems,
        "time_us": round(took * 1e6, 2),
        "moved_nbytes": moved,
        "rate_gb_s": round(moved / took / 1e9, 2),
        "memcpy_gb_s": round(1 / per_byte / 1e9, 2),
        "share_of_memcpy_percent": round(100 * statistics.median(shares), 1),
        "time_over_input_copy": round(statistics.median(of_copy), 3),
        "exact": run.exact,
    }
