"""Speed of the native engine on one core, beside memcpy of the same run and torch's eager kernels.

    python bench/kernels.py [--n 16Mi] [--rounds 11] [--only int8,encode,float32] [--json bench/results/kernels.json]

Times are the thread's own (other programs' turns on the core do not count), medians of interleaved rounds: every row
once per round, memcpy among them, so that what else the machine does falls on all rows alike. GB/s count bytes moved:
what an operation must read plus what it must write (10^9 per second). "share" is that rate over memcpy's in the same
round; "vs copy" is the time over that of copying the operation's input. Every row's result is compared with the
reference engine's, byte for byte, on a smaller odd count. torch's eager kernels allocate their results, fresh pages
included, as they do in a program; ours write into the caller's memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcomm.buffers import DType
from zcomm.engines.engine import NO_FINISH, Engine
from zcomm.engines.native import NativeEngine
from zcomm.engines.reference import ReferenceEngine
from zcomm.wire.cast import Cast
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.wire.elements import narrow
from zcomm.wire.int_block import IntBlock
from zcomm.wire.raw import Raw
from zcomm.wire.registry import codec

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

N_CHUNKS = 4  # chunks that a reduce adds
IN_CACHE_NBYTES = 512 * 1024  # float32 input of the in-cache rows
CHECKED_N_ELEMS = 100_003
FULL_CODECS = ("raw", "bf16", "fp16", "int8", "int4")
FLOAT32_CODECS = ("int7", "int6", "int5", "int3", "int2", "int8:stochastic", "int4:stochastic")
FLOAT32_CODECS += ("hadamard:int8", "hadamard:int4", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4")
DRAW = Draw(seed=1, call=2, first=0)
OPS = ("encode", "decode", "reduce", "reduce_encode")


class Case(NamedTuple):
    """One row of the table: an operation on preallocated memory."""

    codec: str
    op: str
    dtype: DType
    n_elems: int
    in_nbytes: int  # read
    out_nbytes: int  # written
    run: Callable[[], None]
    torch_run: Callable[[], Any] | None


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy of x that begins on a cache line, as torch's memory does."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + x.nbytes].view(x.dtype)
    copy[:] = x
    return copy


class Buffers:
    """Memory of one element count, shared by all cases and written once so that its pages are there."""

    def __init__(self, n_elems: int) -> None:
        rng = np.random.default_rng(0)
        normal = rng.standard_normal(n_elems, dtype=np.float32)
        self.n_elems = n_elems
        self.source = {dtype: aligned(narrow(normal, dtype)) for dtype in DType}
        self.target = {dtype: aligned(np.ones(n_elems, dtype.numpy)) for dtype in DType}
        self.copied = aligned(np.ones(n_elems, np.float32))
        self.wires: list[np.ndarray] = []  # kept alive: cases hold addresses only

    def copy(self, nbytes: int) -> None:
        """memcpy of nbytes, at most all of the float32 elements."""
        ctypes.memmove(self.copied.ctypes.data, self.source[DType.FLOAT32].ctypes.data, nbytes)


def cases(engine: Engine, buffers: Buffers, only: set[str]) -> Iterator[Case]:
    """Every row for one element count whose codec, op and dtype are asked for."""
    for spec in FULL_CODECS + FLOAT32_CODECS:
        for dtype in DType if spec in FULL_CODECS else (DType.FLOAT32,):
            of_dtype = codec(spec).for_dtype(dtype)
            words = {spec, dtype.spelling}
            wanted = [op for op in OPS if not only or all(w in words | {op} for w in only)]
            if dtype is not DType.FLOAT32 and "reduce_encode" in wanted:
                wanted.remove("reduce_encode")  # no elements in it
            if wanted:
                yield from _cases(engine, buffers, spec, of_dtype, dtype, wanted)


def _cases(engine: Engine, buffers: Buffers, spec: str, kind: Codec, dtype: DType, wanted: list[str]) -> Iterator[Case]:
    n, nbytes = buffers.n_elems, kind.nbytes(buffers.n_elems)
    source, target = buffers.source[dtype], buffers.target[dtype]
    chunks = [aligned(np.zeros(nbytes, np.uint8)) for _ in range(N_CHUNKS)]
    out = aligned(np.ones(nbytes, np.uint8))
    buffers.wires += [*chunks, out]
    for chunk in chunks:
        engine.encode(kind, source.ctypes.data, n, dtype, chunk.ctypes.data, DRAW)
    wires = [chunk.ctypes.data for chunk in chunks]
    x, y, w = source.ctypes.data, target.ctypes.data, out.ctypes.data
    runs: dict[str, tuple[int, int, Callable[[], None]]] = {
        "encode": (source.nbytes, nbytes, lambda: engine.encode(kind, x, n, dtype, w, DRAW)),
        "decode": (nbytes, target.nbytes, lambda: engine.decode(kind, wires[0], n, y, dtype)),
        "reduce": (
            N_CHUNKS * nbytes,
            target.nbytes,
            lambda: engine.reduce(kind, wires, n, NO_FINISH, y, dtype),
        ),
        "reduce_encode": (
            N_CHUNKS * nbytes,
            nbytes,
            lambda: engine.reduce_encode(kind, wires, n, NO_FINISH, kind, w, DRAW),
        ),
    }
    eager = torch_runs(kind, source, dtype) if torch is not None else {}
    for op in wanted:
        in_nbytes, out_nbytes, run = runs[op]
        yield Case(spec, op, dtype, n, in_nbytes, out_nbytes, run, eager.get(op))


def torch_runs(kind: Codec, source: np.ndarray, dtype: DType) -> dict[str, Callable[[], Any]]:
    """The same steps by torch's eager kernels, for int8, int4 and the casts."""
    if not isinstance(kind, Raw | Cast | IntBlock):
        return {}
    x = torch.from_numpy(source.view(np.uint16) if dtype is DType.BFLOAT16 else source)
    if dtype is DType.BFLOAT16:
        x = x.view(torch.bfloat16)
    if not isinstance(kind, IntBlock):
        to = getattr(torch, kind.dtype.spelling)  # type: ignore[attr-defined]
        coded = x.to(to, copy=True)
        return {
            "encode": lambda: x.to(to, copy=True),
            "decode": lambda: coded.to(x.dtype, copy=True),
            "reduce": lambda: sum((coded.float() for _ in range(N_CHUNKS)), start=0).to(x.dtype),
        }
    if kind.bits not in (4, 8) or x.numel() % kind.block or kind.rounding != "nearest":
        return {}
    qmax, half = kind.qmax, kind.block // 2

    def encode() -> Any:
        rows = x.view(-1, kind.block).float()
        scale = rows.abs().amax(1, keepdim=True) / qmax
        q = (rows / scale).round().to(torch.int8)
        return scale, q if kind.bits == 8 else (q[:, :half] & 15) | (q[:, half:] << 4)

    def decoded(scale: Any, q: Any) -> Any:
        if kind.bits == 4:
            q = torch.cat(((q << 4) >> 4, q >> 4), 1)
        return q.float() * scale

    scale, q = encode()
    return {
        "encode": encode,
        "decode": lambda: decoded(scale, q).to(x.dtype),
        "reduce": lambda: sum((decoded(scale, q) for _ in range(N_CHUNKS)), start=0).to(x.dtype),
    }


