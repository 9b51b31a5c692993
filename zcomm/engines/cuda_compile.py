"""The CUDA kernels compiled: sources to a binary for one architecture, by NVRTC through cupy, cached on disk.

The same function serves a machine with a GPU and a test without one. Headers are passed from memory; nothing of the
CUDA toolkit is needed. Exact bytes hang on OPTIONS: no fused multiply and add, subnormals kept, true division.

A cache entry is named by the hash of everything that went into it: sources, options, kernels, architecture, compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zcomm.errors import EngineError
from zcomm.streams import cupy

OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true")
PROGRAM = "exports.cu"
_INSTALL = "pip install 'zcomm-collectives[cuda]'"


class Target(NamedTuple):
    """What to compile for."""

    arch: int  # 90 for sm_90
    is_ptx: bool  # an intermediate form that the driver finishes, for a GPU that the compiler does not know

    @property
    def option(self) -> str:
        """The compiler's option."""
        return f"-arch={'compute' if self.is_ptx else 'sm'}_{self.arch}"


class Image(NamedTuple):
    """Compiled kernels, as the driver loads them."""

    binary: bytes  # a cubin, or PTX
    symbols: Mapping[str, str]  # the name inside binary of each kernel, by its C++ name


@lru_cache(maxsize=1)
def sources() -> Mapping[str, str]:
    """The text of every file in cuda/, by its name. Raises EngineError if they are not there."""
    package = Path(__file__).parents[1]
    # Beside the package in a checkout; inside it in a wheel. Another package may be called cuda.
    for folder in (package.parent / "cuda", package / "cuda_sources"):
        if (folder / PROGRAM).is_file():
            files = [path for path in sorted(folder.iterdir()) if path.suffix in (".h", ".cuh", ".cu")]
            return MappingProxyType({path.name: path.read_text() for path in files})
    raise EngineError(f"the CUDA sources are missing from {package / 'cuda_sources'}; install zcomm again")


def target_for(
    arch: int,  # of the GPU: 90 for compute capability 9.0
) -> Target:
    """What to compile for this GPU: itself, or PTX of the newest architecture before it that the compiler knows."""
    known = _nvrtc().getSupportedArchs()
    older = [a for a in known if a <= arch]
    if not older:
        raise EngineError(
            f"this GPU is sm_{arch}, NVRTC {compiler_version()} compiles for sm_{min(known)} and newer; "
            "install an older CUDA and cupy"
        )
    return Target(max(older), is_ptx=arch not in known)


def compiler_version() -> str:
    """NVRTC's version, e.g. "13.0"."""
    return ".".join(map(str, _nvrtc().getVersion()))


def compile_kernels(
    kernels: Sequence[str],  # C++ names, as in "encode<IntBlock<8, 256>, Elements<Float32>>"
    target: Target,
    files: Mapping[str, str] | None = None,  # by default sources()
) -> Image:
    """Compile, without the cache. Raises EngineError with the compiler's words."""
    nvrtc = _nvrtc()
    files = sources() if files is None else files
    headers = {name: text for name, text in files.items() if name != PROGRAM}
    program = nvrtc.createProgram(
        files[PROGRAM], PROGRAM, tuple(text.encode() for text in headers.values()), tuple(map(str.encode, headers))
    )
    try:
        for kernel in kernels:
            nvrtc.addNameExpression(program, kernel)
        try:
            nvrtc.compileProgram(program, (*OPTIONS, target.option))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip()
            raise EngineError(
                f"NVRTC {compiler_version()} does not compile the kernels with {target.option}: {log or error}"
            ) from error
        binary = nvrtc.getPTX(program) if target.is_ptx else nvrtc.getCUBIN(program)
        symbols = {kernel: nvrtc.getLoweredName(program, kernel) for kernel in kernels}
    finally:
        nvrtc.destroyProgram(program)
    return Image(binary.encode() if isinstance(binary, str) else bytes(binary), symbols)


def load_or_compile(
    kernels: Sequence[str],
    target: Target,
) -> Image:
    """From the cache if it is there; otherwise compiled, and kept if the cache can be written."""
    folder = cache_folder()
    path = folder / f"{_key(kernels, target)}.kernels" if folder else None
    image = _read(path) if path else None
    if image is None:
        image = compile_kernels(kernels, target)
        _write(path, image)
    return image


def cache_folder() -> Path | None:
    """Where compiled kernels are kept, or None if the user has no home."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(caches) / "zcomm" / "cuda"


def _key(kernels: Sequence[str], target: Target) -> str:
    parts = [compiler_version(), target.option, *OPTIONS, *kernels]
    for name, text in sources().items():
        parts += [name, text]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# An entry is a line of JSON and the binary. What does not match its own digest counts as absent.


def _read(path: Path) -> Image | None:
    try:
        head, _, binary = path.read_bytes().partition(b"\n")
        entry = json.loads(head)
        if entry["sha256"] == hashlib.sha256(binary).hexdigest():
            return Image(binary, entry["symbols"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write(path: Path | None, image: Image) -> None:
    if path is None:
        _warn_once("there is no home directory")
        return
    head = json.dumps({"sha256": hashlib.sha256(image.binary).hexdigest(), "symbols": dict(image.symbols)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks of a node start together: an entry appears whole or not at all.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(head.encode() + b"\n" + image.binary)
        os.replace(file.name, path)
    except OSError as error:
        _warn_once(str(error))


@lru_cache(maxsize=1)
def _warn_once(why: str) -> None:
    warnings.warn(
        f"zcomm cannot keep compiled CUDA kernels in {cache_folder()} ({why}), so every process compiles them again; "
        "XDG_CACHE_HOME says where else",
        stacklevel=2,
    )


def _nvrtc() -> Any:
    """cupy's binding of NVRTC. Raises EngineError if the compiler's library does not load."""
    nvrtc = cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except (RuntimeError, ImportError, OSError) as error:
        raise EngineError(f"NVRTC, the CUDA compiler, does not load ({error}); {_INSTALL}") from error
    return nvrtc
