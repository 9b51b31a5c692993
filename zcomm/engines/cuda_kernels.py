"""Which CUDA kernel does which verb of which codec, by its C++ name, and how many threads share a task of it.

The kernels are the templates of cuda/exports.cu over one struct for each codec. Each struct has a general instance, for
any width, block and address, and for blocks that are a power of two a fast one, for whole units of memory at multiples
of 16 bytes. A unit is what a task does: a block, or the blocks that share more than a scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from zcomm.buffers import DType
from zcomm.errors import EngineError
from zcomm.wire import nvfp4
from zcomm.wire.cast import Cast
from zcomm.wire.codec import Codec
from zcomm.wire.fp8_block import Fp8Block
from zcomm.wire.hadamard import GROUP, Hadamard
from zcomm.wire.int_asym import IntAsym
from zcomm.wire.int_block import IntBlock
from zcomm.wire.minifloat import E2M1
from zcomm.wire.mx_block import MxBlock
from zcomm.wire.nvfp4 import NvFp4
from zcomm.wire.options import NEAREST, SHIFT, STOCHASTIC
from zcomm.wire.planes import fields
from zcomm.wire.raw import Raw

N_THREADS = 256  # of every CTA: ZC_THREADS
WARP = 32
WIDE_BLOCK = 8192  # elements from which on a whole CTA shares a block
MAX_FAST_BLOCK = 1024  # more would not fit into registers


class Kernel(NamedTuple):
    """One kernel and the threads that share a task of it: 1, 2, 4 ... 32, or all."""

    name: str
    team: int
    block_team: int  # of them, those that share a block


class Kernels(NamedTuple):
    """What does one verb of one codec."""

    fast: Kernel | None
    general: Kernel
    unit: int  # elements of a task


COPY = Kernels(None, Kernel("copy", 1, 1), 16)

_ELEMENTS = {
    DType.FLOAT32: "Float32",
    DType.BFLOAT16: "BFloat16",
    DType.FLOAT16: "Float16",
    DType.FLOAT64: "Float64",
}
_VECTOR = {DType.FLOAT32: 4, DType.BFLOAT16: 8, DType.FLOAT16: 8}  # of cuda/elements.cuh; float64 has no fast kernels
_SUM_VECTOR = 8  # VECTOR of SumOf
_ROUNDINGS = (NEAREST, STOCHASTIC, SHIFT)


class _Struct(NamedTuple):
    """A codec's struct in C++."""

    fast: str  # "" if it has none
    general: str
    block: int  # elements that share a scale
    unit: int
    segments: int  # of the fast one, as in cuda/planes.cuh
    columns: int  # that a thread of it takes at a time, 0: as many as make a vector
    has_blocks: bool = True
    rotated: bool = False


@lru_cache(maxsize=256)
def encode_kernels(codec: Codec, dtype: DType) -> Kernels:
    """From elements to a chunk. Raises EngineError for a codec that there is no struct for."""
    struct = _struct(codec, encodes=True)
    if codec.dtype is not None:
        return sum_kernels(Raw(dtype), codec.dtype)
    source = f"Elements<{_ELEMENTS[dtype]}>"
    general = _general(struct, f"encode<{struct.general}, {source}>", together=struct.rotated)
    return _kernels(struct, general, f"encode<{struct.fast}, {source}>", _VECTOR.get(dtype, 0))


@lru_cache(maxsize=256)
def sum_kernels(codec: Codec, dtype: DType) -> Kernels:
    """From chunks, one or many, to elements. Raises EngineError for a codec that there is no struct for."""
    struct, element = _struct(codec), _ELEMENTS[dtype]
    general = _general(struct, f"sum<{struct.general}, {element}>", together=struct.rotated)
    return _kernels(struct, general, f"sum<{struct.fast}, {element}>", _VECTOR.get(dtype, 0))


@lru_cache(maxsize=256)
def sum_encode_kernels(codec: Codec, codec_out: Codec) -> Kernels:
    """From chunks to a chunk of their sum. Where both are rotated, to their inner codecs nothing is."""
    if isinstance(codec, Hadamard) and isinstance(codec_out, Hadamard):
        return sum_encode_kernels(codec.inner, codec_out.inner)
    struct, out = _struct(codec), _struct(codec_out, encodes=True)
    if codec_out.dtype is not None:
        return sum_kernels(codec, codec_out.dtype)
    name = f"encode<{out.general}, SumOf<{struct.general}>>"
    general = _general(out, name, together=struct.rotated or out.rotated)
    alike = struct == _struct(codec_out) and not out.rotated
    return _kernels(out, general, f"encode<{out.fast}, SumOf<{struct.fast}>>", _SUM_VECTOR if alike else 0)


