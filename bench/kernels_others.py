"""pypiquant and bitsandbytes beside zcomm's int8, in an environment of their own: what `kernels.py --others` runs.

The environment lies in the user's cache folder and is made once; torch and numpy are those of the environment that
calls. Formats differ: pypiquant has one scale and zero point for a tensor of unsigned bytes, bitsandbytes a table of
256 numbers and a float32 scale for 256 elements. Times are the process's own, threads included.
"""

from __future__ import annotations

import importlib.util
import json
import os
import site
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Memcpy, Run, aligned, measure

from zcomm.buffers import DType
from zcomm.engines import native
from zcomm.engines.engine import Engine
from zcomm.engines.native import NativeEngine
from zcomm.wire.registry import codec

PACKAGES = ("pypiquant", "bitsandbytes", "cffi", "pycparser", "packaging")
ROOT = Path(__file__).parents[1]
BLOCK = 256
BESIDE, OTHER = "int8 beside", "int8-like"  # codecs of the rows


def measure_in_own_environment(n_elems: int, rounds: int) -> list[dict[str, Any]]:
    """Rows as kernels.py writes them. Raises CalledProcessError where the packages cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zcomm-bench-others"
    python = cache / "bin" / "python"
    if not (cache / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", cache], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
        (cache / "complete").touch()
    folders = os.pathsep.join([str(ROOT), *site.getsitepackages()])
    command = [str(python), __file__, str(n_elems), str(rounds)]
    environment = os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(ended.stdout.splitlines()[-1]))


def pypiquant_runs(x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Unsigned bytes: the range of the tensor is found, then it is coded."""
    import piquant  # type: ignore[import-not-found]

    context, n, kind = piquant.Context(1), x.size, piquant.DataType
    codes, back = aligned(np.zeros(n, np.uint8)), aligned(np.zeros_like(x))
    nearest, store = piquant.RoundMode.NEAREST, piquant.ReduceOp.SET

    def encode() -> tuple[float, int]:
        scale, zero = context.compute_quant_params_ptr_float32(x.ctypes.data, kind.UINT8, n)
        context.quantize_ptr(x.ctypes.data, kind.F32, codes.ctypes.data, kind.UINT8, n, scale, zero, nearest)
        return scale, zero

    def decode() -> None:
        context.dequantize_ptr(codes.ctypes.data, kind.UINT8, back.ctypes.data, kind.F32, n, scale, zero, store)

    scale, zero = encode()
    return {"encode": encode, "decode": decode}


def bitsandbytes_runs(x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """quantize_blockwise and back, which allocate their results."""
    import torch
    from bitsandbytes import functional  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    tensor = torch.from_numpy(x)
    codes, state = functional.quantize_blockwise(tensor, blocksize=BLOCK)
    return {
        "encode": lambda: functional.quantize_blockwise(tensor, blocksize=BLOCK),
        "decode": lambda: functional.dequantize_blockwise(codes, state),
    }


def int8_runs(engine: Engine, x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """zcomm's int8, the same values in blocks with scales of their own."""
    int8, n = codec("int8"), x.size
    wire, back = aligned(np.zeros(int8.nbytes(n), np.uint8)), aligned(np.zeros_like(x))
    return {
        "encode": lambda: engine.encode(int8, x.ctypes.data, n, DType.FLOAT32, wire.ctypes.data),
        "decode": lambda: engine.decode(int8, wire.ctypes.data, n, back.ctypes.data, DType.FLOAT32),
    }


def main(n_elems: int, rounds: int) -> None:
    """Measure, and print the rows as JSON."""
    sys.path.remove(str(Path(__file__).parent))  # bitsandbytes looks for a package that is called `kernels`
    memcpy, best = Memcpy(n_elems, time.process_time), native.builds()[0]
    x = memcpy.source
    peers = [(f"native {best}", BESIDE, codec("int8").nbytes(n_elems), int8_runs(NativeEngine(best), x))]
    if importlib.util.find_spec("piquant") is not None:
        peers.append(("pypiquant", OTHER, n_elems + 8, pypiquant_runs(x)))
    if importlib.util.find_spec("bitsandbytes") is not None:
        peers.append(("bitsandbytes", OTHER, n_elems + n_elems // BLOCK * 4, bitsandbytes_runs(x)))
    runs = []
    for engine, name, coded_nbytes, calls in peers:
        sizes = {"encode": (x.nbytes, coded_nbytes), "decode": (coded_nbytes, x.nbytes)}
        runs += [Run(engine, name, op, DType.FLOAT32, n_elems, *sizes[op], calls[op], None) for op in sizes]
    print(json.dumps(measure(runs, memcpy, rounds)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
