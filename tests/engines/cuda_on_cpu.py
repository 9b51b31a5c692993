"""The .cu files built for the CPU over cuda/shim/cuda_shim.h, and a launcher that runs the cuda engine on them."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zcomm.engines.cuda_kernels import every_kernel
from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")
CARRIED = ("raw", "raw:bfloat16", "raw:float16", "raw:float64", "bf16", "fp16")
SPECS = (*CARRIED, "int8", "int4", "int8:asym", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4")
SPECS += ("int8:stochastic", "int4:shift", "int4:asym:stochastic", "fp8_e4m3:stochastic", "fp8_e5m2:stochastic")
SPECS += ("mxfp8:stochastic", "mxfp4:stochastic", "nvfp4:stochastic")
SPECS += tuple(f"hadamard:{spec}" for spec in ("int8", "int4", "int4:asym", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4"))
SPECS += ("hadamard:int4:stochastic", "hadamard:int8:shift", "hadamard:nvfp4:stochastic")
# Other ways to cut blocks into tiles: every number of segments, one tile and several rounds, and none that is fast.
SHAPES = ("int2:1024", "int3", "int4:8", "int5:40", "int6:16", "int7:64:stochastic", "fp8_e4m3:8", "int5:64:shift")
SHAPES += ("hadamard:int4:8", "hadamard:int5:64", "hadamard:int6:512")
OUT = ("int6:24", "int5:40:stochastic", "fp8_e4m3:24", "mxfp4", "nvfp4", "hadamard:int3:96", "hadamard:nvfp4")


def outs(kind: Codec) -> list[Codec]:
    """What sums of this codec's chunks are encoded by in tests: itself, raw and cast; if it is usual, each of OUT."""
    specs = OUT if str(kind) in ("raw", "int8", "hadamard:int4") else ("int6:24",)
    return [kind, *map(codec, specs), *map(codec, ("bf16", "fp16", "raw"))]


CODECS = [codec(spec) for spec in SPECS + SHAPES]
KERNELS = every_kernel(CODECS, [(kind, out) for kind in CODECS for out in outs(kind)])
CHUNKS = ("IntBlock<0, 0>", "IntBlock<8, 256>", "IntBlock<4, 128>", "NvFp4<0>", "NvFp4<16>", "Hadamard<IntBlock<0, 0>>")
OFFSETS = tuple(f"offsets<{struct}>" for struct in CHUNKS)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
FORWARD, REVERSE, RANDOM = range(3)  # shim::Order


class Schedule(NamedTuple):
    """How the shim runs a kernel."""

    order: int = FORWARD
    seed: int = 1
    poison: int = 0xCD  # fills shared memory
    n_last_ctas: int = 0  # only these run, or all


IN_STEP = Schedule()


def build(
    folder: Path,  # for the generated source and the library
    kernels: Sequence[str] = (*KERNELS, *OFFSETS),
    flags: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,  # by default the files of cuda/
) -> Path:
    """Compile kernels for the CPU."""
    cuda = folder / "cuda"
    if sources is None:
        cuda = ROOT / "cuda"
    else:
        cuda.mkdir()
        for name, text in sources.items():
            (cuda / name).write_text(text)
    lines = ['#include "cuda_shim.h"', '#include "exports.cu"', '#include "cuda_offsets.cuh"']
    lines += [f"ZC_SHIM_EXPORT({number}, {kernel})" for number, kernel in enumerate(kernels)]
    (folder / "kernels.cpp").write_text("\n".join(lines) + "\n")
    command = [str(COMPILER), "-std=c++17", "-O0", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"]
    command += ["-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", *flags]
    command += [f"-I{cuda}", f"-I{ROOT / 'cuda' / 'shim'}", f"-I{Path(__file__).parent}"]
    command += ["kernels.cpp", "-o", "kernels.so"]
    compiled = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert compiled.returncode == 0, compiled.stderr
    return folder / "kernels.so"


class CpuLauncher:
    """Runs kernels on the CPU, in the engine's own launches."""

    def __init__(
        self,
        library: Path,
        kernels: Sequence[str] = (*KERNELS, *OFFSETS),
        max_ctas: int = 7,  # few, so that kernels loop
        schedule: Schedule = IN_STEP,
    ) -> None:
        self.max_ctas = max_ctas
        self.schedule = schedule
        self.launched: list[str] = []
        self._library = ctypes.CDLL(str(library))
        self._numbers = {kernel: number for number, kernel in enumerate(kernels)}

    def launch(self, kernel: str, n_ctas: int, n_threads: int, job: np.ndarray) -> None:
        """Run a kernel to its end. Fails if the shim found a fault."""
        assert 0 < n_ctas < 2**31, n_ctas
        self.launched.append(kernel)
        self._library.zc_shim_set(*self.schedule)
        function = getattr(self._library, f"zc_shim_{self._numbers[kernel]}")
        function.restype = ctypes.c_char_p
        fault = function(ctypes.c_uint(n_ctas), ctypes.c_uint(n_threads), ctypes.c_void_p(job.ctypes.data))
        assert fault is None, f"{kernel}: {fault.decode()}"

    def table(self, addresses: Sequence[int]) -> tuple[int, np.ndarray]:
        """Addresses as an array."""
        array = np.array(addresses, np.uint64)
        return array.ctypes.data, array


class Sparse:
    """Zero bytes that take no memory until they are written."""

    def __init__(self, nbytes: int) -> None:
        no_reserve = 0x4000
        self._pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        self.bytes = np.frombuffer(self._pages, np.uint8)
        self.address = self.bytes.ctypes.data