def every_kernel(
    codecs: Sequence[Codec],
    pairs: Sequence[tuple[Codec, Codec]] = (),  # whose sums are encoded by another
    dtypes: Iterable[DType] = DType,  # of elements
) -> list[str]:
    """The C++ names of all kernels that any verb uses on these."""
    names = {COPY.general.name: None}
    for kernels in _every(codecs, pairs, tuple(dtypes)):
        names[kernels.general.name] = None
        if kernels.fast:
            names[kernels.fast.name] = None
    return list(names)


def _every(codecs: Sequence[Codec], pairs: Sequence[tuple[Codec, Codec]], dtypes: Sequence[DType]) -> Iterator[Kernels]:
    for codec in codecs:
        for dtype in dtypes:
            yield encode_kernels(codec, dtype)
            yield sum_kernels(codec, dtype)
        yield sum_encode_kernels(codec, codec)
    for codec, codec_out in pairs:
        yield sum_encode_kernels(codec, codec_out)


@lru_cache(maxsize=512)
def _struct(
    codec: Codec,
    encodes: bool = False,  # rounding is of no concern to decoding
) -> _Struct:
    """The codec's struct. Raises EngineError if there is none."""
    if isinstance(codec, Hadamard):
        inner = _struct(codec.inner, encodes)
        unit = max(GROUP, inner.unit)
        fast = f"Hadamard<{inner.fast}>" if inner.fast else ""
        return inner._replace(fast=fast, general=f"Hadamard<{inner.general}>", unit=unit, rotated=True)
    if isinstance(codec, Raw | Cast):
        element = _ELEMENTS[codec.dtype]
        fast = f"Carried<{element}, 8>" if codec.dtype in _VECTOR else ""
        return _Struct(fast, f"Carried<{element}, 0>", 8, 8, 1, 8, has_blocks=False)
    if not isinstance(codec, IntBlock | IntAsym | Fp8Block | MxBlock | NvFp4) or codec.rounding not in _ROUNDINGS:
        raise EngineError(f"the cuda engine cannot compute codec {codec}; use CPU memory for it")
    chance = encodes and codec.rounding == STOCHASTIC
    how = ", true" if chance else ""
    columns = 8 if chance else 0
    if isinstance(codec, NvFp4):
        return _blocks(f"NvFp4<{{}}{how}>", nvfp4.BLOCK, E2M1.bits, 8)._replace(unit=nvfp4.REGION)
    if isinstance(codec, MxBlock):
        return _blocks(f"MxBlock<zc_{codec.form.name}, {{}}{how}>", codec.block, codec.bits, columns)
    if isinstance(codec, Fp8Block):
        return _blocks(f"Fp8Block<zc_{codec.element}, {{}}{how}>", codec.block, codec.bits, columns)
    name = "IntAsym" if isinstance(codec, IntAsym) else "IntShift" if codec.rounding == SHIFT else "IntBlock"
    return _blocks(f"{name}<{{}}{how}>", codec.block, codec.bits, columns, width=True)


def _blocks(
    pattern: str,  # of the struct's name, {} for its block
    block: int,
    bits: int,
    columns: int,
    width: bool = False,  # whether the bits stand before the block
) -> _Struct:
    """A codec of blocks that are units."""
    has_fast = block & (block - 1) == 0 and block <= MAX_FAST_BLOCK
    fast = pattern.format(f"{bits}, {block}" if width else block) if has_fast else ""
    general = pattern.format("0, 0" if width else 0)
    return _Struct(fast, general, block, block, 8 // min(fields(bits)), columns)


def _general(
    struct: _Struct,
    name: str,
    together: bool,  # whether something is rotated: the lanes of a warp go on together then
) -> Kernel:
    """The kernel for anything, and the threads that share its tasks."""
    columns = struct.block // 8
    if not struct.has_blocks:
        block_team = 8
    elif columns >= WIDE_BLOCK // 8:
        block_team = N_THREADS
    else:
        block_team = WARP if together else min(WARP, 1 << (columns - 1).bit_length())
    wanted = block_team * (struct.unit // struct.block)
    return Kernel(name, N_THREADS if wanted >= N_THREADS else min(WARP, wanted), block_team)


def _kernels(
    struct: _Struct,
    general: Kernel,
    fast: str,
    vector: int,  # elements that a thread of the fast kernel moves at once, 0 if there is no fast one
) -> Kernels:
    """Both kernels of a verb: Tiling of cuda/chunk.cuh says how a team shares a unit of the fast one."""
    columns = min(struct.columns or vector, 4 if struct.segments == 8 else 8, struct.block // struct.segments)
    if not struct.fast or vector == 0 or columns < 4:
        return Kernels(None, general, struct.unit)
    block_tiles = struct.block // (struct.segments * columns)
    tiles = struct.unit // struct.block * block_tiles
    return Kernels(Kernel(fast, min(WARP, tiles), min(WARP, block_tiles)), general, struct.unit)
