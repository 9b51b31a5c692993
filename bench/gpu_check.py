"""zcomm on a machine with a GPU, tested and measured in one run: `make gpu-check`. Writes bench/results/gpu.json.

1. the tests marked gpu: every codec against numpy, torch's memory and streams, 2^31 + 3 elements; collectives of ranks
   that share a GPU, and over NCCL where there are several
2. compute-sanitizer, where it is installed, over a short list
3. first use of each kernel: compiled, and read from the cache by another process
4. GB/s of bytes moved by each verb, beside the device-to-device copy of the same size in the same run, interleaved;
   codecs behind a rotation beside the same without
5. one FSDP2 step over NCCL with zcomm's collectives, if this version has them for GPUs

Each part says how it went whether or not the others did. Needs torch and cupy; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "engines"
sys.path[:0] = [str(ROOT), str(TESTS)]

from zcomm.buffers import DType  # noqa: E402
from zcomm.engines import cuda_compile, cuda_device, cuda_kernels  # noqa: E402
from zcomm.engines.cuda import CudaEngine  # noqa: E402
from zcomm.engines.cuda_device import CudaDevice  # noqa: E402
from zcomm.engines.engine import NO_FINISH  # noqa: E402
from zcomm.engines.reference import ReferenceEngine  # noqa: E402
from zcomm.wire.codec import padded  # noqa: E402
from zcomm.wire.draw import Draw  # noqa: E402
from zcomm.wire.hadamard import Hadamard  # noqa: E402
from zcomm.wire.nvfp4 import NvFp4  # noqa: E402
from zcomm.wire.registry import codec  # noqa: E402

Part = dict[str, Any]
ROUNDS = 7
SIZES_MIB = (256, 1024)  # of elements
DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
CHUNKS = 8  # of a reduce
TARGETS = {"encode": 0.85, "decode": 0.85, "reduce": 0.80}  # share of the copy's bandwidth
ROTATED_TARGET = 0.95  # of the speed without the rotation
USUAL = ("int8", "int4", "bf16", "raw")
OTHERS = ("int8:stochastic", "int4:stochastic", "int4:shift", "int8:asym", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")
OTHERS += ("int4:64", "hadamard:int8", "hadamard:int4")
DRAW = Draw(seed=1, call=2, first=0)


def main() -> int:
    """Run the parts asked for; 0 if nothing that ran went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default=str(ROOT / "bench" / "results" / "gpu.json"))
    parser.add_argument("--part", choices=[*PARTS, "brief", "first-use"], help="this part only; no JSON")
    args = parser.parse_args()
    if args.part in ("brief", "first-use"):
        print(json.dumps({"brief": brief, "first-use": first_use}[args.part]()))
        return 0
    try:
        cuda_device.count()
    except (RuntimeError, ImportError) as error:
        print(f"gpu-check needs a GPU: {error}")
        return 1
    results: dict[str, Part] = {"machine": machine()}
    print(json.dumps(results["machine"], indent=2))
    for name, part in PARTS.items():
        if args.part in (None, name):
            print(f"\n== {name}", flush=True)
            started = time.monotonic()
            try:
                results[name] = part()
            except Exception as error:  # the other parts still run
                results[name] = {"ok": False, "why": f"{type(error).__name__}: {error}"}
            results[name]["took_s"] = round(time.monotonic() - started, 1)
            print({key: value for key, value in results[name].items() if key != "rows"}, flush=True)
    if args.part is None:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
        print(f"\nwritten to {args.json}")
    return 0 if all(part.get("ok", True) for part in results.values()) else 1


