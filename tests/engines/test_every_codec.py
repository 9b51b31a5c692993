"""Every codec on every engine: the reference's bytes, for every dtype and for sizes at every edge.

Codecs come from the registry (`inputs.every_codec`), so that a new one is here already. An engine is a row of ENGINES.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import inputs
import numpy as np
import pytest

from zcomm.buffers import DType
from zcomm.engines import native
from zcomm.engines.engine import Engine, Finish
from zcomm.engines.native import NativeEngine
from zcomm.engines.reference import ReferenceEngine
from zcomm.wire.codec import Codec
from zcomm.wire.registry import NAMES, codec

REFERENCE = ReferenceEngine()
BUILDS = () if native.why_missing() else native.builds()
ENGINES: dict[str, Callable[[], Engine]] = {
    f"native-{build}": lambda build=build: NativeEngine(build) for build in BUILDS
}
KINDS = inputs.every_codec()
OUT = [
    codec(spec)
    for spec in ("int4:64:stochastic", "raw", "int5:asym", "bf16", "hadamard:int8:64", "nvfp4", "int3:shift")
]
FINISH = Finish(factor=0.3, divisor=7)


class Case(NamedTuple):
    """Elements and what the reference makes of them."""

    dtype: DType
    x: np.ndarray
    wire: bytes
    decoded: bytes  # in the next dtype


class SumCase(NamedTuple):
    """Chunks, their finished sum, and that encoded again."""

    dtype: DType
    n: int
    wires: list[bytes]
    total: bytes
    codec_out: Codec
    again: bytes


def sizes(kind: Codec) -> list[int]:
    """Element counts at and around the edges of blocks, odd ones, and several blocks."""
    block = max(kind.block, 16)
    return [0, 1, block - 1, block, block + 1, 2 * block + 77, 1000]


def next_dtype(dtype: DType) -> DType:
    return DType((dtype + 1) % len(DType))


@lru_cache(maxsize=2)
def cases(kind: Codec) -> list[Case]:
    """Every dtype in every size, of inputs that take turns."""
    rng, found = np.random.default_rng(KINDS.index(kind)), []
    names = list(inputs.CLASSES)
    for dtype in DType:
        for n in sizes(kind):
            x = inputs.elements(names[rng.integers(len(names))] if n > 1 else "normal", rng, n, dtype)
            wire = inputs.encode(REFERENCE, kind, x, dtype)
            found.append(Case(dtype, x, wire, inputs.decode(REFERENCE, kind, wire, n, next_dtype(dtype))))
    return found


@lru_cache(maxsize=2)
def sum_cases(kind: Codec) -> list[SumCase]:
    """Sums of one, two and five chunks in every dtype, encoded again by the codec itself and by another."""
    rng, found = np.random.default_rng(KINDS.index(kind)), []
    for dtype, k, n in zip(DType, (5, 1, 2, 3), (2 * kind.block + 77, 1, kind.block + 1, 313), strict=True):
        names = ["normal", "wide exponents", "some nan", "normal", "tiny mix"][:k]
        wires = [inputs.encode(REFERENCE, kind, inputs.elements(name, rng, n, dtype), dtype) for name in names]
        total = inputs.reduce(REFERENCE, kind, wires, n, FINISH, dtype)
        for codec_out in (kind, OUT[rng.integers(len(OUT))]):
            again = inputs.reduce_encode(REFERENCE, kind, wires, n, FINISH, codec_out)
            found.append(SumCase(dtype, n, wires, total, codec_out, again))
    return found


def test_every_name_of_the_registry_is_tested_in_every_rounding_it_has() -> None:
    spellings = [str(kind) for kind in KINDS]

    for name in NAMES:
        assert name in spellings
        assert all(kind.for_dtype(dtype) in KINDS for kind in [codec(name)] for dtype in DType)
    assert len(spellings) == len(set(spellings))
    for word in ("int8:shift", "int2:8:asym:stochastic", "hadamard:int8:64:shift", "hadamard:mxfp4:stochastic"):
        assert word in spellings


@pytest.mark.parametrize("row", ENGINES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_encode_and_decode(kind: Codec, row: str) -> None:
    engine = ENGINES[row]()

    assert engine.supports(kind)
    for offset, case in enumerate(cases(kind)):
        n, out = case.x.size, next_dtype(case.dtype)
        what = (n, case.dtype, offset)
        assert inputs.encode(engine, kind, case.x, case.dtype, offset) == case.wire, what
        assert inputs.decode(engine, kind, case.wire, n, out, offset) == case.decoded, what


@pytest.mark.parametrize("row", ENGINES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_reduce_and_encode_again(kind: Codec, row: str) -> None:
    engine = ENGINES[row]()

    for offset, (dtype, n, wires, total, codec_out, again) in enumerate(sum_cases(kind)):
        what = (n, dtype, len(wires), str(codec_out))
        assert inputs.reduce(engine, kind, wires, n, FINISH, dtype, offset) == total, what
        assert inputs.reduce_encode(engine, kind, wires, n, FINISH, codec_out, offset) == again, what
