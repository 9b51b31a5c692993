"""The cuda engine gives the reference's bytes: its own kernels and launches, run on the CPU (cuda_on_cpu.py)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import cuda_checks
import cuda_on_cpu
import inputs
import numpy as np
import pytest
from cuda_checks import ALIGNED, BLOCKS, CODECS, MISALIGNED, REFERENCE
from cuda_on_cpu import (
    CARRIED,
    COMPILER,
    OFFSETS,
    RANDOM,
    REVERSE,
    SANITIZERS,
    SPECS,
    CpuLauncher,
    Schedule,
    Sparse,
    outs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import check_pieces

from zcomm.buffers import DType
from zcomm.engines import cuda, cuda_kernels
from zcomm.engines.cuda import CudaEngine
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.engines.select import engine_for
from zcomm.errors import CodecError, EngineError
from zcomm.wire.block_loops import BlockQuantizer
from zcomm.wire.codec import Codec, padded
from zcomm.wire.draw import Draw
from zcomm.wire.hadamard import Hadamard
from zcomm.wire.int_block import BITS, IntBlock
from zcomm.wire.nvfp4 import NvFp4
from zcomm.wire.registry import NAMES as CODEC_NAMES
from zcomm.wire.registry import codec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
NAMES = list(inputs.CLASSES)
UNLIMITED = 2**31 - 1


@pytest.fixture
def engine(library: Path) -> CudaEngine:
    return CudaEngine(CpuLauncher(library))


@pytest.mark.parametrize("kind", CODECS, ids=str)
def test_cuda_gives_the_references_bytes(kind: Codec, engine: CudaEngine) -> None:
    rng = np.random.default_rng([kind.nbytes(1000), len(str(kind))])
    for n in cuda_checks.counts(kind, rng):
        for offset in (ALIGNED[rng.integers(len(ALIGNED))], MISALIGNED[rng.integers(len(MISALIGNED))]):
            cuda_checks.check_round_trip(engine, kind, str(rng.choice(NAMES)), n, rng, offset)
            names = ["normal", "wide exponents", str(rng.choice(NAMES))][: rng.integers(1, 4)]
            for codec_out in (kind, rng.choice(np.array(outs(kind), object))):
                cuda_checks.check_sum(engine, kind, codec_out, names, n, rng, offset)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.spelling)
def test_cuda_encodes_and_decodes_every_class_in_every_dtype(dtype: DType, engine: CudaEngine) -> None:
    rng = np.random.default_rng(dtype)
    for kind in map(codec, SPECS):
        for name in NAMES:
            x = inputs.elements(name, rng, 1101 if kind.block == 1024 else 333, dtype)
            wire = inputs.encode(REFERENCE, kind, x, dtype)
            y = inputs.decode(REFERENCE, kind, wire, x.size, dtype)

            assert inputs.encode(engine, kind, x, dtype) == wire, (str(kind), name)
            assert inputs.decode(engine, kind, wire, x.size, dtype) == y, (str(kind), name)


def test_cuda_rounds_next_to_ties_like_the_reference(engine: CudaEngine) -> None:
    specs = (
        "int8",
        "int4",
        "int3",
        "int4:8",
        "int6:16",
        "int8:asym",
        "fp8_e4m3",
        "fp8_e5m2",
        "mxfp8",
        "mxfp4",
        "nvfp4",
    )
    kinds = [IntBlock(bits, 40) for bits in BITS] + [codec(spec) for spec in specs]
    cuda_checks.check_near_ties(engine, kinds)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in CARRIED])
def test_cuda_decodes_any_bytes_like_the_reference(spec: str, engine: CudaEngine) -> None:
    # Bytes that no encoder writes: codes of -2^(b-1) or NaN, scales of every bit pattern.
    kind, n = codec(spec), 1 << 13
    wire = np.random.default_rng(3).integers(0, 256, kind.nbytes(n), dtype=np.uint8).tobytes()
    for dtype in DType:
        assert inputs.decode(engine, kind, wire, n, dtype) == inputs.decode(REFERENCE, kind, wire, n, dtype), dtype


def test_cuda_converts_every_bit_pattern_of_16_bit_elements_like_the_reference(engine: CudaEngine) -> None:
    for dtype in (DType.BFLOAT16, DType.FLOAT16):
        kind = codec(f"raw:{dtype.spelling}")
        wire = np.arange(2**16, dtype=np.uint16).tobytes()
        for out in DType:
            expected = inputs.decode(REFERENCE, kind, wire, 2**16, out)
            assert inputs.decode(engine, kind, wire, 2**16, out) == expected, (dtype, out)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_cuda_and_reference_agree_on_anything(data: st.DataObject, library: Path) -> None:
    kind = data.draw(st.sampled_from(CODECS))
    codec_out = data.draw(st.sampled_from(outs(kind)))
    n, k, offset = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 31))
    schedule = Schedule(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 99)), data.draw(st.integers(0, 255)))
    engine = CudaEngine(CpuLauncher(library, max_ctas=data.draw(st.integers(1, 3)), schedule=schedule))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=k, max_size=k))

    cuda_checks.check_round_trip(engine, kind, names[0], n, rng, offset)
    cuda_checks.check_sum(engine, kind, codec_out, names, n, rng, offset)


@pytest.mark.parametrize("max_ctas", [1, UNLIMITED])
@pytest.mark.parametrize("schedule", [Schedule(REVERSE, poison=0xFF), *(Schedule(RANDOM, seed) for seed in range(3))])
def test_no_order_of_threads_changes_a_byte(max_ctas: int, schedule: Schedule, library: Path) -> None:
    cuda_checks.check_briefly(CudaEngine(CpuLauncher(library, max_ctas=max_ctas, schedule=schedule)))


PIECED = [
    "int8",
    "int4",
    "int5:40",
    "bf16",
    "raw",
    "int8:stochastic",
    "int4:shift",
    "mxfp4",
    "nvfp4",
    "hadamard:int4:8",
]


@pytest.mark.parametrize("spec", PIECED)
@pytest.mark.parametrize("offset", [0, 4])
def test_pieces_are_encoded_where_they_lie_and_decoded_where_they_belong(
    spec: str, offset: int, engine: CudaEngine
) -> None:
    rng = np.random.default_rng(4)
    for dtype in DType:
        check_pieces(engine, codec(spec), [512, 1, 256, 128, 77, 1024], dtype, rng, offset)
        check_pieces(engine, codec(spec), rng.integers(1, 50, 70).tolist(), dtype, rng, offset)


def test_pieces_of_whole_blocks_need_one_launch(library: Path) -> None:
    launcher = CpuLauncher(library)
    x, wire = np.ones(4096, np.float32), inputs.Room(2 * codec("int8").nbytes(1024))

    at = inputs.Room(x.nbytes, content=x.tobytes()).address
    pieces = [(2048, 1024, 0), (0, 1024, codec("int8").nbytes(1024)), (0, 0, 5)]
    CudaEngine(launcher).encode_pieces(codec("int8"), at, DType.FLOAT32, wire.address, pieces)

    assert launcher.launched == ["encode<IntBlock<8, 256>, Elements<Float32>>"]


def test_more_chunks_than_a_launch_carries_are_added_in_their_order(engine: CudaEngine) -> None:
    rng, kind, n = np.random.default_rng(5), codec("int8"), 700
    wires = [cuda_checks.encoded(kind, "wide exponents", n, rng) for _ in range(3)]
    many = [wires[i] for i in rng.integers(0, 3, 2 * cuda.INLINE_SOURCES + 1)]
    for count in (cuda.INLINE_SOURCES, cuda.INLINE_SOURCES + 1, len(many)):
        expected = inputs.reduce(REFERENCE, kind, many[:count], n, NO_FINISH, DType.FLOAT32)

        assert cuda_checks.summed(engine, kind, many[:count], n, NO_FINISH, DType.FLOAT32, 0) == expected


def test_no_elements_launch_nothing(library: Path) -> None:
    launcher = CpuLauncher(library)
    engine = CudaEngine(launcher)

    engine.encode(codec("int8"), 0, 0, DType.FLOAT32, 0)
    engine.decode(codec("raw"), 0, 0, 0, DType.FLOAT32)
    engine.reduce(codec("int4"), [0, 0], 0, NO_FINISH, 0, DType.FLOAT32)
    engine.reduce_encode(codec("bf16"), [0, 0], 0, NO_FINISH, codec("int8"), 0)

    assert launcher.launched == []


def test_every_kernel_was_compared(library: Path) -> None:
    launcher = CpuLauncher(library)
    engine, rng = CudaEngine(launcher), np.random.default_rng(6)
    for kind in cuda_on_cpu.CODECS:
        n = 2 * max(kind.block, 32) + 45 if kind.block < 512 else kind.block + 45
        for dtype in DType:
            x = inputs.elements("normal", rng, n, dtype)
            wire = inputs.encode(REFERENCE, kind, x, dtype)
            for offset in (0, 2):
                assert inputs.encode(engine, kind, x, dtype, offset) == wire, (str(kind), dtype, offset)
                expected = inputs.decode(REFERENCE, kind, wire, n, dtype)
                assert inputs.decode(engine, kind, wire, n, dtype, offset) == expected, (str(kind), dtype, offset)
        for codec_out in outs(kind):
            cuda_checks.check_sum(engine, kind, codec_out, ("normal", "ties"), n, rng, 0)

    assert set(launcher.launched) == set(cuda_on_cpu.KERNELS)


@pytest.mark.parametrize("first", [0, 1, 7, 8, 252, 2**32 - 3, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("spec", ["int8:stochastic", "int7:64:stochastic", "int5:64:shift", "hadamard:int4:stochastic"])
def test_chance_follows_seed_call_and_the_elements_place(spec: str, first: int, engine: CudaEngine) -> None:
    kind, dtypes = codec(spec), (DType.FLOAT32, DType.BFLOAT16)
    for dtype in dtypes:
        x = inputs.elements("normal", np.random.default_rng(9), 555, dtype)
        wires = set()
        for draw in (Draw(1, 2, first), Draw(2**64 - 2, 2, first), Draw(1, 2**40, first)):
            wires.add(inputs.encode(engine, kind, x, dtype, 0, draw))
            assert inputs.encode(engine, kind, x, dtype, 0, draw) == inputs.encode(REFERENCE, kind, x, dtype, 0, draw)
            sums = [inputs.encode(REFERENCE, kind, x, dtype)] * 2
            again = inputs.reduce_encode(engine, kind, sums, x.size, Finish(divisor=2), kind, 0, draw)
            assert again == inputs.reduce_encode(REFERENCE, kind, sums, x.size, Finish(divisor=2), kind, 0, draw)
        assert len(wires) == 3


@pytest.mark.parametrize("spec", ["int8:stochastic", "hadamard:int4:stochastic"])
def test_without_random_bits_rounding_by_chance_is_refused(spec: str, library: Path) -> None:
    launcher = CpuLauncher(library)

    with pytest.raises(CodecError, match=f"{spec} rounds by random bits and got none"):
        CudaEngine(launcher).encode(codec(spec), 0, 1, DType.FLOAT32, 0)
    with pytest.raises(CodecError, match=r"from 0 to 2\^64 - 1, got Draw"):
        CudaEngine(launcher).reduce_encode(codec("raw"), [0], 1, NO_FINISH, codec(spec), 0, Draw(-1, 0, 0))
    assert launcher.launched == []


# ---- counts that no test machine computes


COUNTS = [2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40, 2**40 + 9]


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("spec", ["int8", "int4", "int3", "int7:8", "int2:65536", "nvfp4", "hadamard:int4:96"])
def test_kernels_find_the_parts_of_a_chunk_of_any_count(n: int, spec: str, library: Path) -> None:
    kind, layout = codec(spec), Layout.of(codec(spec), n)
    launcher, out = CpuLauncher(library), np.zeros(7, np.int64)
    struct = cuda_kernels._struct(kind)
    for name in {f"offsets<{struct.general}>", f"offsets<{struct.fast}>"} & set(OFFSETS):
        for b in (0, layout.n_blocks - 1):
            job = cuda._job((), out.ctypes.data, codec_in=kind)
            job.k, job.pieces[0] = b, cuda._Piece(n_elems=n)
            launcher.launch(name, 1, 1, np.frombuffer(bytes(job), cuda._JOB_DTYPE))

            scale_at = layout.scales + layout.scale_nbytes * b
            codes_at = layout.codes + b * layout.block * layout.bits // 8
            present = min(layout.block, layout.n - b * layout.block)
            unit = b * layout.block // layout.unit
            expected = [layout.n_blocks, scale_at, codes_at, present, kind.nbytes(n), -(-layout.n // layout.unit)]
            assert out.tolist() == [*expected, 4 * unit if layout.scales else 0], name


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("spec", ["int8", "int4", "int8:8", "int4:65536", "bf16", "raw", "nvfp4", "hadamard:int4:8"])
def test_launches_of_any_count_cover_every_block_within_the_grids_limits(n: int, spec: str) -> None:
    launched: list[tuple[int, cuda._Job]] = []

    class Recorder:
        max_ctas = UNLIMITED

        def launch(self, kernel: str, n_ctas: int, n_threads: int, job: np.ndarray) -> None:
            launched.append((n_ctas, cuda._Job.from_buffer_copy(job.tobytes())))

        def table(self, addresses: list[int]) -> tuple[int, None]:
            return 0, None

    for address in (0, 1):
        launched.clear()
        CudaEngine(Recorder()).encode(codec(spec), address, n, DType.BFLOAT16, address)

        unit = max(codec(spec).block, 8)
        assert sum(job.n_tasks for _, job in launched) == -(-n // unit)
        for n_ctas, job in launched:
            assert 0 < n_ctas <= UNLIMITED
            assert n_ctas == UNLIMITED or n_ctas * cuda_kernels.N_THREADS >= job.n_tasks * job.team
            assert job.team in (1, 2, 4, 8, 16, 32, 256)
            assert job.team % job.block_team == 0


@pytest.mark.parametrize("n", [2**31 + 131, 2**32 + 256 * 8 + 3, 2**40 + 77])
@pytest.mark.parametrize(
    "spec", ["int8", "int4", "int3", "bf16", "raw", "int8:stochastic", "fp8_e4m3", "mxfp4", "nvfp4", "hadamard:int4"]
)
def test_the_last_elements_of_a_giant_chunk_are_computed_right(n: int, spec: str, library: Path) -> None:
    # Only the last CTAs of each launch run: they have the last whole unit and the partial one.
    kind, dtype = codec(spec), DType.FLOAT16
    launcher = CpuLauncher(library, max_ctas=UNLIMITED, schedule=Schedule(n_last_ctas=2))
    n_last = max(kind.block, 8) + n % max(kind.block, 8)
    last = inputs.elements("normal", np.random.default_rng(7), n_last, dtype)
    draw = Draw(1, 2, 0)
    small = inputs.encode(REFERENCE, kind, last, dtype, 0, draw._replace(first=n - n_last))
    try:
        source, wire, target = Sparse(2 * n), Sparse(kind.nbytes(n)), Sparse(2 * n)
    except OSError as error:
        pytest.skip(f"this machine has not as many addresses: {error}")
    source.bytes[-2 * n_last :] = last.view(np.uint8)

    CudaEngine(launcher).encode(kind, source.address, n, dtype, wire.address, draw)
    CudaEngine(launcher).reduce(kind, [wire.address] * 2, n, Finish(divisor=2), target.address, dtype)

    whole, part = Layout.of(kind, n), Layout.of(kind, n_last)
    codes_nbytes = part.end - part.codes
    assert wire.bytes[whole.end - codes_nbytes : whole.end].tobytes() == small[part.codes : part.end]
    decoded = inputs.decode(REFERENCE, kind, small, n_last, dtype)
    assert inputs.without_payloads(target.bytes[-2 * n_last :].tobytes(), dtype) == decoded


class Layout(NamedTuple):
    """Where the parts of a chunk are, by docs/wire-format.md."""

    n: int  # elements that have codes
    n_blocks: int
    block: int
    unit: int
    bits: int
    scale_nbytes: int
    scales: int  # where they begin
    codes: int
    end: int  # of the codes

    @classmethod
    def of(cls, kind: Codec, n: int) -> Layout:
        if isinstance(kind, Hadamard):
            return cls.of(kind.inner, -(-n // 32) * 32)
        if kind.dtype is not None:
            return cls(n, 0, 8, 8, 8 * kind.dtype.itemsize, 0, 0, 0, n * kind.dtype.itemsize)
        if isinstance(kind, NvFp4):
            scales, block, bits, scale_nbytes = padded(4 * -(-n // 1024)), 16, 4, 1
        else:
            assert isinstance(kind, BlockQuantizer)
            scales, block, bits, scale_nbytes = 0, kind.block, kind.bits, kind.scale_nbytes
        n_blocks = -(-n // block)
        codes = scales + padded(scale_nbytes * n_blocks)
        return cls(n, n_blocks, block, kind.block, bits, scale_nbytes, scales, codes, codes + -(-n // 8) * bits)


# ---- faults


@pytest.mark.slow
def test_no_byte_outside_the_buffers_is_touched(tmp_path: Path) -> None:
    sanitizer = subprocess.run([str(COMPILER), "-print-file-name=libasan.so"], capture_output=True, text=True)
    if not os.path.isabs(sanitizer.stdout.strip()):
        pytest.skip("the compiler has no sanitizer libraries")
    library = cuda_on_cpu.build(tmp_path, cuda_checks.BRIEF_KERNELS, SANITIZERS)
    environment = os.environ | {
        "LD_PRELOAD": sanitizer.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }

    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cuda_sanitized.py")), str(library)],
        capture_output=True,
        text=True,
        env=environment,
    )

    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout == "clean\n"


def test_cuda_refuses_a_codec_it_does_not_know(engine: CudaEngine) -> None:
    class Other:
        def __str__(self) -> str:
            return "other"

    assert not engine.supports(Other())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="the cuda engine cannot compute codec other"):
        engine.encode(Other(), 0, 1, DType.FLOAT32, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in CODEC_NAMES if engine_for("cpu", codec(name)).name == "native"])
def test_cuda_computes_every_codec_that_the_native_engine_does(name: str, engine: CudaEngine) -> None:
    kind = codec(name)

    assert engine.supports(kind)
    assert kind.block == 1 or engine.supports(codec(f"hadamard:{name}"))


def test_a_job_is_small_enough_for_a_kernels_arguments() -> None:
    assert ctypes.sizeof(cuda._Job) <= 4096  # what every driver takes by value
    assert cuda.INLINE_SOURCES == 128
    assert BLOCKS[-1] >= cuda_kernels.WIDE_BLOCK  # a whole CTA shares a block somewhere above
