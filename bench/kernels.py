"""Speed of the codecs on one core: each codec, verb and dtype on each engine, beside memcpy, torch and others' codecs.

    python bench/kernels.py [--n 16Mi] [--rounds 5] [--only int8,encode,float32] [--engines native,torch] [--others]

Every run of every row follows a memcpy of 64 MiB (or of --n float32 elements), so that what else the machine does falls
on both alike; times are the thread's own, medians over rounds. GB/s count bytes moved: what a verb must read plus what
it must write, in 10^9 per second. "share" is that rate over the memcpy's next to it; "of copy" is the row's time over
that of copying what it reads, by that memcpy's rate. "exact" compares the bytes with numpy's on an odd count.

Engines: the native builds, in cache too ("native v4" is the best of an AVX-512 machine); numpy (`reference`), on 1 Mi
elements; torch's eager kernels and torch.compile's (kernels_torch.py), which allocate their results as they do in a
program, while ours write into the caller's memory; with --others pypiquant and bitsandbytes (kernels_others.py), in an
environment of their own. What the project wants to reach is judged at the end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measuring import Memcpy, Memory, Run, aligned, measure

from zcomm.buffers import DType
from zcomm.engines import native
from zcomm.engines.engine import NO_FINISH, Engine
from zcomm.engines.native import NativeEngine
from zcomm.engines.reference import ReferenceEngine
from zcomm.tools.about import about
from zcomm.tools.output_file import why_not_writable, write_json
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.wire.elements import narrow
from zcomm.wire.registry import codec

N_CHUNKS = 4  # chunks that a reduce adds
IN_CACHE_N_ELEMS = 128 * 1024
REFERENCE_N_ELEMS = 2**20
CHECKED_N_ELEMS = 100_003
CODECS = (
    *("raw", "bf16", "fp16", "int8", "int7", "int6", "int5", "int4", "int3", "int2"),
    *("int8:stochastic", "int4:stochastic", "int8:asym", "int4:asym", "int4:shift"),
    *("hadamard:int8", "hadamard:int4", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4"),
)
DRAW = Draw(seed=1, call=2, first=0)
OPS = ("encode", "decode", "reduce", "reduce_encode")
ENGINES = ("native", "reference", "torch", "compile")
# Shares of memcpy, in percent, and of the copy of a reduce's input, that float32 out of cache is to reach.
SHARES = {(spec, op): 85.0 for spec in ("int8", "int4", "fp8_e4m3") for op in ("encode", "decode")}
SHARES |= {("int8:stochastic", "encode"): 55.0, ("hadamard:int4", "encode"): 50.0, ("hadamard:int4", "decode"): 50.0}
AS_FAST_AS_COPY = ("raw", "bf16", "int8", "int4", "fp8_e4m3")


# ---- what is run


class Bench(NamedTuple):
    """What was asked for, and the yardstick."""

    engines: tuple[str, ...]
    only: frozenset[str]  # words that a row must have among its codec, verb and dtype
    rounds: int
    memcpy: Memcpy
    memory: Memory

    def wants(self, spec: str, dtype: DType, op: str) -> bool:
        """Whether the row was asked for. reduce_encode has no elements, so one dtype stands for all."""
        return self.only <= {spec, dtype.spelling, op} and (op != "reduce_encode" or dtype is DType.FLOAT32)


def measure_all(bench: Bench) -> Iterator[list[dict[str, Any]]]:
    """Rows, codec by codec."""
    for spec in CODECS:
        for dtype in DType:
            if ops := [op for op in OPS if bench.wants(spec, dtype, op)]:
                kind = codec(spec).for_dtype(dtype)
                for engines, n_elems, rounds in plans(bench, dtype):
                    x = elements(bench.memcpy, n_elems, dtype)
                    runs = [
                        run
                        for named in engines.items()
                        for run in engine_runs(named, spec, kind, x, dtype, ops, bench.memory)
                    ]
                    yield measure(runs, bench.memcpy, rounds)
                yield measure_torch(bench, spec, kind, dtype, ops)


@lru_cache(maxsize=16)
def elements(memcpy: Memcpy, n_elems: int, dtype: DType) -> np.ndarray:
    """Normal numbers."""
    return aligned(narrow(np.resize(memcpy.source, n_elems), dtype))


def plans(bench: Bench, dtype: DType) -> Iterator[tuple[dict[str, Engine], int, int]]:
    """Engines by name, the element count to run them on, and rounds."""
    if "native" in bench.engines:
        best, *others = (NativeEngine(build) for build in native.builds())
        yield {f"native {best.build}": best}, bench.memcpy.n_elems, bench.rounds
        if dtype is DType.FLOAT32 and bench.memcpy.n_elems > IN_CACHE_N_ELEMS:
            yield {f"native {best.build}": best}, IN_CACHE_N_ELEMS, bench.rounds
        if dtype is DType.FLOAT32:
            yield {f"native {engine.build}": engine for engine in others}, bench.memcpy.n_elems, min(bench.rounds, 3)
    if "reference" in bench.engines:
        yield {"reference": ReferenceEngine()}, min(bench.memcpy.n_elems, REFERENCE_N_ELEMS), 1


def engine_runs(
    named: tuple[str, Engine],
    spec: str,
    kind: Codec,
    x: np.ndarray,
    dtype: DType,
    ops: list[str],
    memory: Memory,
) -> Iterator[Run]:
    """The verbs of one engine on x, into memory whose pages are there."""
    (name, engine), n = named, x.size
    target, out = memory.take("target", x.nbytes), memory.take("out", kind.nbytes(n))
    chunks = [memory.take(f"chunk {i}", out.size) for i in range(N_CHUNKS)]
    for chunk in chunks:
        engine.encode(kind, x.ctypes.data, n, dtype, chunk.ctypes.data, DRAW)
    for op in ops:
        in_nbytes = {"encode": x.nbytes, "decode": out.nbytes}.get(op, N_CHUNKS * out.nbytes)
        out_nbytes = target.nbytes if op in ("decode", "reduce") else out.nbytes
        call = verb(engine, kind, op, dtype, x, chunks, target, out)
        yield Run(name, spec, op, dtype, n, in_nbytes, out_nbytes, call, is_exact(name, spec, dtype, op))


def verb(
    engine: Engine,
    kind: Codec,
    op: str,
    dtype: DType,
    x: np.ndarray,
    chunks: list[np.ndarray],
    target: np.ndarray,
    out: np.ndarray,
) -> Callable[[], None]:
    """A call of one verb. It keeps its memory alive."""
    n, wires = x.size, [chunk.ctypes.data for chunk in chunks]
    source, to, wire = x.ctypes.data, target.ctypes.data, out.ctypes.data
    calls: dict[str, Callable[[], None]] = {
        "encode": lambda: engine.encode(kind, source, n, dtype, wire, DRAW),
        "decode": lambda: engine.decode(kind, wires[0], n, to, dtype),
        "reduce": lambda: engine.reduce(kind, wires, n, NO_FINISH, to, dtype),
        "reduce_encode": lambda: engine.reduce_encode(kind, wires, n, NO_FINISH, kind, wire, DRAW),
    }

    def call(kept: tuple[Any, ...] = (x, chunks, target, out), run: Callable[[], None] = calls[op]) -> None:
        run()

    return call


def is_exact(engine: str, spec: str, dtype: DType, op: str) -> bool:
    """Whether the engine gives the bytes of numpy for this row."""
    return results(engine, spec, dtype)[op] == results("reference", spec, dtype)[op]


@lru_cache(maxsize=8)
def results(engine_name: str, spec: str, dtype: DType) -> dict[str, bytes]:
    """What every verb gives on an odd count."""
    engine = ReferenceEngine() if engine_name == "reference" else NativeEngine(engine_name.removeprefix("native "))
    kind, n, rng = codec(spec).for_dtype(dtype), CHECKED_N_ELEMS, np.random.default_rng(1)
    xs = [narrow(rng.standard_normal(n, dtype=np.float32), dtype) for _ in range(N_CHUNKS)]
    chunks = [np.empty(kind.nbytes(n), np.uint8) for _ in xs]
    for x, chunk in zip(xs, chunks, strict=True):
        engine.encode(kind, x.ctypes.data, n, dtype, chunk.ctypes.data, DRAW)
    found = {"encode": chunks[0].tobytes()}
    for op in OPS[1:]:
        target, out = np.empty(n, dtype.numpy), np.empty(kind.nbytes(n), np.uint8)
        verb(engine, kind, op, dtype, xs[0], chunks, target, out)()
        found[op] = (out if op == "reduce_encode" else target.view(np.uint8)).tobytes()
    return found


def measure_torch(bench: Bench, spec: str, kind: Codec, dtype: DType, ops: list[str]) -> list[dict[str, Any]]:
    """The same steps by torch, where it is installed and asked for: eager, and compiled in float32."""
    if not {"torch", "compile"} & set(bench.engines):
        return []
    import kernels_torch

    x = elements(bench.memcpy, bench.memcpy.n_elems, dtype)
    rows = []
    for engine, runs in kernels_torch.runs(spec, kind, x, dtype, N_CHUNKS, compiled="compile" in bench.engines).items():
        if engine.split()[1].replace("eager", "torch") in bench.engines:
            sizes = {"encode": (x.nbytes, kind.nbytes(x.size)), "decode": (kind.nbytes(x.size), x.nbytes)}
            sizes["reduce"] = (N_CHUNKS * kind.nbytes(x.size), x.nbytes)
            found = [Run(engine, spec, op, dtype, x.size, *sizes[op], runs[op], None) for op in ops if op in runs]
            rows += measure(found, bench.memcpy, min(bench.rounds, 2))
    return rows


# ---- what is shown


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows, whose units stand in the header."""
    for row in rows:
        exact = {True: "yes", False: "NO", None: "-"}[row["exact"]]
        print(
            f"{row['engine']:<16}{row['codec']:<17}{row['op']:<14}{row['dtype']:<10}{row['n_elems']:>10}"
            f"{row['time_us']:>12.1f}{row['rate_gb_s']:>8.1f}{row['memcpy_gb_s']:>8.1f}"
            f"{row['share_of_memcpy_percent']:>9.0f}{row['time_over_input_copy']:>9.2f}  {exact}",
            flush=True,
        )


