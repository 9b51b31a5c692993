"""Which engine computes where: the native one on the CPU if its library is there, the reference otherwise.

Both give the same bytes; only the speed differs, and `zcomm info` shows which one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zcomm.engines import native
from zcomm.engines.engine import Engine
from zcomm.engines.native import NativeEngine
from zcomm.engines.reference import ReferenceEngine
from zcomm.errors import EngineError
from zcomm.wire.codec import Codec

_ENGINES: dict[str, Callable[[], Engine]] = {
    "native": NativeEngine,
    "reference": ReferenceEngine,
}


class EngineInfo(NamedTuple):
    """One engine as `zcomm info` shows it."""

    name: str
    device: str  # what it computes on: "cpu"
    usable: bool
    detail: str  # its version or instruction set, or why it cannot be used


def engine_for(
    device: str,  # "cpu", "cuda:0", as a Span names it
    *codecs: Codec,  # that it must compute
) -> Engine:
    """The fastest engine for memory on this device and these codecs. Raises EngineError if there is none."""
    if device == "cpu":
        if native.why_missing() is None and all(engine_named("native").supports(codec) for codec in codecs):
            return engine_named("native")
        return engine_named("reference")
    raise EngineError(f"no engine computes on {device!r}; engines: native and reference on 'cpu'. Pass CPU memory")


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
    )