def machine() -> Part:
    """What ran."""
    import cupy
    import torch

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "sm": f"{properties['major']}.{properties['minor']}",
        "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": cuda_compile.compiler_version(),
        "cupy": cupy.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def tests() -> Part:
    """The tests marked gpu."""
    try:
        import pytest  # noqa: F401
    except ImportError as error:
        return {"ok": True, **brief(), "note": f"{error}: the brief list of comparisons ran instead of the tests"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rs", "-p", "no:cacheprovider"]
    command += [str(TESTS / "test_cuda_gpu.py"), str(ROOT / "tests" / "transports")]
    ran = run(command, timeout_s=480)
    return {"ok": ran.returncode == 0, "summary": (ran.stdout.strip().splitlines() or [""])[-1], "output": tail(ran)}


def brief() -> Part:
    """The comparisons that the sanitizer's run can afford."""
    import cuda_checks
    from cuda_on_gpu import HostedEngine

    engine = HostedEngine(CudaDevice(0))
    cuda_checks.check_briefly(engine)
    cuda_checks.check_few(engine)
    cuda_checks.check_more(engine)
    return {"compared": "check_briefly, check_few, check_more"}


def sanitizer() -> Part:
    """compute-sanitizer over the brief list."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        return {"ok": True, "note": "compute-sanitizer is not installed"}
    found: Part = {"ok": True}
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--part", "brief"]
        try:
            ran = run(command, timeout_s=75)
        except subprocess.TimeoutExpired:
            found[tool] = "did not finish in 75 s"
            continue
        found[tool] = "clean" if ran.returncode == 0 else tail(ran)
        found["ok"] &= ran.returncode == 0
    return found


def first_use() -> Part:
    """Milliseconds until each of the usual kernels is loaded, in this process."""
    kinds = [codec(spec) for spec in ("int8", "int4", "int4:stochastic", "nvfp4", "hadamard:int4")]
    kernels = [cuda_kernels.encode_kernels(kind, DType.BFLOAT16).fast for kind in kinds]
    kernels += [cuda_kernels.sum_kernels(kind, DType.BFLOAT16).fast for kind in kinds]
    kernels += [cuda_kernels.sum_encode_kernels(kind, kind).fast for kind in kinds[:3]]
    device, took_ms = CudaDevice(0), {}
    device.table([0])  # the context
    for kernel in kernels:
        assert kernel is not None
        started = time.perf_counter()
        device._load(kernel.name)
        took_ms[kernel.name] = round(1e3 * (time.perf_counter() - started), 1)
    return {"took_ms": took_ms}


def compile_and_load() -> Part:
    """First use with an empty cache, and in a second process with a full one. Target: under 2 s and 50 ms a kernel."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--part", "first-use"]
        compiled, loaded = (
            json.loads(run(command, 60, {"XDG_CACHE_HOME": cache}).stdout.splitlines()[-1])["took_ms"] for _ in range(2)
        )
    rows = [{"kernel": name, "compile_ms": compiled[name], "load_ms": loaded[name]} for name in compiled]
    for row in rows:
        print(f"{row['kernel']:<60} {row['compile_ms']:>8} ms compiled {row['load_ms']:>8} ms from the cache")
    worst = {key: max(row[key] for row in rows) for key in ("compile_ms", "load_ms")}
    return {"ok": True, "within_target": worst["compile_ms"] < 2000 and worst["load_ms"] < 50, **worst, "rows": rows}


def bandwidth() -> Part:
    """GB/s of bytes read and written, by cuda events, medians of interleaved rounds."""
    import cupy

    rows = []
    engine = CudaEngine(CudaDevice(0))
    head = f"{'verb':<14} {'codec':<15} {'dtype':<9} {'MiB':>5} {'GB/s':>8} {'copy':>8} {'share':>6}  right"
    print(head)
    for size_mib in SIZES_MIB:
        for dtype in DTYPES:
            n = size_mib * 2**20 // dtype.itemsize
            if cupy.cuda.runtime.memGetInfo()[0] < (CHUNKS + 5) * size_mib * 2**20:
                continue  # raw needs that much
            for spec in USUAL + (OTHERS if size_mib == SIZES_MIB[0] and dtype is not DType.FLOAT16 else ()):
                rows += measure(cupy, engine, spec, dtype, n, size_mib)
            cupy.get_default_memory_pool().free_all_blocks()
    sweep = [grid_row(cupy, engine, ctas_per_sm) for ctas_per_sm in (8, 16, 32, 64, 128)]
    short = [row for row in rows if row["verb"] in TARGETS and row["share"] < TARGETS[row["verb"]]]
    rotated = rotated_rows(rows)
    slow = [row for row in rotated if row["verb"] in TARGETS and row["of plain"] < ROTATED_TARGET]
    return {
        "ok": all(row["right"] for row in rows),
        "within_target": not short and not slow,
        "rotated": rotated,
        "ctas_per_sm": sweep,
        "rows": rows,
    }


