"""Which engine computes where: on a GPU the cuda engine; on the CPU the native one, or the reference without it.

All give the same bytes; only the speed differs, and `zcomm info` shows which one runs. Nothing is moved to reach one.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zcomm.engines import cuda_compile, cuda_device, native
from zcomm.engines.cuda import CudaEngine
from zcomm.engines.cuda_device import CudaDevice
from zcomm.engines.engine import Engine
from zcomm.engines.native import NativeEngine
from zcomm.engines.reference import ReferenceEngine
from zcomm.errors import EngineError, MissingExtra
from zcomm.wire.codec import Codec

_ENGINES: dict[str, Callable[[], Engine]] = {
    "native": NativeEngine,
    "reference": ReferenceEngine,
    "cuda": lambda: CudaEngine(CudaDevice(0)),
}


class EngineInfo(NamedTuple):
    """One engine as `zcomm info` shows it."""

    name: str
    device: str  # what it computes on: "cpu", "cuda"
    usable: bool
    detail: str  # its version or instruction set, or why it cannot be used


def engine_for(
    device: str,  # "cpu", "cuda:0", as a Span names it
    *codecs: Codec,  # that it must compute
) -> Engine:
    """The fastest engine for memory on this device and these codecs. Raises EngineError if there is none."""
    if device == "cpu":
        if why := native.why_missing():
            _warn_once(f"zcomm computes with numpy, many times slower than it can: {why}")
        elif all(engine_named("native").supports(codec) for codec in codecs):
            return engine_named("native")
        return engine_named("reference")
    kind, _, index = device.partition(":")
    if kind == "cuda" and index.isdecimal():
        return _cuda_engine(int(index))
    raise EngineError(
        f"no engine computes on {device!r}; engines: native and reference on 'cpu', cuda on 'cuda:0' and so on"
    )


@lru_cache(maxsize=1)
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)


@lru_cache(maxsize=64)
def _cuda_engine(index: int) -> Engine:
    return CudaEngine(CudaDevice(index))


@lru_cache(maxsize=8)
def engine_named(name: str) -> Engine:
    """The engine of this name. Raises EngineError if it does not exist or cannot be used here."""
    if name not in _ENGINES:
        raise EngineError(f"no engine is named {name!r}; known: {', '.join(_ENGINES)}")
    return _ENGINES[name]()


def available() -> tuple[EngineInfo, ...]:
    """Every engine, the fastest first, with what it runs on or why it cannot."""
    missing = native.why_missing()
    detail = missing or f"build {NativeEngine().build} of {', '.join(native.builds())}"
    return (
        EngineInfo("native", "cpu", missing is None, detail),
        EngineInfo("reference", "cpu", True, f"numpy {np.__version__}"),
        _cuda_info(),
    )


def _cuda_info() -> EngineInfo:
    # cupy takes half a second to import, so it is only asked where a driver is.
    try:
        ctypes.CDLL("libcuda.so.1")
        n_devices = cuda_device.count()
        detail = f"{n_devices} devices, NVRTC {cuda_compile.compiler_version()}"
    except OSError:
        return EngineInfo("cuda", "cuda", False, "there is no CUDA driver: libcuda.so.1 does not load")
    except (EngineError, MissingExtra) as error:
        return EngineInfo("cuda", "cuda", False, str(error))
    return EngineInfo("cuda", "cuda", True, detail)
