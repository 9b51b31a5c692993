"""The native engine gives the reference engine's bytes: every build, codec, dtype, count and alignment."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import threading
import time

import inputs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import check_pieces

from zcomm.buffers import DType
from zcomm.engines import native
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.engines.native import NativeEngine
from zcomm.engines.reference import ReferenceEngine
from zcomm.errors import CodecError, EngineError
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.wire.int_block import BITS, IntBlock
from zcomm.wire.registry import codec

if native.why_missing():
    pytest.skip(f"no native engine: {native.why_missing()}", allow_module_level=True)

REFERENCE = ReferenceEngine()
BUILDS = [NativeEngine(build) for build in native.builds()]
# Blocks beside those of tests/engines/test_every_codec.py, for every class of inputs.
SPECS = [
    "raw",
    "raw:bfloat16",
    "raw:float16",
    "raw:float64",
    "bf16",
    "fp16",
    "fp8_e4m3",
    "fp8_e5m2:24",
    "fp8_e4m3:8192",
]
SPECS += ["mxfp8", "mxfp4", "nvfp4", "fp8_e4m3:stochastic", "mxfp8:stochastic", "mxfp4:stochastic", "nvfp4:stochastic"]
SPECS += [f"int{bits}:{block}" for bits in BITS for block in (24, 128, 256, 1032)]
SPECS += [f"int{bits}:{block}:stochastic" for bits in (2, 4, 5, 8) for block in (64, 192, 256, 1032)]
SPECS += [f"int{bits}:{block}:{word}" for bits in (2, 4, 5, 8) for block in (24, 1032) for word in ("shift", "asym")]
SPECS += ["int8:asym:stochastic", "int4:192:asym:stochastic"]
ROTATED = ("int4", "int8", "int6:192", "int8:stochastic", "int5:8192", "int4:64:stochastic", "int4:shift", "int8:asym")
ROTATED += ("fp8_e4m3", "fp8_e5m2:8", "mxfp4", "nvfp4", "nvfp4:stochastic")
CODECS = [codec(spec) for spec in (*SPECS, *(f"hadamard:{spec}" for spec in ROTATED))]
OUT = [
    codec(spec)
    for spec in (
        "int8",
        "int4",
        "int4:64",
        "int6:24",
        "int3:8192",
        "bf16",
        "fp16",
        "raw",
        "int8:stochastic",
        "int4:64:stochastic",
        "hadamard:int4",
        "fp8_e4m3",
        "mxfp4",
        "nvfp4",
        "hadamard:nvfp4",
        "hadamard:int8:stochastic",
        "int8:shift",
        "int4:asym:stochastic",
        "mxfp8:stochastic",
    )
]
FINISHES = [NO_FINISH, Finish(factor=0.3), Finish(divisor=7), Finish(factor=-1e-3, divisor=3)]


def counts(kind: Codec, rng: np.random.Generator) -> list[int]:
    """Three element counts: at and around the edges of blocks, and odd ones."""
    block = max(kind.block, 8)
    several = int(rng.integers(2 * min(block, 512), 9 * min(block, 512)))
    return [int(rng.choice((1, rng.integers(2, 70)))), int(rng.choice((block - 1, block, block + 1))), several]


@pytest.mark.parametrize("kind", CODECS, ids=str)
def test_native_encodes_and_decodes_to_the_references_bytes(kind: Codec) -> None:
    rng = np.random.default_rng([kind.nbytes(1000), len(str(kind))])
    for name in inputs.CLASSES:
        dtype = DType(int(rng.integers(4)))
        for n in counts(kind, rng):
            offset = int(rng.integers(64))
            x = inputs.elements(name, rng, n, dtype)
            draw = Draw(
                *rng.integers(0, 2**63, 2).tolist(), first=int(rng.integers(0, 2**40)) // (c := (1, 64, 256)[n % 3]) * c
            )
            wire = inputs.encode(REFERENCE, kind, x, dtype, draw=draw)
            out = DType(int(rng.integers(4)))
            y = inputs.decode(REFERENCE, kind, wire, n, out)

            for engine in BUILDS:
                what = (engine.build, name, n, dtype, out, offset)
                assert inputs.encode(engine, kind, x, dtype, offset, draw) == wire, what
                assert inputs.decode(engine, kind, wire, n, out, offset) == y, what


@pytest.mark.parametrize("kind", CODECS, ids=str)
def test_native_takes_many_pieces_at_once(kind: Codec) -> None:
    rng = np.random.default_rng(len(str(kind)))
    for engine in BUILDS:
        check_pieces(engine, kind, [512, 1, 0, 256, 77, 1031], DType(int(rng.integers(4))), rng, int(rng.integers(64)))


@pytest.mark.parametrize("kind", CODECS, ids=str)
def test_native_sums_to_the_references_bytes(kind: Codec) -> None:
    rng = np.random.default_rng([kind.nbytes(1000), len(str(kind))])
    for k in range(1, 9):
        name, out = rng.choice(list(inputs.CLASSES)), DType(int(rng.integers(4)))
        codec_out, finish = OUT[rng.integers(len(OUT))], FINISHES[rng.integers(len(FINISHES))]
        for n in counts(kind, rng):
            names = ["normal", "wide exponents", name]
            sources = [inputs.elements(names[i % 3], rng, n, DType.FLOAT64) for i in range(k)]
            wires = [inputs.encode(REFERENCE, kind, x, DType.FLOAT64) for x in sources]
            offset = int(rng.integers(64))
            total = inputs.reduce(REFERENCE, kind, wires, n, finish, out)
            again = inputs.reduce_encode(REFERENCE, kind, wires, n, finish, codec_out)

            for engine in BUILDS:
                what = (engine.build, names, n, k, finish, out, str(codec_out), offset)
                assert inputs.reduce(engine, kind, wires, n, finish, out, offset) == total, what
                assert inputs.reduce_encode(engine, kind, wires, n, finish, codec_out, offset) == again, what


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block", [8, 24, 64, 256])
def test_native_rounds_next_to_ties_like_the_reference(bits: int, block: int) -> None:
    # x * inv lands on a tie, or a rounding error beside one, only if the scale is no power of two. This is where a
    # fused multiply-add in the rounding would show.
    kind, n = IntBlock(bits, block), 200 * block
    rng = np.random.default_rng([bits, block])
    scale = np.repeat(1 + rng.integers(0, 128, 200) / 128, block)
    x = (scale * (rng.integers(-kind.qmax, kind.qmax, n) + 0.5)).astype(np.float32)
    x = (x.view(np.int32) + rng.integers(-2, 3, n).astype(np.int32)).view(np.float32)
    x[::block] = scale[::block] * kind.qmax
    wire = inputs.encode(REFERENCE, kind, x, DType.FLOAT32)

    for engine in BUILDS:
        assert inputs.encode(engine, kind, x, DType.FLOAT32) == wire, engine.build


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_native_and_reference_agree_on_anything(data: st.DataObject) -> None:
    kind, codec_out = data.draw(st.sampled_from(CODECS)), data.draw(st.sampled_from(OUT))
    dtype, out = data.draw(st.sampled_from(DType)), data.draw(st.sampled_from(DType))
    n, k, offset = data.draw(st.integers(0, 700)), data.draw(st.integers(1, 8)), data.draw(st.integers(0, 63))
    real = st.floats(-1e6, 1e6)
    finish = Finish(data.draw(real), data.draw(real.filter(bool)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    names = data.draw(st.lists(st.sampled_from(list(inputs.CLASSES)), min_size=k, max_size=k))
    engine = data.draw(st.sampled_from(BUILDS))
    sources = [inputs.elements(name, rng, n, dtype) for name in names]
    wires = [inputs.encode(REFERENCE, kind, x, dtype) for x in sources]

    assert [inputs.encode(engine, kind, x, dtype, offset) for x in sources] == wires
    for verb, last in ((inputs.reduce, out), (inputs.reduce_encode, codec_out)):
        expected = verb(REFERENCE, kind, wires, n, finish, last)  # type: ignore[operator]
        assert verb(engine, kind, wires, n, finish, last, offset) == expected  # type: ignore[operator]


@pytest.mark.parametrize(
    "spec", ["int8", "int4", "int4:64", "int5:64", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4"]
)
def test_native_sums_any_bytes_like_the_reference(spec: str) -> None:
    # Bytes that no encoder writes: codes of -2^(b-1), NaN codes, scales of every bit pattern. In two chunks scales are
    # large and codes small, so that a product too large for fp32 may meet one of the other sign that is not.
    kind, rng, n = codec(spec), np.random.default_rng(3), 3 * 1024 * 16 + 40
    chunks = [rng.integers(0, 256, kind.nbytes(n), dtype=np.uint8) for _ in range(3)]
    for chunk in chunks[1:]:
        chunk[:] = rng.choice(np.array([0x01, 0xFF, 0xFE, 0x1E, 0xE1, 0x7F], np.uint8), chunk.size)
        chunk[: chunk.size // 16] = rng.choice(np.array([0x7F, 0x7B, 0x77, 0xFB], np.uint8), chunk.size // 16)
    wires = [chunk.tobytes() for chunk in chunks]
    for dtype in DType:
        expected = [inputs.reduce(REFERENCE, kind, wires[:k], n, NO_FINISH, dtype) for k in (1, 3)]
        expected.append(inputs.reduce(REFERENCE, kind, wires[1:], n, NO_FINISH, dtype))
        for engine in BUILDS:
            sums = [inputs.reduce(engine, kind, wires[:k], n, NO_FINISH, dtype) for k in (1, 3)]
            sums.append(inputs.reduce(engine, kind, wires[1:], n, NO_FINISH, dtype))
            assert sums == expected, (engine.build, dtype)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        *(("int8", dtype) for dtype in DType),
        ("int4:64", DType.BFLOAT16),
        ("hadamard:int4", DType.FLOAT16),
        ("fp8_e4m3", DType.FLOAT32),
        ("mxfp8", DType.BFLOAT16),
        ("mxfp4", DType.FLOAT16),
        ("nvfp4", DType.FLOAT32),
    ],
    ids=str,
)
def test_native_streams_a_large_target_to_the_same_bytes(spec: str, dtype: DType) -> None:
    kind, n = codec(spec), (32 << 20) // dtype.itemsize + 77
    x = np.resize(np.random.default_rng(4).standard_normal(1 << 16).astype(np.float32), n)
    wire = np.empty(kind.nbytes(n), np.uint8)
    BUILDS[0].encode(kind, x.ctypes.data, n, DType.FLOAT32, wire.ctypes.data)
    memory = np.empty(n * dtype.itemsize + 64, np.uint8)
    results = []
    for misaligned in (0, 1):
        at = -memory.ctypes.data % 64 + misaligned * dtype.itemsize // 2
        target = memory[at : at + n * dtype.itemsize]
        target[:] = 0
        for engine in BUILDS[:2]:
            engine.reduce(kind, [wire.ctypes.data] * 2, n, Finish(divisor=3), target.ctypes.data, dtype)
            results.append(target[::4099].tobytes() + target[-4096:].tobytes())

    assert len(set(results)) == 1


@pytest.mark.slow
def test_native_takes_more_than_two_to_the_31_elements() -> None:
    # Zeros that take no memory, but for the last two blocks.
    kind, n = codec("int2"), 2**31 + 131
    source = mmap.mmap(-1, 2 * n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    last = np.random.default_rng(5).standard_normal(259).astype(np.float16)
    x = np.frombuffer(source, np.float16)
    x[-259:] = last
    wire = np.empty(kind.nbytes(n), np.uint8)

    BUILDS[0].encode(kind, x.ctypes.data, n, DType.FLOAT16, wire.ctypes.data)

    expected = np.frombuffer(inputs.encode(REFERENCE, kind, last, DType.FLOAT16), np.uint8)
    codes_nbytes = (128 * 2 + 8) * 2 // 8
    assert wire[-80:][:codes_nbytes].tobytes() == expected[16 : 16 + codes_nbytes].tobytes()
    assert not wire[2**20 : 2**21].any()
    del x
    source.close()


def subnormal_chunks(kind: Codec) -> tuple[np.ndarray, list[bytes]]:
    """Elements, and chunks of them, that flushing subnormals to zero would change."""
    rng = np.random.default_rng(6)
    x = np.concatenate((inputs.elements("subnormal", rng, 512, DType.FLOAT32), np.full(256, inputs.LARGEST)))
    return x.astype(np.float32), [inputs.encode(REFERENCE, kind, x.astype(np.float32), DType.FLOAT32)] * 3


def all_results(engine: NativeEngine, kind: Codec, x: np.ndarray, wires: list[bytes]) -> list[bytes]:
    """Every verb's bytes."""
    return [
        inputs.encode(engine, kind, x, DType.FLOAT32),
        inputs.decode(engine, kind, wires[0], x.size, DType.FLOAT32),
        inputs.reduce(engine, kind, wires, x.size, Finish(0.3, 5), DType.FLOAT32),
        inputs.reduce_encode(engine, kind, wires, x.size, Finish(0.3, 5), kind),
    ]


