"""Every codec on every engine: the reference's bytes, for every dtype and for sizes at every edge.

Codecs come from the registry (`inputs.every_codec`), so that a new one is here already. An engine is a row. The kernels
of the cuda engine are templates, and not every instance is worth its compilation: its row has the codecs whose kernels
cuda_on_cpu.py builds, which are all names in all roundings, in blocks that do not take the CPU long.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import inputs
import numpy as np
import pytest
from cuda_on_cpu import COMPILER, KERNELS, CpuLauncher

from zcomm.buffers import DType
from zcomm.engines import native
from zcomm.engines.cuda import CudaEngine
from zcomm.engines.cuda_kernels import every_kernel
from zcomm.engines.engine import Engine, Finish
from zcomm.engines.native import NativeEngine
from zcomm.engines.reference import ReferenceEngine
from zcomm.errors import EngineError
from zcomm.wire.codec import Codec
from zcomm.wire.registry import NAMES, codec

REFERENCE = ReferenceEngine()
KINDS = inputs.every_codec()
OUT = [
    codec(spec)
    for spec in ("int4:64:stochastic", "raw", "int5:asym", "bf16", "hadamard:int8:64", "nvfp4", "int3:shift")
]
FINISH = Finish(factor=0.3, divisor=7)
CUDA = "cuda on the CPU"
BUILT = frozenset(KERNELS)


def kernels_of(kind: Codec) -> frozenset[str] | None:
    """All that the cuda engine runs for a codec; None if it cannot."""
    try:
        return frozenset(every_kernel([kind]))
    except EngineError:
        return None


OF_CUDA = {kind: kernels for kind in KINDS if (kernels := kernels_of(kind)) is not None}
BUILT_KINDS = [kind for kind, kernels in OF_CUDA.items() if kind.block < 8192 and kernels <= BUILT]


def rows() -> list[tuple[str, Codec]]:
    """Every engine that can be had here, with every codec that it supports; those of one codec together."""
    builds = () if native.why_missing() else native.builds()
    found = [(f"native {build}", kind) for kind in KINDS for build in builds if NativeEngine(build).supports(kind)]
    return sorted(found + [(CUDA, kind) for kind in BUILT_KINDS if COMPILER], key=lambda row: KINDS.index(row[1]))


ROWS = [pytest.param(name, kind, id=f"{kind}-{name}") for name, kind in rows()]


def engine_of(name: str, request: pytest.FixtureRequest) -> Engine:
    if name == CUDA:
        return CudaEngine(CpuLauncher(request.getfixturevalue("library")))
    return NativeEngine(name.removeprefix("native "))


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


def test_the_cuda_engine_s_row_has_every_name_in_every_rounding() -> None:
    def word(kind: Codec) -> tuple[str, str]:
        head, *options = str(kind).removeprefix("hadamard:").split(":")
        bits_alike = "int" if head.startswith("int") else head
        return bits_alike, ":".join(option for option in options if not option.isdecimal())

    assert {word(kind) for kind in BUILT_KINDS} == {word(kind) for kind in OF_CUDA}
    assert {word(kind) for kind in BUILT_KINDS if str(kind).startswith("hadamard")} >= {("int", ""), ("mxfp8", "")}


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_encode_and_decode(name: str, kind: Codec, request: pytest.FixtureRequest) -> None:
    engine = engine_of(name, request)

    for offset, case in enumerate(cases(kind)):
        n, out = case.x.size, next_dtype(case.dtype)
        what = (n, case.dtype, offset)
        assert inputs.encode(engine, kind, case.x, case.dtype, offset) == case.wire, what
        assert inputs.decode(engine, kind, case.wire, n, out, offset) == case.decoded, what


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_reduce_and_encode_again(name: str, kind: Codec, request: pytest.FixtureRequest) -> None:
    engine = engine_of(name, request)

    for offset, (dtype, n, wires, total, codec_out, again) in enumerate(sum_cases(kind)):
        what = (n, dtype, len(wires), str(codec_out))
        assert inputs.reduce(engine, kind, wires, n, FINISH, dtype, offset) == total, what
        if name != CUDA or BUILT.issuperset(every_kernel([], [(kind, codec_out)])):
            assert inputs.reduce_encode(engine, kind, wires, n, FINISH, codec_out, offset) == again, what
