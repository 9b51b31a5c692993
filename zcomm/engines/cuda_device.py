"""One GPU through cupy: kernels loaded into it, and launched on the stream that the caller is on.

The caller's stream is torch's current one if torch has used CUDA in this process, otherwise cupy's. If cupy has yet
another stream set then, it cannot be told whose memory an address is, and the launch is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from zcomm.engines import cuda_compile
from zcomm.errors import EngineError
from zcomm.streams import cupy

CTAS_PER_SM = 32  # a kernel loops over what is left


class CudaDevice:
    """Launches kernels on one GPU. Raises MissingExtra without cupy, EngineError if there is no such GPU."""

    def __init__(self, index: int) -> None:
        self._cupy = cupy()
        n_devices = count()
        if index >= n_devices:
            raise EngineError(f"there is no cuda:{index}; this machine has {n_devices} CUDA devices")
        self.index = index
        self._device = self._cupy.cuda.Device(index)
        attributes = self._device.attributes
        self.arch = 10 * attributes["ComputeCapabilityMajor"] + attributes["ComputeCapabilityMinor"]
        self.max_ctas = CTAS_PER_SM * attributes["MultiProcessorCount"]
        self._functions: dict[str, Any] = {}
        self._loading = threading.Lock()

    def launch(
        self,
        kernel: str,  # its C++ name
        n_ctas: int,
        n_threads: int,
        job: np.ndarray,  # one element, the kernel's argument
    ) -> None:
        """Queue a kernel on the caller's stream."""
        function = self._functions.get(kernel) or self._load(kernel)
        with self._device:
            function((n_ctas,), (n_threads,), (job,), stream=self._stream())

    def table(
        self,
        addresses: Sequence[int],
    ) -> tuple[int, Any]:  # the table's own address, and what to hold until the launch is queued
        """Addresses as an array in the GPU's memory, there before anything launched later on the caller's stream."""
        with self._device, self._stream():
            array = self._cupy.asarray(np.array(addresses, np.uint64))
        return array.data.ptr, array

    def _load(self, kernel: str) -> Any:
        with self._loading:
            if kernel not in self._functions:
                image = cuda_compile.load_or_compile((kernel,), cuda_compile.target_for(self.arch))
                module = self._cupy.cuda.function.Module()
                with self._device:
                    try:
                        module.load(image.binary)
                    except self._cupy.cuda.driver.CUDADriverError as error:
                        raise EngineError(
                            f"cuda:{self.index} (sm_{self.arch}) does not load a kernel of NVRTC "
                            f"{cuda_compile.compiler_version()}: {error}; use a driver at least as new as the compiler"
                        ) from error
                    self._functions[kernel] = module.get_function(image.symbols[kernel])
        return self._functions[kernel]

    def _stream(self) -> Any:
        """The caller's current stream."""
        of_cupy = self._cupy.cuda.get_current_stream(self.index)
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return of_cupy
        of_torch = torch.cuda.current_stream(self.index).cuda_stream
        if of_cupy.ptr not in (0, of_torch):
            raise EngineError(
                f"torch's current stream on cuda:{self.index} is {of_torch:#x}, cupy's is {of_cupy.ptr:#x}; make them "
                "the same: with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream): ..."
            )
        return self._cupy.cuda.ExternalStream(of_torch, self.index)


def count() -> int:
    """How many CUDA devices there are. Raises MissingExtra without cupy, EngineError with the driver's reason."""
    runtime = cupy().cuda.runtime
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise EngineError(f"there is no CUDA device: {error}") from error