@pytest.mark.parametrize("spec", ["raw", "bf16", "int8", "int2", "int3"])
def test_native_is_immune_to_flushed_subnormals_and_leaves_the_mode_alone(spec: str) -> None:
    torch = pytest.importorskip("torch")
    kind = codec(spec)
    x, wires = subnormal_chunks(kind)
    expected = [all_results(engine, kind, x, wires) for engine in BUILDS]
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormals on this machine")
    try:
        flushed = [all_results(engine, kind, x, wires) for engine in BUILDS]
        still_flushes = not np.any(np.full(64, 1e-40, np.float32) * np.float32(1))
    finally:
        torch.set_flush_denormal(False)

    assert flushed == expected
    assert still_flushes
    assert expected[0] == all_results(REFERENCE, kind, x, wires)  # type: ignore[arg-type]


def test_native_is_immune_to_the_threads_rounding_direction() -> None:
    fesetround = getattr(ctypes.CDLL(None), "fesetround", None)
    if fesetround is None:
        pytest.skip("the C library has no fesetround")
    upward = 0x800  # FE_UPWARD of x86
    kind = codec("int8")
    rng = np.random.default_rng(7)
    x = rng.standard_normal(1000).astype(np.float32)
    wires = [inputs.encode(REFERENCE, kind, x, DType.FLOAT32)] * 3
    expected = [all_results(engine, kind, x, wires) for engine in BUILDS]
    if fesetround(upward) != 0:
        pytest.skip("this machine has another FE_UPWARD")
    try:
        rounded_up = [all_results(engine, kind, x, wires) for engine in BUILDS]
    finally:
        fesetround(0)

    assert rounded_up == expected


