"""The native engine: the loops of cpu/, called through ctypes without the GIL.

The library is built into the wheel; its C ABI is cpu/native.h. It holds one build per instruction set ("v4" and "v3"
are the x86-64 levels, "portable" is any machine), all with the same bytes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from zcomm.buffers import DType
from zcomm.engines.engine import Finish
from zcomm.errors import EngineError
from zcomm.wire import nvfp4
from zcomm.wire.cast import Cast
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw, check_draw
from zcomm.wire.fp8_block import Fp8Block
from zcomm.wire.hadamard import Hadamard
from zcomm.wire.int_asym import IntAsym
from zcomm.wire.int_block import IntBlock
from zcomm.wire.minifloat import E2M1, E4M3, E5M2
from zcomm.wire.mx_block import MxBlock
from zcomm.wire.nvfp4 import NvFp4
from zcomm.wire.options import NEAREST, SHIFT, STOCHASTIC
from zcomm.wire.raw import Raw

_ABI = 5  # ZC_ABI of cpu/native.h
_ADVICE = "install g++ or clang++ and run pip install again"


class NativeEngine:
    """Computes every codec of zcomm/wire on the CPU.

    `build` is the instruction set to use, by default the best this machine has. Raises EngineError if the
    library or the build is missing.
    """

    name = "native"

    def __init__(self, build: str | None = None) -> None:
        library = _library()
        self.build = build or _text(library.zc_isa)
        if self.build not in builds():
            raise EngineError(f"the native engine has no build {self.build!r} here; it has {', '.join(builds())}")
        address, count, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
        record, drawn = ctypes.POINTER(_Record), ctypes.POINTER(_Draw)
        self._encode = _verb(library, "encode", self.build, address, count, number, address, drawn)
        self._decode = _verb(library, "decode", self.build, address, count, address, number)
        sums = (ctypes.c_char_p, count, count, real, real)
        self._reduce = _verb(library, "reduce", self.build, *sums, address, number)
        self._reduce_encode = _verb(library, "reduce_encode", self.build, *sums, record, address, drawn)

    def supports(self, codec: Codec) -> bool:
        """Whether the library has loops for this codec."""
        return _known(codec) is not None

    def encode(
        self,
        codec: Codec,
        source: int,  # address of n_elems elements of dtype
        n_elems: int,
        dtype: DType,
        wire: int,  # address of codec.nbytes(n_elems) bytes, written
        draw: Draw | None = None,  # the random bits, for a codec that rounds by chance; others ignore it
    ) -> None:
        """Encode one chunk."""
        self._encode(_record(codec), source, n_elems, dtype, wire, _drawn(codec, draw))

    def decode(
        self,
        codec: Codec,
        wire: int,  # address of codec.nbytes(n_elems) bytes
        n_elems: int,
        target: int,  # address of n_elems elements of dtype, written
        dtype: DType,
    ) -> None:
        """Decode one chunk and narrow it to dtype (round to nearest, ties to even)."""
        self._decode(_record(codec), wire, n_elems, target, dtype)

    def encode_pieces(
        self,
        codec: Codec,
        source: int,  # address of elements of dtype
        dtype: DType,
        wire: int,  # address that the pieces' bytes are counted from, written
        pieces: Sequence[tuple[int, int, int]],  # first element, n_elems, bytes behind wire
        draw: Draw | None = None,  # the random bits; its first element is the one at source
    ) -> None:
        """Encode each piece as a chunk of its own."""
        record, drawn, itemsize = _record(codec), _drawn(codec, draw), dtype.itemsize
        for start, n_elems, offset in pieces:
            if drawn is not None and draw is not None:
                drawn.first = draw.first + start
            if n_elems:
                self._encode(record, source + start * itemsize, n_elems, dtype, wire + offset, drawn)

    def decode_pieces(
        self,
        codec: Codec,
        wire: int,  # address that the pieces' bytes are counted from
        target: int,  # address of elements of dtype, written
        dtype: DType,
        pieces: Sequence[tuple[int, int, int]],  # first element, n_elems, bytes behind wire
    ) -> None:
        """Decode each piece, a chunk of its own."""
        record, itemsize = _record(codec), dtype.itemsize
        for start, n_elems, offset in pieces:
            if n_elems:
                self._decode(record, wire + offset, n_elems, target + start * itemsize, dtype)

    def reduce(
        self,
        codec: Codec,
        wires: Sequence[int],  # addresses of k >= 1 chunks, codec.nbytes(n_elems) bytes each
        n_elems: int,
        finish: Finish,
        target: int,  # address of n_elems elements of dtype, written
        dtype: DType,
    ) -> None:
        """Decode k chunks, add them in this order in fp32 (raw:float64 in fp64), finish, narrow, store."""
        factor, divisor = finish
        k = len(wires)
        self._reduce(_record(codec), _addresses(k)(*wires), k, n_elems, factor, divisor, target, dtype)

    def reduce_encode(
        self,
        codec: Codec,
        wires: Sequence[int],  # addresses of k >= 1 chunks, codec.nbytes(n_elems) bytes each
        n_elems: int,
        finish: Finish,
        codec_out: Codec,
        wire_out: int,  # address of codec_out.nbytes(n_elems) bytes, written; never inside wires
        draw: Draw | None = None,  # the random bits, for a codec_out that rounds by chance
    ) -> None:
        """As reduce, but the finished fp32 sums are encoded again by codec_out instead of stored."""
        factor, divisor = finish
        k = len(wires)
        out, drawn = _record(codec_out), _drawn(codec_out, draw)
        self._reduce_encode(_record(codec), _addresses(k)(*wires), k, n_elems, factor, divisor, out, wire_out, drawn)


def builds() -> tuple[str, ...]:
    """The builds that this machine can run, best first. Raises EngineError if there is no library."""
    library = _library()
    return tuple(_text(library.zc_builds).split(","))


def why_missing() -> str | None:
    """Why the engine cannot be used, or None if it can."""
    try:
        _library()
    except EngineError as error:
        return str(error)
    return None


class _Record(ctypes.Structure):
    """zc_codec of cpu/native.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("rounding", ctypes.c_int32),
        ("rotated", ctypes.c_int32),
    )


