"""The cuda engine gives the reference's bytes: its own kernels and launches, run on the CPU (cuda_on_cpu.py)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import cuda_checks
import inputs
import numpy as np
import pytest
from cuda_checks import ALIGNED, BLOCKS, CODECS, MISALIGNED, REFERENCE
from cuda_on_cpu import COMPILER, KERNELS, OFFSETS, RANDOM, REVERSE, SANITIZERS, CpuLauncher, Schedule, Sparse, build
from hypothesis import given, settings
from hypothesis import strategies as st

from zcomm.buffers import DType
from zcomm.engines import cuda
from zcomm.engines.cuda import CudaEngine
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.errors import EngineError
from zcomm.wire.codec import Codec
from zcomm.wire.int_block import BITS, IntBlock
from zcomm.wire.registry import codec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
NAMES = list(inputs.CLASSES)
OUT = [codec(spec) for spec in ("int8", "int4", "int4:64", "int6:24", "int3:8192", "bf16", "fp16", "raw")]
UNLIMITED = 2**31 - 1


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


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
            for codec_out in (kind, OUT[rng.integers(len(OUT))]):
                cuda_checks.check_sum(engine, kind, codec_out, names, n, rng, offset)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.spelling)
def test_cuda_encodes_and_decodes_every_class_in_every_dtype(dtype: DType, engine: CudaEngine) -> None:
    rng = np.random.default_rng(dtype)
    for kind in (codec("int8"), codec("int4"), codec("int3:64"), codec("fp16"), codec("bf16"), codec("raw")):
        for name in NAMES:
            x = inputs.elements(name, rng, 1101, dtype)
            wire = inputs.encode(REFERENCE, kind, x, dtype)
            y = inputs.decode(REFERENCE, kind, wire, x.size, dtype)

            assert inputs.encode(engine, kind, x, dtype) == wire, (str(kind), name)
            assert inputs.decode(engine, kind, wire, x.size, dtype) == y, (str(kind), name)


def test_cuda_rounds_next_to_ties_like_the_reference(engine: CudaEngine) -> None:
    cuda_checks.check_near_ties(engine, [IntBlock(bits, block) for bits in BITS for block in (8, 64, 128, 256)])


@pytest.mark.parametrize("spec", ["int8", "int4", "int5:64"])
def test_cuda_decodes_any_bytes_like_the_reference(spec: str, engine: CudaEngine) -> None:
    # Bytes that no encoder writes: codes of -2^(b-1), scales of every bit pattern.
    kind, n = codec(spec), 1 << 15
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
    kind, codec_out = data.draw(st.sampled_from(CODECS)), data.draw(st.sampled_from(OUT))
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


@pytest.mark.parametrize("spec", ["int8", "int4", "int3:40", "bf16", "raw"])
@pytest.mark.parametrize("offset", [0, 4])
def test_pieces_are_encoded_where_they_lie_and_decoded_where_they_belong(
    spec: str, offset: int, engine: CudaEngine
) -> None:
    rng = np.random.default_rng(4)
    for dtype in DType:
        cuda_checks.check_pieces(engine, codec(spec), [512, 1, 256, 128, 77, 2048], dtype, rng, offset)
        cuda_checks.check_pieces(engine, codec(spec), rng.integers(1, 50, 70).tolist(), dtype, rng, offset)


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
    kinds = [codec(spec) for spec in (*cuda_checks.CARRIED, "int8", "int4", "int5:40")]
    for kind in kinds:
        for dtype in DType:
            x = inputs.elements("normal", rng, 600, dtype)
            wire = inputs.encode(REFERENCE, kind, x, dtype)
            for offset in (0, 2):
                assert inputs.encode(engine, kind, x, dtype, offset) == wire
                expected = inputs.decode(REFERENCE, kind, wire, 600, dtype)
                assert inputs.decode(engine, kind, wire, 600, dtype, offset) == expected
                total = cuda_checks.summed(engine, kind, [wire] * 2, 600, NO_FINISH, dtype, offset)
                assert total == inputs.reduce(REFERENCE, kind, [wire] * 2, 600, NO_FINISH, dtype)
        for codec_out in kinds:
            cuda_checks.check_sum(engine, kind, codec_out, ("normal", "ties"), 600, rng, 0)

    assert set(launcher.launched) == set(KERNELS) - set(OFFSETS)


# ---- counts that no test machine computes


COUNTS = [2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40, 2**40 + 9]


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("spec", ["int8", "int4", "int3", "int7:8", "int2:65536"])
def test_kernels_find_the_parts_of_a_chunk_of_any_count(n: int, spec: str, library: Path) -> None:
    kind = codec(spec)
    assert isinstance(kind, IntBlock)
    launcher, out = CpuLauncher(library), np.zeros(5, np.int64)
    n_blocks = -(-n // kind.block)
    structs = [
        name for name in OFFSETS if name in ("offsets<IntBlock<0, 0>>", f"offsets<IntBlock<{kind.bits}, {kind.block}>>")
    ]
    for name in structs:
        for b in (0, n_blocks - 1):
            job = cuda._job((), out.ctypes.data, codec_in=kind)
            job.k, job.pieces[0] = b, cuda._Piece(n_elems=n)
            launcher.launch(name, 1, 1, np.frombuffer(bytes(job), cuda._JOB_DTYPE))

            codes_offset = -(-2 * n_blocks // 16) * 16
            present = min(kind.block, n - b * kind.block)
            codes_at = codes_offset + b * kind.block * kind.bits // 8
            assert out.tolist() == [n_blocks, 2 * b, codes_at, present, kind.nbytes(n)]


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("spec", ["int8", "int4", "int8:8", "int4:65536", "bf16", "raw"])
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

        block = getattr(codec(spec), "block", 8)
        assert sum(job.n_tasks for _, job in launched) == -(-n // block)
        for n_ctas, job in launched:
            assert 0 < n_ctas <= UNLIMITED
            assert n_ctas == UNLIMITED or n_ctas * cuda.N_THREADS >= job.n_tasks * job.team


@pytest.mark.parametrize("n", [2**31 + 131, 2**32 + 256 * 8 + 3, 2**40 + 77])
@pytest.mark.parametrize("spec", ["int8", "int4", "int3", "bf16", "raw"])
def test_the_last_elements_of_a_giant_chunk_are_computed_right(n: int, spec: str, library: Path) -> None:
    # Only the last CTAs of each launch run: they have the last whole block and the partial one.
    kind, dtype = codec(spec), DType.FLOAT16
    launcher = CpuLauncher(library, max_ctas=UNLIMITED, schedule=Schedule(n_last_ctas=2))
    n_last = max(kind.block, 8) + n % max(kind.block, 8)
    last = inputs.elements("normal", np.random.default_rng(7), n_last, dtype)
    small = np.frombuffer(inputs.encode(REFERENCE, kind, last, dtype), np.uint8)
    try:
        source, wire, target = Sparse(2 * n), Sparse(kind.nbytes(n)), Sparse(2 * n)
    except OSError as error:
        pytest.skip(f"this machine has not as many addresses: {error}")
    source.bytes[-2 * n_last :] = last.view(np.uint8)

    CudaEngine(launcher).encode(kind, source.address, n, dtype, wire.address)
    CudaEngine(launcher).reduce(kind, [wire.address] * 2, n, Finish(divisor=2), target.address, dtype)

    codes = codes_of(kind, n)
    assert wire.bytes[codes][-codes_nbytes(kind, n_last) :].tobytes() == small[codes_of(kind, n_last)].tobytes()
    decoded = inputs.decode(REFERENCE, kind, small.tobytes(), n_last, dtype)
    assert inputs.without_payloads(target.bytes[-2 * n_last :].tobytes(), dtype) == decoded


def codes_nbytes(kind: Codec, n: int) -> int:
    """Bytes of the codes of the first n elements, by docs/wire-format.md."""
    return -(-n // 8) * kind.bits if isinstance(kind, IntBlock) else n * kind.dtype.itemsize  # type: ignore[attr-defined]


def codes_of(kind: Codec, n: int) -> slice:
    """Where the codes of a chunk are, by docs/wire-format.md."""
    start = -(-2 * -(-n // kind.block) // 16) * 16 if isinstance(kind, IntBlock) else 0
    return slice(start, start + codes_nbytes(kind, n))


# ---- faults


@pytest.mark.slow
def test_no_byte_outside_the_buffers_is_touched(tmp_path: Path) -> None:
    sanitizer = subprocess.run([str(COMPILER), "-print-file-name=libasan.so"], capture_output=True, text=True)
    if not os.path.isabs(sanitizer.stdout.strip()):
        pytest.skip("the compiler has no sanitizer libraries")
    library = build(tmp_path, flags=SANITIZERS)
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
    assert engine.supports(codec("int8"))
    with pytest.raises(EngineError, match="the cuda engine cannot compute codec other"):
        engine.encode(Other(), 0, 1, DType.FLOAT32, 0)  # type: ignore[arg-type]


def test_a_job_is_small_enough_for_a_kernels_arguments() -> None:
    assert ctypes.sizeof(cuda._Job) <= 4096  # what every driver takes by value
    assert cuda.INLINE_SOURCES == 128
    assert BLOCKS[-1] >= cuda.WIDE_BLOCK  # a whole CTA shares a block somewhere above