def rotated_rows(rows: list[Part]) -> list[Part]:
    """Each row of a hadamard codec beside the row of the codec inside."""
    where = ("verb", "dtype", "MiB")
    plain = {(row["codec"], *(row[key] for key in where)): row["GB/s"] for row in rows}
    found = []
    for row in rows:
        if row["codec"].startswith("hadamard:"):
            which = [row[key] for key in where]
            of_plain = round(row["GB/s"] / plain[(row["codec"].removeprefix("hadamard:"), *which)], 3)
            found.append({"codec": row["codec"]} | dict(zip(where, which, strict=True)) | {"of plain": of_plain})
            print(f"{row['codec']} {' '.join(map(str, which))} MiB: {of_plain:.2f} of the speed without the rotation")
    return found


def measure(cupy: Any, engine: CudaEngine, spec: str, dtype: DType, n: int, size_mib: int) -> list[Part]:
    """Rows of one codec, dtype and size."""
    kind = codec(spec).for_dtype(dtype)
    x = elements(cupy, dtype, n)
    nbytes, wire_nbytes = n * dtype.itemsize, kind.nbytes(n)
    wire, again = cupy.empty(wire_nbytes, np.uint8), cupy.empty(wire_nbytes, np.uint8)
    y = cupy.empty(nbytes, np.uint8)
    chunks = cupy.empty((CHUNKS, wire_nbytes), np.uint8)  # each in a place of its own, or caches would serve them
    wires = [chunks.data.ptr + i * wire_nbytes for i in range(CHUNKS)]
    engine.encode(kind, x.data.ptr, n, dtype, wire.data.ptr, DRAW)
    chunks[:] = wire
    verbs: dict[str, tuple[Callable[[], None], int]] = {
        "copy": (lambda: y.data.copy_from_device_async(x.data, nbytes), 2 * nbytes),
        "encode": (lambda: engine.encode(kind, x.data.ptr, n, dtype, wire.data.ptr, DRAW), nbytes + wire_nbytes),
        "decode": (lambda: engine.decode(kind, wire.data.ptr, n, y.data.ptr, dtype), nbytes + wire_nbytes),
        "reduce": (
            lambda: engine.reduce(kind, wires, n, NO_FINISH, y.data.ptr, dtype),
            nbytes + CHUNKS * wire_nbytes,
        ),
        "reduce_encode": (
            lambda: engine.reduce_encode(kind, wires, n, NO_FINISH, kind, again.data.ptr, DRAW),
            (CHUNKS + 1) * wire_nbytes,
        ),
    }
    seconds: dict[str, list[float]] = {verb: [] for verb in verbs}
    for launch, _ in verbs.values():
        launch()
    for _ in range(ROUNDS):
        for verb, (launch, _) in verbs.items():
            seconds[verb].append(timed(cupy, launch))
    gb_s = {verb: moved / float(np.median(seconds[verb])) / 1e9 for verb, (_, moved) in verbs.items()}
    right = compare(cupy, engine, kind, x, wire, dtype, n)
    rows = []
    for verb in verbs:
        if verb != "copy":
            row = {"verb": verb, "codec": spec, "dtype": dtype.spelling, "MiB": size_mib, "GB/s": round(gb_s[verb], 1)}
            row |= {"copy GB/s": round(gb_s["copy"], 1), "share": round(gb_s[verb] / gb_s["copy"], 3), "right": right}
            rows.append(row)
            print(
                f"{verb:<14} {spec:<15} {dtype.spelling:<9} {size_mib:>5} {gb_s[verb]:>8.0f} {gb_s['copy']:>8.0f} "
                f"{row['share']:>6.2f}  {right}",
                flush=True,
            )
    return rows


