"""Every CUDA kernel compiles for every architecture by the path that a GPU takes, and keeps its roundings apart."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_on_cpu import SPECS

from zcomm.buffers import DType
from zcomm.engines import cuda_compile, cuda_device, select
from zcomm.engines.cuda_compile import Target
from zcomm.engines.cuda_kernels import every_kernel
from zcomm.errors import EngineError, MissingExtra
from zcomm.wire.registry import codec

pytest.importorskip("cupy", reason="no cupy: pip install 'zcomm-collectives[cuda]'")

ONE = ("copy",)
# Multiplication and addition in one rounding; subnormals flushed; division by an approximate reciprocal; operations
# that the assembler may still fuse, as those marked .rn it may not.
ROUNDED_OTHERWISE = re.compile(
    r"\bfma\.|\.ftz\b|\.approx\b|\.full\.|\b(?:add|sub|mul|mad|div|cvt\.f32\.f64)\.f(?:32|64)\b"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda_compile._warn_once.cache_clear()
    yield tmp_path / "zcomm" / "cuda"
    cuda_compile._warn_once.cache_clear()


@pytest.mark.slow
def test_kernels_compile_for_every_architecture_and_keep_their_roundings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of bfloat16 for each architecture; of other dtypes, which differ in how one element is read, each for one of them.
    codecs = [codec(spec) for spec in SPECS]
    usual = every_kernel(codecs, (), [DType.BFLOAT16])
    others = [kernel for kernel in every_kernel(codecs) if kernel not in usual]
    shares = {Target(arch, is_ptx=False): usual + others[i::4] for i, arch in enumerate((80, 90, 100, 120))}
    nvrtc, ptx = cuda_compile._nvrtc(), []
    get_cubin = nvrtc.getCUBIN
    monkeypatch.setattr(nvrtc, "getCUBIN", lambda program: (ptx.append(nvrtc.getPTX(program)), get_cubin(program))[1])

    with ThreadPoolExecutor(2) as threads:  # the compiler lets go of the GIL
        images = list(threads.map(lambda target: cuda_compile.compile_kernels(shares[target], target), shares))

    for (target, kernels), image in zip(shares.items(), images, strict=True):
        assert image.binary.startswith(b"\x7fELF"), target
        assert [name for name in kernels if image.symbols[name].encode() not in image.binary] == [], target
    text = "\n".join(of if isinstance(of, str) else of.decode() for of in ptx)
    assert len(re.findall(r"\.entry ", text)) == sum(map(len, shares.values()))
    assert "mul.rn.f32" in text
    assert "div.rn.f32" in text
    assert ROUNDED_OTHERWISE.findall(text) == []


@pytest.mark.parametrize("expression", ["__fmaf_rn(x[0], x[1], x[2])", "__fdividef(x[0], x[1])", "__expf(x[0])"])
def test_the_scan_finds_what_it_looks_for(expression: str) -> None:
    files = {cuda_compile.PROGRAM: f"__global__ void k(float *x) {{ x[0] = {expression}; }}"}

    ptx = cuda_compile.compile_kernels(("k",), Target(80, is_ptx=True), files).binary.decode()

    assert ROUNDED_OTHERWISE.findall(ptx)


def test_the_options_keep_a_plain_product_and_sum_apart() -> None:
    files = {cuda_compile.PROGRAM: "__global__ void k(float *x) { x[0] = x[0] * x[1] + x[2] / x[3]; }"}

    ptx = cuda_compile.compile_kernels(("k",), Target(80, is_ptx=True), files).binary.decode()

    assert ROUNDED_OTHERWISE.findall(ptx) == []


def test_a_kernel_is_compiled_once_and_read_from_the_cache_after_that(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cuda_compile.load_or_compile(ONE, Target(90, is_ptx=False))
    monkeypatch.setattr(cuda_compile, "compile_kernels", None)

    assert cuda_compile.load_or_compile(ONE, Target(90, is_ptx=False)) == first
    assert len(list(cache.iterdir())) == 1


def test_what_goes_into_a_kernel_names_its_cache_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(90, is_ptx=False)
    keys = {cuda_compile._key(ONE, target), cuda_compile._key(("sum",), target)}
    keys |= {cuda_compile._key(ONE, Target(80, is_ptx=False)), cuda_compile._key(ONE, Target(90, is_ptx=True))}
    with monkeypatch.context() as patched:
        patched.setattr(cuda_compile, "compiler_version", lambda: "12.9")
        keys.add(cuda_compile._key(ONE, target))
    with monkeypatch.context() as patched:
        patched.setattr(cuda_compile, "OPTIONS", (*cuda_compile.OPTIONS, "-G"))
        keys.add(cuda_compile._key(ONE, target))
    edited = dict(cuda_compile.sources()) | {"wire.h": "// edited"}
    monkeypatch.setattr(cuda_compile, "sources", lambda: edited)

    assert len(keys | {cuda_compile._key(ONE, target)}) == 7


@pytest.mark.parametrize("damage", [b"", b"{}\n", b'{"sha256": "0", "symbols": {}}\nbinary', b"\xff\x00"])
def test_a_damaged_cache_entry_is_compiled_again(damage: bytes, cache: Path) -> None:
    target = Target(90, is_ptx=False)
    image = cuda_compile.load_or_compile(ONE, target)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    for content in (damage, whole[:-1]):
        entry.write_bytes(content)

        assert cuda_compile.load_or_compile(ONE, target) == image
        assert entry.read_bytes() == whole


def test_without_a_cache_kernels_are_compiled_in_memory_and_that_is_said_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zcomm").write_text("a file where the folder should be")

    with pytest.warns(UserWarning, match="cannot keep compiled CUDA kernels in .*every process compiles them again"):
        image = cuda_compile.load_or_compile(ONE, Target(90, is_ptx=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = cuda_compile.load_or_compile(ONE, Target(90, is_ptx=False))

    assert image == again


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)

    assert cuda_compile.cache_folder() is None


def test_a_gpu_newer_than_the_compiler_gets_ptx_of_the_newest_before_it() -> None:
    known = cuda_compile._nvrtc().getSupportedArchs()

    assert cuda_compile.target_for(90) == Target(90, is_ptx=False)
    assert cuda_compile.target_for(max(known) + 100) == Target(max(known), is_ptx=True)
    image = cuda_compile.compile_kernels(ONE, cuda_compile.target_for(max(known) + 100))
    assert b".visible .entry" in image.binary


def test_a_gpu_older_than_the_compiler_is_refused() -> None:
    with pytest.raises(EngineError, match=r"this GPU is sm_52, NVRTC .* compiles for sm_.* and newer"):
        cuda_compile.target_for(52)


def test_a_kernel_that_does_not_compile_shows_the_compilers_words() -> None:
    with pytest.raises(EngineError, match=r"does not compile the kernels with -arch=sm_90: .*Nothing"):
        cuda_compile.compile_kernels(("encode<Nothing, Nothing>",), Target(90, is_ptx=False))


def test_without_a_compiler_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(cuda_compile.cupy().cuda.nvrtc, "getVersion", missing)

    with pytest.raises(EngineError, match=r"does not load \(libnvrtc.*; pip install 'zcomm-collectives\[cuda\]'"):
        cuda_compile.target_for(90)


def test_without_cupy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(MissingExtra, match=r"needs cupy.*; pip install 'zcomm-collectives\[cuda\]'"):
        select.engine_for("cuda:7")


def test_without_a_gpu_the_error_gives_the_drivers_reason() -> None:
    info = {engine.name: engine for engine in select.available()}["cuda"]
    if info.usable:
        pytest.skip("there is a GPU here")

    with pytest.raises(EngineError, match="there is no CUDA device: cudaError"):
        cuda_device.count()
    with pytest.raises(EngineError, match="there is no CUDA device: cudaError"):
        select.engine_for("cuda:0")


def test_sources_come_from_a_checkout_or_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict(cuda_compile.sources())
    assert {"wire.h", "int_block.cuh", "codec_kernels.cuh", cuda_compile.PROGRAM} <= set(files)
    package = tmp_path / "zcomm"
    (package / "engines").mkdir(parents=True)
    (tmp_path / "cuda").mkdir()  # another package of that name
    monkeypatch.setattr(cuda_compile, "__file__", str(package / "engines" / "cuda_compile.py"))

    with pytest.raises(EngineError, match="the CUDA sources are missing"):
        cuda_compile.sources.__wrapped__()
    (package / "cuda_sources").mkdir()
    for name, text in files.items():
        (package / "cuda_sources" / name).write_text(text)
    assert dict(cuda_compile.sources.__wrapped__()) == files
