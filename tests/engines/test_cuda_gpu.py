"""The cuda engine on a GPU: the reference's bytes, torch's memory and streams, and more elements than 31 bits count."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import cuda_checks
import inputs
import numpy as np
import pytest
from cuda_checks import ALIGNED, BITS, CODECS, MISALIGNED, REFERENCE
from cuda_on_cpu import KERNELS, SPECS, outs
from cuda_on_gpu import HostedEngine

from zcomm.buffers import DType
from zcomm.engines import cuda, cuda_compile, select
from zcomm.engines.cuda import CudaEngine
from zcomm.engines.cuda_device import CudaDevice
from zcomm.engines.engine import NO_FINISH, Finish
from zcomm.wire.codec import Codec
from zcomm.wire.int_block import IntBlock
from zcomm.wire.registry import codec

pytestmark = pytest.mark.gpu
NAMES = list(inputs.CLASSES)


@pytest.fixture(scope="module")
def engine() -> HostedEngine:
    device = CudaDevice(0)
    target = cuda_compile.target_for(device.arch)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # into the cache: the compiler lets go of the GIL
        list(threads.map(lambda kernel: cuda_compile.load_or_compile((kernel,), target), KERNELS))
    return HostedEngine(device)


@pytest.mark.parametrize("kind", CODECS, ids=str)
def test_a_gpu_gives_the_references_bytes(kind: Codec, engine: HostedEngine) -> None:
    rng = np.random.default_rng([kind.nbytes(1000), len(str(kind))])
    for n in [*cuda_checks.counts(kind, rng), 300_007]:
        for offset in (ALIGNED[rng.integers(len(ALIGNED))], MISALIGNED[rng.integers(len(MISALIGNED))]):
            cuda_checks.check_round_trip(engine, kind, str(rng.choice(NAMES)), n, rng, offset)
            names = ["normal", "wide exponents", str(rng.choice(NAMES))][: rng.integers(1, 4)]
            for codec_out in (kind, rng.choice(np.array(outs(kind), object))):
                cuda_checks.check_sum(engine, kind, codec_out, names, n, rng, offset)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.spelling)
def test_a_gpu_encodes_and_decodes_every_class_in_every_dtype(dtype: DType, engine: HostedEngine) -> None:
    rng = np.random.default_rng(dtype)
    for spec in SPECS:
        kind = codec(spec)
        for name in NAMES:
            x = inputs.elements(name, rng, 9_001, dtype)
            wire = inputs.encode(REFERENCE, kind, x, dtype)
            assert inputs.encode(engine, kind, x, dtype) == wire, (spec, name)
            y = inputs.decode(REFERENCE, kind, wire, x.size, dtype)
            assert inputs.decode(engine, kind, wire, x.size, dtype) == y, (spec, name)


def test_a_gpu_rounds_next_to_ties_like_the_reference(engine: HostedEngine) -> None:
    cuda_checks.check_near_ties(engine, [IntBlock(bits, block) for bits in BITS for block in (40, 256)])
    cuda_checks.check_briefly(engine)
    cuda_checks.check_few(engine)
    cuda_checks.check_more(engine)


def test_a_gpu_adds_more_chunks_than_a_launch_carries(engine: HostedEngine) -> None:
    rng, kind, n = np.random.default_rng(5), codec("int8"), 5000
    wires = [cuda_checks.encoded(kind, "wide exponents", n, rng) for _ in range(3)]
    many = [wires[i] for i in rng.integers(0, 3, 2 * cuda.INLINE_SOURCES + 1)]
    expected = inputs.reduce(REFERENCE, kind, many, n, NO_FINISH, DType.FLOAT32)

    assert cuda_checks.summed(engine, kind, many, n, NO_FINISH, DType.FLOAT32, 0) == expected


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.spelling)
def test_a_torch_tensor_is_used_where_it_lies(dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    engine, kind = select.engine_for("cuda:0"), codec("int8")
    x = torch.randn(100_003, device="cuda").to(getattr(torch, dtype.spelling))
    wire = torch.zeros(kind.nbytes(x.numel()), dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()

    engine.encode(kind, x.data_ptr(), x.numel(), dtype, wire.data_ptr())
    y = torch.empty_like(x)
    engine.decode(kind, wire.data_ptr(), x.numel(), y.data_ptr(), dtype)

    host = x.cpu().view(torch.uint8).numpy().view(dtype.numpy)
    expected = inputs.encode(REFERENCE, kind, host, dtype)
    assert wire.cpu().numpy().tobytes() == expected
    decoded = inputs.decode(REFERENCE, kind, expected, x.numel(), dtype)
    assert y.cpu().view(torch.uint8).numpy().tobytes() == decoded
    assert torch.cuda.memory_allocated() - before <= y.untyped_storage().nbytes() + 1024  # y, and nothing else


def test_work_is_queued_on_torchs_current_stream() -> None:
    torch = pytest.importorskip("torch")
    engine, kind, n = select.engine_for("cuda:0"), codec("int8"), 1 << 20
    x, wire = torch.zeros(n, device="cuda"), torch.zeros(kind.nbytes(n), dtype=torch.uint8, device="cuda")
    engine.encode(kind, x.data_ptr(), n, DType.FLOAT32, wire.data_ptr())  # compiled and loaded
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(), torch.cuda.Event()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.fill_(3.0)
        engine.encode(kind, x.data_ptr(), n, DType.FLOAT32, wire.data_ptr())
        done.record()

    assert not done.query()  # neither waited for, nor on another stream before the fill
    done.synchronize()
    expected = inputs.encode(REFERENCE, kind, np.full(n, 3.0, np.float32), DType.FLOAT32)
    assert wire.cpu().numpy().tobytes() == expected


@pytest.mark.parametrize("spec", ["int8", "int4", "bf16", "nvfp4", "hadamard:int4"])
def test_a_gpu_takes_more_than_two_to_the_31_elements(spec: str) -> None:
    import cupy

    kind, n, dtype = codec(spec), 2**31 + 3, DType.FLOAT16
    needed = 4 * n + 2 * kind.nbytes(n)
    if cupy.cuda.runtime.memGetInfo()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    engine = CudaEngine(CudaDevice(0))
    pattern = np.random.default_rng(8).standard_normal(1 << 20).astype(np.float16)
    x = cupy.empty(n, np.float16)
    for start in range(0, n, pattern.size):
        x[start : start + pattern.size] = cupy.asarray(pattern[: min(pattern.size, n - start)])
    wire = cupy.empty(kind.nbytes(n), np.uint8)

    engine.encode(kind, x.data.ptr, n, dtype, wire.data.ptr)
    y = cupy.empty(n, np.float16)
    engine.reduce(kind, [wire.data.ptr] * 2, n, Finish(divisor=2), y.data.ptr, dtype)

    expected = inputs.decode(REFERENCE, kind, inputs.encode(REFERENCE, kind, pattern, dtype), pattern.size, dtype)
    whole = cupy.asarray(np.frombuffer(expected, np.float16))
    for start in range(0, n - pattern.size, pattern.size):
        assert bool((y[start : start + pattern.size] == whole).all()), start
    last = inputs.encode(REFERENCE, kind, pattern[:3], dtype)
    assert cupy.asnumpy(y[-3:]).tobytes() == inputs.decode(REFERENCE, kind, last, 3, dtype)
