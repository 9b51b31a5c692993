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

from zcomm.engines.cuda import every_kernel
from zcomm.wire.int_block import IntBlock
from zcomm.wire.registry import codec

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")
SPECS = ("raw", "raw:bfloat16", "raw:float16", "raw:float64", "bf16", "fp16", "int8", "int4", "int3")
OFFSETS = tuple(f"offsets<{struct}>" for struct in ("IntBlock<0, 0>", "IntBlock<8, 256>", "IntBlock<4, 128>"))
KERNELS = every_kernel([codec(spec) for spec in SPECS] + [IntBlock(5, 40)]) + list(OFFSETS)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
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
    kernels: Sequence[str] = KERNELS,
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
    command = [str(COMPILER), "-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"]
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
        kernels: Sequence[str] = KERNELS,
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
