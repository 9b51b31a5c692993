"""Run by test_cuda.py with the address sanitizer loaded: the brief list, between bytes that may not be touched."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import cuda_checks
import inputs
from cuda_on_cpu import RANDOM, CpuLauncher, Schedule

from zcomm.engines.cuda import CudaEngine

_sanitizer = ctypes.CDLL(None)


class WalledRoom(inputs.Room):
    """A room whose walls the sanitizer watches, for reads too."""

    def __init__(self, nbytes: int, offset: int = 0, content: bytes | None = None) -> None:
        super().__init__(nbytes, offset, content)
        self._wall("__asan_poison_memory_region")

    def taken(self) -> bytes:
        self._wall("__asan_unpoison_memory_region")
        return super().taken()

    def __del__(self) -> None:
        self._wall("__asan_unpoison_memory_region")

    def _wall(self, call: str) -> None:
        first, end = self._memory.ctypes.data, self.address + self.bytes.size
        for start, stop in ((first, self.address), (end, first + self._memory.size)):
            getattr(_sanitizer, call)(ctypes.c_void_p(start), ctypes.c_size_t(stop - start))


inputs.Room = WalledRoom  # type: ignore[misc]
for schedule in (Schedule(), Schedule(RANDOM, 3)):
    cuda_checks.check_briefly(CudaEngine(CpuLauncher(Path(sys.argv[1]), cuda_checks.BRIEF_KERNELS, schedule=schedule)))
print("clean")