def elements(cupy: Any, dtype: DType, n: int) -> Any:
    """n normal elements in the GPU's memory, as bytes: one random stretch over and over."""
    stretch = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32).astype(dtype.numpy)
    once = cupy.asarray(stretch.view(np.uint8))
    return cupy.tile(once, -(-n * dtype.itemsize // once.size))[: n * dtype.itemsize]


def compare(cupy: Any, engine: CudaEngine, kind: Any, x: Any, wire: Any, dtype: DType, n: int) -> bool:
    """Whether scales and codes of the first elements are those of the reference."""
    few = 1 << 16  # whole blocks of every codec here
    engine.encode(kind, x.data.ptr, n, dtype, wire.data.ptr, DRAW)
    host, small = cupy.asnumpy(x[: few * dtype.itemsize]), np.empty(kind.nbytes(few), np.uint8)
    ReferenceEngine().encode(kind, host.ctypes.data, few, dtype, small.ctypes.data, DRAW)
    return all(
        bool((cupy.asnumpy(wire[start : start + nbytes]) == small[small_start : small_start + nbytes]).all())
        for (start, _), (small_start, nbytes) in zip(parts(kind, n), parts(kind, few), strict=True)
    )


def parts(kind: Any, n: int) -> list[tuple[int, int]]:  # first byte, bytes
    """Where a chunk has its scales and codes, by docs/wire-format.md."""
    if isinstance(kind, Hadamard):
        return parts(kind.inner, kind.n_rotated(n))
    if kind.dtype is not None:
        return [(0, n * kind.dtype.itemsize)]
    if isinstance(kind, NvFp4):
        sizes = [4 * -(-n // 1024), -(-n // 16), -(-n // 8) * 4]
    else:
        sizes = [kind.scale_nbytes * -(-n // kind.block), -(-n // 8) * kind.bits]
    starts = [0, *np.cumsum([padded(size) for size in sizes])[:-1].tolist()]
    return list(zip(starts, sizes, strict=True))


def timed(cupy: Any, launch: Callable[[], None]) -> float:
    """Seconds between two events."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / 1e3


def grid_row(cupy: Any, engine: CudaEngine, ctas_per_sm: int) -> Part:
    """Encoding with another number of CTAs: whether cuda_device.CTAS_PER_SM is a good one."""
    launcher = engine._launcher
    saved, n, kind = launcher.max_ctas, 1 << 27, codec("int8")
    x, wire = elements(cupy, DType.BFLOAT16, n), cupy.empty(kind.nbytes(n), np.uint8)
    launcher.max_ctas = saved // cuda_device.CTAS_PER_SM * ctas_per_sm
    times = [
        timed(cupy, lambda: engine.encode(kind, x.data.ptr, n, DType.BFLOAT16, wire.data.ptr)) for _ in range(ROUNDS)
    ]
    launcher.max_ctas = saved
    return {"CTAs per SM": ctas_per_sm, "GB/s": round((2 * n + kind.nbytes(n)) / float(np.median(times)) / 1e9, 1)}


FSDP2_STEP = """
import os, torch, zcomm
from torch.distributed.fsdp import fully_shard
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
torch.cuda.set_device(0)
torch.distributed.init_process_group("nccl")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024)).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
zcomm.fsdp2.compress(model, weights="int8", gradients="int8")
loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
torch.cuda.synchronize()
print("loss", loss.item())
torch.distributed.destroy_process_group()
"""


def fsdp2_step() -> Part:
    """One step with zcomm's hooks on one rank over NCCL."""
    ran = run([sys.executable, "-c", FSDP2_STEP], timeout_s=60)
    if ran.returncode == 0:
        return {"ok": True, "output": tail(ran)}
    last = (ran.stderr.strip().splitlines() or ["no words"])[-1]
    known = "which this version does not have" in ran.stderr or "no engine computes on" in ran.stderr
    return {"ok": known, "note": f"not supported yet: {last}" if known else last, "output": tail(ran)}


def run(command: list[str], timeout_s: float, environment: dict[str, str] | None = None) -> Any:
    """A program's words and exit status."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = os.environ | {"PYTHONPATH": paths} | (environment or {})
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=settings, cwd=ROOT)


def tail(ran: Any) -> str:
    """The end of what a program said."""
    return (ran.stdout + ran.stderr)[-2000:]


PARTS: dict[str, Callable[[], Part]] = {
    "tests": tests,
    "sanitizer": sanitizer,
    "compile": compile_and_load,
    "bandwidth": bandwidth,
    "fsdp2": fsdp2_step,
}

if __name__ == "__main__":
    sys.exit(main())