def judge(rows: list[dict[str, Any]], n_elems: int) -> list[dict[str, Any]]:
    """What the best native build and the others' codecs reached of what the project wants."""
    best = f"native {native.builds()[0]}"
    of = {
        (r["codec"], r["op"]): r for r in rows if (r["engine"], r["dtype"], r["n_elems"]) == (best, "float32", n_elems)
    }
    asked = [(key, "share_of_memcpy_percent", ">=", wanted) for key, wanted in SHARES.items()]
    asked += [((spec, "reduce"), "time_over_input_copy", "<=", 1.0) for spec in AS_FAST_AS_COPY]
    found = [(f"{key[0]} {key[1]}: {name}", of[key][name], sign, goal) for key, name, sign, goal in asked if key in of]
    others = {(r["engine"], r["op"]): r["time_us"] for r in rows if r["codec"] in ("int8 beside", "int8-like")}
    for name, goal in (("pypiquant", 1.5), ("bitsandbytes", 20.0)):
        if (name, "encode") in others:
            faster = others[name, "encode"] / others[best, "encode"]
            found.append((f"int8 encode: times as fast as {name}", round(faster, 2), ">=", goal))
    return [
        {
            "what": what,
            "found": value,
            "wanted": f"{sign} {goal}",
            "reached": value >= goal if sign == ">=" else value <= goal,
        }
        for what, value, sign, goal in found
    ]


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="codec, verb and dtype that rows must have, with commas")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"some of {', '.join(ENGINES)}, with commas")
    parser.add_argument("--others", action="store_true", help="install pypiquant and bitsandbytes beside, and run them")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if problem := why_not_writable("--json", options.json):
        parser.error(problem)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    only = frozenset(filter(None, options.only.split(",")))
    bench = Bench(tuple(options.engines.split(",")), only, options.rounds, Memcpy(options.n), Memory())
    header = f"{'engine':<16}{'codec':<17}{'op':<14}{'dtype':<10}{'n_elems':>10}{'us':>12}{'GB/s':>8}{'memcpy':>8}"
    print(f"{header}{'share %':>9}{'of copy':>9}  exact")
    table: list[dict[str, Any]] = []
    for rows in measure_all(bench):
        show(rows)
        table += rows
    if options.others:
        import kernels_others

        rows = kernels_others.measure_in_own_environment(options.n, options.rounds)
        show(rows)
        table += rows
    targets = judge(table, options.n)
    for target in targets:
        answer = "reached" if target["reached"] else "MISSED"
        print(f"{answer:<9}{target['what']:<52}{target['found']:>8} {target['wanted']:>8}")
    if options.json:
        ran = about("python bench/kernels.py", rounds=options.rounds, chunks_in_reduce=N_CHUNKS, cores_used=1)
        write_json(options.json, {"about": ran, "targets": targets, "rows": table})


if __name__ == "__main__":
    main()
