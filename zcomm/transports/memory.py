"""Memory that parcels lie in: numpy arrays on the host, cupy arrays on a GPU. For transports to inherit."""

from __future__ import annotations

from typing import Any

import numpy as np

from zcomm.streams import cupy


class HostMemory:
    """Bytes that MPI, or another thread, can read."""

    def empty(self, nbytes: int) -> np.ndarray:
        """Uninitialised bytes."""
        return np.empty(nbytes, np.uint8)

    def address(self, memory: np.ndarray) -> int:
        """Where memory starts."""
        return int(memory.__array_interface__["data"][0])

    def write(self, memory: np.ndarray, data: bytes) -> None:
        """Put bytes there."""
        memory[:] = np.frombuffer(data, np.uint8)

    def read(self, memory: np.ndarray, timeout_s: float | None) -> bytes:
        """The bytes that are there."""
        return memory.tobytes()


class GpuMemory:
    """Bytes of one GPU. How long to wait before they are read is the transport's."""

    index: int  # of the GPU

    def empty(self, nbytes: int) -> Any:
        """Uninitialised bytes of the GPU: a cupy array."""
        module = cupy()
        with module.cuda.Device(self.index):
            return module.empty(nbytes, np.uint8)

    def address(self, memory: Any) -> int:
        """Where memory starts."""
        return int(memory.data.ptr)

    def write(self, memory: Any, data: bytes) -> None:
        """Put bytes of the host there, in the order of the current stream."""
        memory.set(np.frombuffer(data, np.uint8))
