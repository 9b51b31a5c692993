"""Comparisons of the cuda engine with the reference: for the whole suite, for sanitizers, and for seeded bugs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import inputs
import numpy as np
from cuda_on_cpu import SHAPES, SPECS
from pieces import check_pieces

from zcomm.buffers import DType
from zcomm.engines.cuda import CudaEngine
from zcomm.engines.cuda_kernels import every_kernel
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.engines.reference import ReferenceEngine
from zcomm.wire.codec import Codec
from zcomm.wire.int_asym import IntAsym
from zcomm.wire.int_block import BITS, IntBlock
from zcomm.wire.minifloat import E2M1, E4M3, from_mini
from zcomm.wire.mx_block import MxBlock
from zcomm.wire.nvfp4 import BLOCK, REGION, NvFp4
from zcomm.wire.registry import codec

REFERENCE = ReferenceEngine()
BLOCKS = (40, 1032, 8192)  # that no fast kernel takes
CODECS = [codec(spec) for spec in SPECS + SHAPES] + [IntBlock(bits, block) for bits in BITS for block in BLOCKS]
CODECS += [codec(spec) for spec in ("int2:40:stochastic", "int6:8192:stochastic", "int3:40:shift", "int7:8192:shift")]
CODECS += [codec(spec) for spec in ("int4:40:asym", "int5:8192:asym:stochastic", "fp8_e4m3:24", "fp8_e5m2:8192")]
CODECS += [codec(f"hadamard:{spec}") for spec in ("int7:96", "int3:8192", "int4:2048:stochastic", "int2:96:asym")]
FINISHES = (NO_FINISH, Finish(factor=0.3), Finish(divisor=7), Finish(factor=-1e-3, divisor=3))
ALIGNED = (0, 16)
MISALIGNED = (1, 2, 4, 8, 12, 31)


def counts(kind: Codec, rng: np.random.Generator) -> list[int]:
    """Element counts at and around the edges of blocks, and odd ones."""
    block = max(kind.block, 8)
    few = min(block, 300)
    return [1, int(rng.integers(2, 70)), block - 1, block, block + 1, int(rng.integers(3 * few, 9 * few)), 8 * few]


def check_round_trip(
    engine: CudaEngine,
    kind: Codec,
    name: str,  # of an input class
    n: int,
    rng: np.random.Generator,
    offset: int,
    dtypes: Sequence[DType] = tuple(DType),
) -> None:
    """Encode from one dtype, decode to another."""
    dtype, out = (dtypes[rng.integers(len(dtypes))] for _ in range(2))
    x = inputs.elements(name, rng, n, dtype)
    wire = inputs.encode(REFERENCE, kind, x, dtype)
    expected = inputs.decode(REFERENCE, kind, wire, n, out)
    what = (str(kind), name, n, dtype, out, offset)

    assert inputs.encode(engine, kind, x, dtype, offset) == wire, what
    assert inputs.decode(engine, kind, wire, n, out, offset) == expected, what


def check_sum(
    engine: CudaEngine,
    kind: Codec,
    codec_out: Codec,
    names: Sequence[str],  # input classes of the chunks, one each
    n: int,
    rng: np.random.Generator,
    offset: int,
    dtypes: Sequence[DType] = tuple(DType),
) -> None:
    """Add chunks and store the sum, then encode it again."""
    out, finish = dtypes[rng.integers(len(dtypes))], FINISHES[rng.integers(len(FINISHES))]
    wires = [encoded(kind, name, n, rng) for name in names]
    what = (str(kind), str(codec_out), names, n, finish, out, offset)

    total = summed(engine, kind, wires, n, finish, out, offset)
    assert total == inputs.reduce(REFERENCE, kind, wires, n, finish, out), what
    again = summed_again(engine, kind, wires, n, finish, codec_out, offset)
    assert again == inputs.reduce_encode(REFERENCE, kind, wires, n, finish, codec_out), what


def encoded(kind: Codec, name: str, n: int, rng: np.random.Generator) -> bytes:
    """A chunk of an input class."""
    return inputs.encode(REFERENCE, kind, inputs.elements(name, rng, n, DType.FLOAT64), DType.FLOAT64)


def summed(
    engine: CudaEngine, kind: Codec, wires: list[bytes], n: int, finish: Finish, dtype: DType, offset: int
) -> bytes:
    """As inputs.reduce, with every chunk at the same offset from alignment."""
    rooms = [inputs.Room(len(wire), offset, wire) for wire in wires]
    target = inputs.Room(n * dtype.itemsize, offset)
    engine.reduce(kind, [room.address for room in rooms], n, finish, target.address, dtype)
    return inputs.without_payloads(target.taken(), dtype)


def summed_again(
    engine: CudaEngine, kind: Codec, wires: list[bytes], n: int, finish: Finish, codec_out: Codec, offset: int
) -> bytes:
    """As inputs.reduce_encode, with every chunk at the same offset from alignment."""
    rooms = [inputs.Room(len(wire), offset, wire) for wire in wires]
    out = inputs.Room(codec_out.nbytes(n), offset)
    engine.reduce_encode(kind, [room.address for room in rooms], n, finish, codec_out, out.address, inputs.DRAW)
    wire = out.taken()
    dtype = codec_out.dtype
    if dtype is None:
        return wire
    assert not any(wire[n * dtype.itemsize :]), "padding is not zero"
    return inputs.without_payloads(wire[: n * dtype.itemsize], dtype)


def check_near_ties(engine: CudaEngine, kinds: Iterable[Codec]) -> None:
    """Elements whose product with inv is a tie, or one rounding error beside it."""
    for kind in kinds:
        x = near_ties(kind, np.random.default_rng(len(str(kind))))
        wire = inputs.encode(REFERENCE, kind, x, DType.FLOAT32)
        assert inputs.encode(engine, kind, x, DType.FLOAT32) == wire, str(kind)


def near_ties(kind: Codec, rng: np.random.Generator) -> np.ndarray:  # float32
    """Elements halfway between two numbers that codes stand for, give or take a unit, in blocks of any scale."""
    if isinstance(kind, IntBlock | IntAsym):
        numbers = np.arange(2.0**kind.bits) - (kind.qmax if isinstance(kind, IntBlock) else 0)
        numbers = numbers[: 2 * kind.qmax + 1] if isinstance(kind, IntBlock) else numbers
    else:
        form = E2M1 if isinstance(kind, NvFp4) else kind.form  # type: ignore[attr-defined]
        numbers = np.unique(from_mini(np.arange(2**form.bits, dtype=np.uint8), form).astype(np.float64))
        numbers = numbers[np.isfinite(numbers)]
    block, largest = kind.block, numbers[-1]
    n = max(2, 4096 // block) * block
    x = rng.choice((numbers[1:] + numbers[:-1]) / 2, n)
    if isinstance(kind, NvFp4):
        x[::BLOCK] = largest  # so that all blocks have the scale 1
        x[::REGION] = largest * E4M3.largest
    else:
        x[::block] = largest
        if not isinstance(kind, MxBlock):  # whose scales are powers of two
            x *= np.repeat(1 + rng.integers(0, 128, n // block) / 128, block)
    near = (x.astype(np.float32).view(np.int32) + rng.integers(-2, 3, n).astype(np.int32)).view(np.float32)
    edges = slice(None, None, BLOCK if isinstance(kind, NvFp4) else block)
    near[edges] = x[edges]
    if isinstance(kind, IntAsym):
        near[1::block] = 0
    return near


BRIEF = ("int8", "int4", "int5:40", "int5:8192", "bf16", "raw", "int7:64:stochastic", "fp8_e4m3:8", "mxfp4", "nvfp4")
BRIEF += ("int4:shift", "int8:asym", "hadamard:int4", "hadamard:int4:8", "hadamard:int3:96", "hadamard:nvfp4")


BRIEF_DTYPES = (DType.FLOAT32, DType.FLOAT16)
BRIEF_KERNELS = every_kernel([codec(spec) for spec in BRIEF], [], BRIEF_DTYPES)


def check_briefly(engine: CudaEngine) -> None:
    """A short list that meets every loop of the kernels at its edges."""
    rng = np.random.default_rng(11)
    for kind in map(codec, BRIEF):
        block = max(kind.block, 8)
        for n in (1, 13, block + 77, 8200 if block > 1024 else 2111):
            for offset in (0, 3):
                check_round_trip(engine, kind, "normal", n, rng, offset, BRIEF_DTYPES)
            check_sum(engine, kind, kind, ("normal", "wide exponents", "normal"), n, rng, (0, 3)[n % 2], BRIEF_DTYPES)
        check_sum(engine, kind, kind, ("negative zero",) * 2, 300, rng, 0, BRIEF_DTYPES)
        for dtype in BRIEF_DTYPES:
            check_pieces(engine, kind, [8, 300, 1, 512, 1024], dtype, rng, 0)
    check_near_ties(engine, map(codec, ("int8", "int4", "int5:40", "int8:asym", "fp8_e4m3:8", "nvfp4")))


FEW_KERNELS = (
    "encode<IntBlock<8, 256>, Elements<Float16>>",
    "encode<IntBlock<4, 128>, Elements<Float16>>",
    "encode<IntBlock<0, 0>, Elements<Float16>>",
    "encode<IntBlock<8, 256>, SumOf<IntBlock<8, 256>>>",
    "encode<IntBlock<0, 0>, SumOf<IntBlock<0, 0>>>",
    "sum<IntBlock<8, 256>, Float32>",
    "sum<IntBlock<0, 0>, Float32>",
    "sum<Carried<Float16, 8>, BFloat16>",
    "sum<Carried<Float16, 0>, BFloat16>",
)


def check_few(engine: CudaEngine) -> None:
    """What FEW_KERNELS can do, at their edges: the list that bugs planted in the loops must not survive."""
    rng, dtype = np.random.default_rng(12), DType.FLOAT16
    cases = (("normal", 3 * 8192 + 77), ("ties", 2061), ("any bits", 600), ("normal", 5))
    for kind in map(codec, ("int8", "int4", "int7:40", "int3:8192", "bf16")):
        check_encodings(engine, kind, cases, dtype, rng)
    # What is small is lost in a sum with what is large, unless that has cancelled before.
    small, large = rng.standard_normal((2, 2061))
    for kind in (codec("int8"), codec("int7:40")):
        wires = [inputs.encode(REFERENCE, kind, part, DType.FLOAT64) for part in (small, 2e6 * large, -2e6 * large)]
        finish = Finish(factor=0.3, divisor=7)
        total = summed(engine, kind, wires, small.size, finish, DType.FLOAT32, 0)
        assert total == inputs.reduce(REFERENCE, kind, wires, small.size, finish, DType.FLOAT32), str(kind)
        again = summed_again(engine, kind, wires, small.size, finish, kind, 0)
        assert again == inputs.reduce_encode(REFERENCE, kind, wires, small.size, finish, kind), str(kind)
    zeros = [b"\0\x80" * 80] * 2
    total = summed(engine, codec("raw:float16"), zeros, 77, NO_FINISH, DType.BFLOAT16, 0)
    assert total == b"\0\x80" * 77, "a sum of negative zeros is one"
    source = inputs.elements("normal", rng, 5 * 256, dtype)
    for kind in (codec("int8"), codec("int4")):
        room = inputs.Room(source.nbytes, 0, source.tobytes())
        first, second = (inputs.encode(REFERENCE, kind, part, dtype) for part in (source[:512], source[512:]))
        wire = inputs.Room(len(first) + len(second))
        engine.encode_pieces(kind, room.address, dtype, wire.address, [(512, 768, len(first)), (0, 512, 0)])
        assert wire.taken() == first + second
    tie = IntBlock(8, 256)
    scale = np.float16(1 + 3 / 128)
    x = (np.arange(-127, 129, dtype=np.float64) * float(scale)).astype(np.float16)
    x = np.concatenate([np.nextafter(x, np.float16(way)) / np.float16(2) for way in (-np.inf, np.inf)] * 8)
    assert inputs.encode(engine, tie, x, dtype) == inputs.encode(REFERENCE, tie, x, dtype)


MORE_KERNELS = (
    "encode<Hadamard<IntBlock<4, 128>>, Elements<Float16>>",
    "encode<Hadamard<IntBlock<4, 8>>, Elements<Float16>>",
    "encode<Hadamard<IntBlock<0, 0>>, Elements<Float16>>",
    "sum<Hadamard<IntBlock<4, 128>>, Float32>",
    "sum<Hadamard<IntBlock<0, 0>>, Float32>",
    "encode<IntBlock<8, 256, true>, Elements<Float16>>",
    "encode<IntBlock<0, 0, true>, Elements<Float16>>",
    "encode<IntBlock<0, 0>, SumOf<Hadamard<IntBlock<0, 0>>>>",
    "encode<NvFp4<16>, Elements<Float16>>",
    "encode<NvFp4<0>, Elements<Float16>>",
    "sum<NvFp4<16>, Float32>",
    "sum<NvFp4<0>, Float32>",
    "encode<Fp8Block<zc_e5m2, 0>, Elements<Float16>>",
    "encode<IntAsym<0, 0>, Elements<Float16>>",
    "encode<IntShift<0, 0>, Elements<Float16>>",
)


def check_more(engine: CudaEngine) -> None:
    """What MORE_KERNELS can do: the list that bugs planted in rotations, random bits and units must not survive."""
    rng, dtype = np.random.default_rng(13), DType.FLOAT16
    specs = ("hadamard:int4", "hadamard:int4:8", "hadamard:int7:96", "int8:stochastic", "int3:40:stochastic")
    for kind in map(codec, (*specs, "nvfp4", "fp8_e5m2:40", "int4:40:asym", "int3:40:shift")):
        check_encodings(engine, kind, (("normal", 2 * 1024 + 77), ("some infinite", 1061), ("normal", 5)), dtype, rng)
    kind, positive = codec("int4:40:asym"), (2 + rng.random(45)).astype(np.float16)
    assert inputs.encode(engine, kind, positive, dtype) == inputs.encode(REFERENCE, kind, positive, dtype)
    for kind in map(codec, ("hadamard:int4", "nvfp4")):
        wires = [encoded(kind, "normal", 1101, rng) for _ in range(2)]
        for offset in (0, 2):
            total = summed(engine, kind, wires, 1101, NO_FINISH, DType.FLOAT32, offset)
            assert total == inputs.reduce(REFERENCE, kind, wires, 1101, NO_FINISH, DType.FLOAT32), str(kind)
    kind, out = codec("hadamard:int7:96"), codec("int6:24")
    wires = [encoded(kind, "normal", 333, rng) for _ in range(2)]
    again = summed_again(engine, kind, wires, 333, Finish(divisor=2), out, 0)
    assert again == inputs.reduce_encode(REFERENCE, kind, wires, 333, Finish(divisor=2), out)


def check_encodings(
    engine: CudaEngine,
    kind: Codec,
    cases: Iterable[tuple[str, int]],  # input class, n
    dtype: DType,
    rng: np.random.Generator,
) -> None:
    """Encode, aligned and not, with random bits that begin anywhere."""
    for name, n in cases:
        x = inputs.elements(name, rng, n, dtype)
        for offset, first in ((0, 2**35 + 256), (0, 2**64 - 3), (2, 5)):
            draw = inputs.DRAW._replace(first=first)
            wire = inputs.encode(REFERENCE, kind, x, dtype, 0, draw)
            assert inputs.encode(engine, kind, x, dtype, offset, draw) == wire, (str(kind), name, n, offset)
