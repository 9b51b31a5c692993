"""The reference engine: each verb in numpy, straight from the codec's definition. Normative, and slow.

Other engines must give these bytes. It computes on the calling thread under the caller's floating-point modes, so a
thread that flushes subnormals (torch.set_flush_denormal) changes raw and cast sums here; the native engine is immune.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold

import numpy as np

from zcomm.buffers import DType
from zcomm.engines.engine import Finish
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.wire.elements import narrow, widen
from zcomm.wire.hadamard import Hadamard, rotated_back
from zcomm.wire.raw import Raw


class ReferenceEngine:
    """Computes every codec on the CPU with numpy."""

    name = "reference"

    def supports(self, codec: Codec) -> bool:
        """Every codec: each brings its numpy definition."""
        return True

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
        _encode(codec, _elements(source, n_elems, dtype), dtype, wire, draw)

    def decode(
        self,
        codec: Codec,
        wire: int,  # address of codec.nbytes(n_elems) bytes
        n_elems: int,
        target: int,  # address of n_elems elements of dtype, written
        dtype: DType,
    ) -> None:
        """Decode one chunk and narrow it to dtype (round to nearest, ties to even)."""
        out = _elements(target, n_elems, dtype)
        if isinstance(codec, Raw) and codec.dtype is dtype:
            codec.decode(_memory(wire, codec.nbytes(n_elems)), out)
        else:
            out[:] = _narrowed(_decoded(codec, wire, n_elems), dtype)

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
        total = _as_elements(codec, _sum(codec, wires, n_elems, finish), n_elems)
        _elements(target, n_elems, dtype)[:] = _narrowed(total, dtype)

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
        total = _sum(codec, wires, n_elems, finish)
        if isinstance(codec, Hadamard) and isinstance(codec_out, Hadamard):
            codec_out = codec_out.inner  # of sums that are rotated already
        else:
            total = _as_elements(codec, total, n_elems)
        _encode(codec_out, total, DType.FLOAT64 if total.dtype == np.float64 else DType.FLOAT32, wire_out, draw)


def _sum(
    codec: Codec,
    wires: Sequence[int],
    n_elems: int,
    finish: Finish,
) -> np.ndarray:  # float32 (n,); raw:float64: float64 (n,); hadamard: float32, the sums of rotated elements
    """The finished sum of k chunks. Each operation is rounded by itself, in the order of the chunks."""
    if isinstance(codec, Hadamard):
        return _sum(codec.inner, wires, codec.n_rotated(n_elems), finish)
    with np.errstate(all="ignore"):
        total = fold(np.add, (_decoded(codec, wire, n_elems) for wire in wires))
        if finish.factor != 1.0:
            total = total * total.dtype.type(finish.factor)
        if finish.divisor != 1.0:
            total = total / total.dtype.type(finish.divisor)
    return total


def _as_elements(
    codec: Codec,
    total: np.ndarray,  # of _sum
    n_elems: int,
) -> np.ndarray:  # float32 or float64 (n,)
    """A sum of rotated elements rotated back; any other as it is."""
    return rotated_back(total)[:n_elems] if isinstance(codec, Hadamard) else total


def _encode(
    codec: Codec,
    x: np.ndarray,  # (n,) of dtype
    dtype: DType,
    wire: int,
    draw: Draw | None,
) -> None:
    """Encode x: raw in its own dtype, every other codec from float32."""
    if not isinstance(codec, Raw):
        x = widen(x, dtype)
    elif codec.dtype is not dtype:
        x = _narrowed(x if dtype is DType.FLOAT64 else widen(x, dtype), codec.dtype)
    codec.encode(x, _memory(wire, codec.nbytes(x.size)), draw)


def _decoded(
    codec: Codec,
    wire: int,
    n_elems: int,
) -> np.ndarray:  # float32 (n,); raw:float64: float64 (n,)
    """The elements of one chunk in the type that sums run in."""
    data = _memory(wire, codec.nbytes(n_elems))
    if isinstance(codec, Raw):
        elements = np.empty(n_elems, codec.dtype.numpy)
        codec.decode(data, elements)
        return elements if codec.dtype is DType.FLOAT64 else widen(elements, codec.dtype)
    decoded = np.empty(n_elems, np.float32)
    codec.decode(data, decoded)
    return decoded


def _narrowed(
    x: np.ndarray,  # float32 or float64 (n,)
    dtype: DType,
) -> np.ndarray:  # (n,) of dtype
    """x as elements of dtype; float64 becomes anything else through float32."""
    if x.dtype == np.float64:
        return x if dtype is DType.FLOAT64 else narrow(widen(x, DType.FLOAT64), dtype)
    return narrow(x, dtype)


class _Memory:
    """Bytes at an address, in the form numpy takes without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _memory(address: int, nbytes: int) -> np.ndarray:  # uint8 (nbytes,), writable
    return np.asarray(_Memory(address, nbytes)) if nbytes else np.empty(0, np.uint8)


def _elements(address: int, n_elems: int, dtype: DType) -> np.ndarray:  # (n,) of dtype, writable
    return _memory(address, n_elems * dtype.itemsize).view(dtype.numpy)