def test_native_computes_in_two_threads_at_once() -> None:
    kind = codec("int4")
    x = [np.random.default_rng(seed).standard_normal(100_001).astype(np.float32) for seed in range(2)]
    expected = [inputs.encode(REFERENCE, kind, part, DType.FLOAT32) for part in x]
    wrong = []

    def work(i: int) -> None:
        for _ in range(30):
            if inputs.encode(BUILDS[0], kind, x[i], DType.FLOAT32) != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_native_releases_the_gil() -> None:
    """One call lasts a good part of a second; longer ones are tried where the machine is too busy to tell."""
    assert any(ticks_during_a_call(k) > 5 for k in (2000, 4000, 8000, 16000))


def ticks_during_a_call(k: int) -> int:
    """How often another thread gets a turn while k chunks are reduced."""
    kind, n = codec("int3"), 2**18
    wire = np.zeros(kind.nbytes(n), np.uint8)
    target = np.empty(n, np.float32)
    engine = NativeEngine("portable")
    running = threading.Event()
    done = threading.Event()

    def work() -> None:
        running.set()
        engine.reduce(kind, [wire.ctypes.data] * k, n, NO_FINISH, target.ctypes.data, DType.FLOAT32)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    ticks = 0
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    return ticks


def test_native_takes_a_codec_that_was_pickled() -> None:
    kind = pickle.loads(pickle.dumps(codec("int8")))
    x = np.arange(300, dtype=np.float32)

    assert inputs.encode(BUILDS[0], kind, x, DType.FLOAT32) == inputs.encode(REFERENCE, codec("int8"), x, DType.FLOAT32)


def test_native_refuses_a_build_it_does_not_have() -> None:
    with pytest.raises(EngineError, match=r"no build 'avx9000' here; it has .*portable"):
        NativeEngine("avx9000")


def test_native_refuses_to_round_by_chance_without_random_bits() -> None:
    kind = codec("int8:stochastic")

    with pytest.raises(CodecError, match="got none; pass draw=Draw"):
        BUILDS[0].encode(kind, 0, 0, DType.FLOAT32, 0)
    with pytest.raises(CodecError, match="got none; pass draw=Draw"):
        BUILDS[0].reduce_encode(codec("raw"), [0], 0, NO_FINISH, kind, 0)


def test_native_refuses_a_codec_it_does_not_know() -> None:
    class Other:
        def __str__(self) -> str:
            return "other"

    with pytest.raises(EngineError, match="cannot compute codec other; use the reference engine"):
        BUILDS[0].encode(Other(), 0, 0, DType.FLOAT32, 0)  # type: ignore[arg-type]
