"""The protocol of an engine: who computes the bytes. Four verbs, into memory the caller owns.

Arguments are addresses and counts: callers check sizes, dtypes and devices at the edge (collectives/), an engine trusts
them. An engine computes on the calling thread (native: with the GIL released) or on the caller's current stream (cuda).
All engines give the same bytes on the same input; NaN payloads of decoded values are the one exception. An engine that
is quicker with many pieces at once also has `encode_pieces` and `decode_pieces`, as native.py and cuda.py have; callers
look whether it does (collectives/run.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from zcomm.buffers import DType
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw


class Finish(NamedTuple):
    """What becomes of a sum before it is narrowed: (sum * factor) / divisor, each one fp32 operation."""

    factor: float = 1.0
    divisor: float = 1.0


NO_FINISH = Finish()


class Engine(Protocol):
    """Computes wire bytes on one kind of device."""

    name: str

    def supports(self, codec: Codec) -> bool:
        """Whether it can compute this codec."""
        ...

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
        ...

    def decode(
        self,
        codec: Codec,
        wire: int,  # address of codec.nbytes(n_elems) bytes
        n_elems: int,
        target: int,  # address of n_elems elements of dtype, written
        dtype: DType,
    ) -> None:
        """Decode one chunk and narrow it to dtype (round to nearest, ties to even)."""
        ...

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
        ...

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
        ...