def agrees(spec: str, op: str, dtype: DType) -> bool:
    """Whether the native engine gives the reference's bytes for this row on an odd count."""
    n = CHECKED_N_ELEMS
    kind = codec(spec).for_dtype(dtype)
    rng = np.random.default_rng(1)
    sources = [narrow(rng.standard_normal(n, dtype=np.float32), dtype) for _ in range(N_CHUNKS)]
    results = []
    for engine in (ReferenceEngine(), NativeEngine()):
        chunks = [np.empty(kind.nbytes(n), np.uint8) for _ in sources]
        for source, chunk in zip(sources, chunks, strict=True):
            engine.encode(kind, source.ctypes.data, n, dtype, chunk.ctypes.data, DRAW)
        wires = [chunk.ctypes.data for chunk in chunks]
        target = np.empty(n, dtype.numpy)
        again = np.empty(kind.nbytes(n), np.uint8)
        if op == "decode":
            engine.decode(kind, wires[0], n, target.ctypes.data, dtype)
        elif op == "reduce":
            engine.reduce(kind, wires, n, NO_FINISH, target.ctypes.data, dtype)
        elif op == "reduce_encode":
            engine.reduce_encode(kind, wires, n, NO_FINISH, kind, again.ctypes.data, DRAW)
        results.append({"encode": chunks[0], "reduce_encode": again}.get(op, target.view(np.uint8)).tobytes())
    return results[0] == results[1]


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Time of one run, the mean of `repeats` in a row."""
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats


def measure(engine: Engine, n_elems: int, rounds: int, only: set[str]) -> list[dict[str, Any]]:
    """The rows of one element count."""
    buffers = Buffers(n_elems)
    rows = list(cases(engine, buffers, only))
    # A short operation is repeated, so that a round of it lasts about a millisecond.
    repeats = max(1, 2**22 // (4 * n_elems))
    full = 4 * n_elems
    sizes = sorted({full} | {min(case.in_nbytes, full) for case in rows})
    copies: dict[int, list[float]] = {size: [] for size in sizes}
    times: list[list[float]] = [[] for _ in rows]
    shares: list[list[float]] = [[] for _ in rows]
    torch_times: list[list[float]] = [[] for _ in rows]
    for round_ in range(rounds + 1):  # the first warms up
        copied = {size: seconds(lambda size=size: buffers.copy(size), repeats) for size in sizes}  # type: ignore[misc]
        for i, case in enumerate(rows):
            if i % 8 == 7:  # memcpy again, so that it is never far away in time
                copied[full] = seconds(lambda: buffers.copy(full), repeats)
            took = seconds(case.run, repeats)
            if round_:
                times[i].append(took)
                shares[i].append((case.in_nbytes + case.out_nbytes) / took / (2 * full / copied[full]))
            if case.torch_run and 0 < round_ <= 3:
                torch_times[i].append(seconds(case.torch_run, max(1, repeats // 4)))
        if round_:
            for size in sizes:
                copies[size].append(copied[size])
    table = []
    for case, took_s, share, torch_s in zip(rows, times, shares, torch_times, strict=True):
        moved, took = case.in_nbytes + case.out_nbytes, statistics.median(took_s)
        of_input = statistics.median(copies[min(case.in_nbytes, full)]) * max(1, case.in_nbytes / full)
        table.append(
            {
                "codec": case.codec,
                "op": case.op,
                "dtype": case.dtype.spelling,
                "n_elems": n_elems,
                "time_us": round(took * 1e6, 2),
                "moved_nbytes": moved,
                "rate_gb_s": round(moved / took / 1e9, 2),
                "memcpy_gb_s": round(2 * full / statistics.median(copies[full]) / 1e9, 2),
                "share_of_memcpy_percent": round(100 * statistics.median(share), 1),
                "time_over_input_copy": round(took / of_input, 3),
                "elements_g_s": round(n_elems / took / 1e9, 3),
                "torch_eager_time_us": round(statistics.median(torch_s) * 1e6, 2) if torch_s else None,
                "exact": agrees(case.codec, case.op, case.dtype),
            }
        )
    return table


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def show(table: list[dict[str, Any]]) -> None:
    """Print rows under a header with units."""
    print(
        f"{'codec':17}{'op':14}{'dtype':10}{'n_elems':>10}{'us':>11}{'GB/s':>8}{'memcpy GB/s':>13}"
        f"{'share %':>9}{'vs copy':>9}{'Gelem/s':>9}{'torch x':>9}  exact"
    )
    for row in table:
        eager = row["torch_eager_time_us"]
        slower = f"{eager / row['time_us']:.1f}" if eager else "-"
        print(
            f"{row['codec']:17}{row['op']:14}{row['dtype']:10}{row['n_elems']:10}{row['time_us']:11.1f}"
            f"{row['rate_gb_s']:8.1f}{row['memcpy_gb_s']:13.1f}{row['share_of_memcpy_percent']:9.0f}"
            f"{row['time_over_input_copy']:9.2f}{row['elements_g_s']:9.2f}{slower:>9}  {row['exact']}"
        )


def count(text: str) -> int:
    """An element count: "16Mi", "64Ki" or plain digits."""
    for suffix, factor in (("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def main() -> None:
    """Measure and print; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=count, default=2**24, help="elements out of cache (default 16Mi)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="codec, op and dtype that rows must have, with commas")
    parser.add_argument("--build", default=None, help="portable, v3 or v4 (default: the best here)")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    if torch is not None:
        torch.set_num_threads(1)
    engine = NativeEngine(options.build)
    header = {
        "command": "python bench/kernels.py " + " ".join(sys.argv[1:]),
        "cpu": cpu_model(),
        "core": core,
        "engine": f"native {engine.build}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": getattr(torch, "__version__", None),
        "libc": " ".join(platform.libc_ver()),
        "rounds": options.rounds,
        "chunks_in_reduce": N_CHUNKS,
    }
    print("\n".join(f"{key}: {value}" for key, value in header.items()))
    only = set(filter(None, options.only.split(",")))
    table: list[dict[str, Any]] = []
    for n_elems in (options.n, IN_CACHE_NBYTES // 4):
        rows = measure(engine, n_elems, options.rounds, only)
        show(rows)
        table += rows
    if options.json:
        options.json.write_text(json.dumps({**header, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
