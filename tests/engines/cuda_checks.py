"""Comparisons of the cuda engine with the reference: for the whole suite, for sanitizers, and for seeded bugs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import inputs
import numpy as np

from zcomm.buffers import DType
from zcomm.engines.cuda import CudaEngine
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.engines.reference import ReferenceEngine
from zcomm.wire.codec import Codec
from zcomm.wire.int_block import BITS, IntBlock
from zcomm.wire.registry import codec

REFERENCE = ReferenceEngine()
CARRIED = ("raw", "raw:bfloat16", "raw:float16", "raw:float64", "bf16", "fp16")
BLOCKS = (8, 40, 64, 128, 256, 1032, 8192)
CODECS = [codec(spec) for spec in CARRIED] + [IntBlock(bits, block) for bits in BITS for block in BLOCKS]
FINISHES = (NO_FINISH, Finish(factor=0.3), Finish(divisor=7), Finish(factor=-1e-3, divisor=3))
ALIGNED = (0, 16)
MISALIGNED = (1, 2, 4, 8, 12, 31)


def counts(kind: Codec, rng: np.random.Generator) -> list[int]:
    """Element counts at and around the edges of blocks, and odd ones."""
    block = max(kind.block, 8)
    few = min(block, 300)
    return [1, int(rng.integers(2, 70)), block - 1, block, block + 1, int(rng.integers(3 * few, 9 * few)), 8 * few]


def check_round_trip(engine: CudaEngine, kind: Codec, name: str, n: int, rng: np.random.Generator, offset: int) -> None:
    """Encode from one dtype, decode to another."""
    dtype, out = DType(int(rng.integers(4))), DType(int(rng.integers(4)))
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
) -> None:
    """Add chunks and store the sum, then encode it again."""
    out, finish = DType(int(rng.integers(4))), FINISHES[rng.integers(len(FINISHES))]
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
    engine.reduce_encode(kind, [room.address for room in rooms], n, finish, codec_out, out.address)
    wire = out.taken()
    dtype = codec_out.dtype
    if dtype is None:
        return wire
    assert not any(wire[n * dtype.itemsize :]), "padding is not zero"
    return inputs.without_payloads(wire[: n * dtype.itemsize], dtype)


def check_pieces(
    engine: CudaEngine,
    kind: Codec,
    sizes: Sequence[int],  # elements of neighbouring pieces
    dtype: DType,
    rng: np.random.Generator,
    offset: int,
) -> None:
    """Encode and decode the pieces of an array in one launch, in an order that is not theirs in the array."""
    n = sum(sizes)
    x = inputs.elements("normal", rng, n, dtype)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    chunks = [inputs.encode(REFERENCE, kind, x[s : s + k], dtype) for s, k in zip(starts, sizes, strict=True)]
    order = rng.permutation(len(sizes)).tolist()
    places = dict(zip(order, np.cumsum([0, *[len(chunks[i]) for i in order]]).tolist(), strict=False))
    pieces = [(starts[i], sizes[i], places[i]) for i in range(len(sizes))]
    wire = b"".join(chunks[i] for i in order)
    what = (str(kind), sizes, dtype, offset)

    source, room = inputs.Room(x.nbytes, offset, x.tobytes()), inputs.Room(len(wire), offset)
    engine.encode_pieces(kind, source.address, dtype, room.address, pieces)
    assert room.taken() == wire, what
    decoded = [inputs.decode(REFERENCE, kind, c, k, dtype) for c, k in zip(chunks, sizes, strict=True)]
    target = inputs.Room(x.nbytes, offset)
    engine.decode_pieces(kind, room.address, target.address, dtype, pieces)
    assert inputs.without_payloads(target.taken(), dtype) == b"".join(decoded), what


def check_near_ties(engine: CudaEngine, kinds: Iterable[IntBlock]) -> None:
    """Elements whose product with inv is a tie, or one rounding error beside it."""
    for kind in kinds:
        rng = np.random.default_rng([kind.bits, kind.block])
        n_blocks = max(2, 4096 // kind.block)
        scale = np.repeat(1 + rng.integers(0, 128, n_blocks) / 128, kind.block)
        x = (scale * (rng.integers(-kind.qmax, kind.qmax, scale.size) + 0.5)).astype(np.float32)
        x = (x.view(np.int32) + rng.integers(-2, 3, x.size).astype(np.int32)).view(np.float32)
        x[:: kind.block] = scale[:: kind.block] * kind.qmax

        wire = inputs.encode(REFERENCE, kind, x, DType.FLOAT32)
        assert inputs.encode(engine, kind, x, DType.FLOAT32) == wire, kind


def check_briefly(engine: CudaEngine) -> None:
    """A short list that meets every loop of the kernels at its edges."""
    rng = np.random.default_rng(11)
    kinds = [codec(spec) for spec in ("int8", "int4", "int3:40", "int5:8192", "int2:8", "bf16", "raw")]
    for kind in kinds:
        for n in (1, 13, 9 * 256 + 77, 20011):
            for offset in (0, 3):
                check_round_trip(engine, kind, "normal", n, rng, offset)
                check_sum(engine, kind, kind, ("normal", "wide exponents", "normal"), n, rng, offset)
        check_sum(engine, kind, kind, ("negative zero",) * 2, 300, rng, 0)
        check_sum(engine, kind, codec("int6:64"), ("normal",) * 2, 1000, rng, 0)
        for dtype in (DType.FLOAT16, DType.FLOAT32):
            check_pieces(engine, kind, [8, 300, 1, 512, 2048], dtype, rng, 0)
    check_near_ties(engine, [IntBlock(8, 256), IntBlock(4, 128), IntBlock(3, 64)])


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
    """What FEW_KERNELS can do, at their edges: the list that seeded bugs must not survive."""
    rng, dtype = np.random.default_rng(12), DType.FLOAT16
    for kind in [codec(spec) for spec in ("int8", "int4", "int7:40", "int3:8192", "bf16")]:
        for name, n in (("normal", 3 * 8192 + 77), ("ties", 2061), ("any bits", 600), ("normal", 5)):
            x = inputs.elements(name, rng, n, dtype)
            wire = inputs.encode(REFERENCE, kind, x, dtype)
            for offset in (0, 2):
                assert inputs.encode(engine, kind, x, dtype, offset) == wire, (str(kind), name, n, offset)
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