class _Draw(ctypes.Structure):
    """zc_draw of cpu/native.h."""

    _fields_ = (("seed", ctypes.c_uint64), ("call", ctypes.c_uint64), ("first", ctypes.c_uint64))


_RAW, _CAST, _INT_BLOCK, _INT_ASYM, _FP8_BLOCK, _MX_BLOCK, _NVFP4 = range(7)  # zc_kind of cpu/native.h
_FORMS = {E4M3: 0, E5M2: 1, E2M1: 2}  # zc_form
_ROUNDINGS = {NEAREST: 0, STOCHASTIC: 1, SHIFT: 2}  # zc_rounding


def _drawn(codec: Codec, draw: Draw | None) -> Any:
    """The draw as the library takes it; None where nothing is left to chance."""
    return _Draw(*check_draw(codec, draw)) if codec.by_chance else None


@lru_cache(maxsize=256)
def _record(codec: Codec) -> _Record:
    """The codec as the library takes it, made once."""
    record = _known(codec)
    if record is None:
        raise EngineError(f"the native engine cannot compute codec {codec}; use the reference engine for it")
    return record


def _known(codec: Codec) -> _Record | None:
    """The codec as the library takes it, if it has loops for it."""
    if isinstance(codec, Hadamard):
        record = _known(codec.inner)
        if record is not None:
            record.rotated = 1
        return record
    if isinstance(codec, IntBlock):
        return _Record(_INT_BLOCK, 0, codec.bits, codec.block, _ROUNDINGS[codec.rounding])
    if isinstance(codec, IntAsym):
        return _Record(_INT_ASYM, 0, codec.bits, codec.block, _ROUNDINGS[codec.rounding])
    if isinstance(codec, Fp8Block):
        return _Record(_FP8_BLOCK, _FORMS[codec.form], codec.bits, codec.block, _ROUNDINGS[codec.rounding])
    if isinstance(codec, MxBlock):
        return _Record(_MX_BLOCK, _FORMS[codec.form], codec.bits, codec.block, _ROUNDINGS[codec.rounding])
    if isinstance(codec, NvFp4):
        return _Record(_NVFP4, _FORMS[E2M1], E2M1.bits, nvfp4.BLOCK, _ROUNDINGS[codec.rounding])
    if isinstance(codec, Cast):
        return _Record(_CAST, codec.dtype)
    if isinstance(codec, Raw):
        return _Record(_RAW, codec.dtype)
    return None


@lru_cache(maxsize=256)
def _addresses(k: int) -> Callable[..., bytes]:
    """Packs k addresses as an array of pointers."""
    return struct.Struct(f"{k}P").pack


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The loaded library. Raises EngineError with the reason if it is absent or of another version."""
    # Found as a module, not beside this file: an editable install keeps built files elsewhere.
    found = importlib.util.find_spec("zcomm.engines._native")
    if found is None or found.origin is None:
        raise EngineError(f"_native.so was not built; {_ADVICE}")
    try:
        library = ctypes.CDLL(found.origin)
    except OSError as error:
        raise EngineError(f"_native.so does not load ({error}); {_ADVICE}") from error
    abi = library.zc_abi() if hasattr(library, "zc_abi") else None
    if abi != _ABI:
        raise EngineError(f"_native.so has ABI {abi}, this version needs {_ABI}; {_ADVICE}")
    return library


def _text(function: Any) -> str:
    """What a C function without arguments returns as a string."""
    function.restype = ctypes.c_char_p
    return function().decode()


def _verb(library: ctypes.CDLL, verb: str, build: str, *argtypes: Any) -> Any:
    """One verb of one build; its first argument is the codec."""
    function = getattr(library, f"zc_{verb}_{build}")
    function.argtypes = (ctypes.POINTER(_Record), *argtypes)
    function.restype = None
    return function
