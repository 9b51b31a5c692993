"""The protocol of a codec: a frozen value that says what the bytes of n elements are (docs/wire-format.md).

A codec compares, prints and parses from its own string. Its encode and decode are the numpy definition that every
engine must match byte for byte; collectives never call them, they ask an engine.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from zcomm.buffers import DType

WIRE_ALIGNMENT = 16  # every encoded chunk is padded with zero bytes to a multiple of this


def padded(nbytes: int) -> int:
    """Round nbytes up to the wire's alignment."""
    return -(-nbytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


@runtime_checkable
class Codec(Protocol):
    """What the bytes of one chunk are. Implementations are frozen dataclasses."""

    def __str__(self) -> str:
        """The shortest spelling that `registry.codec` parses back to an equal value."""
        ...

    def for_dtype(self, dtype: DType) -> Codec:
        """The codec that carries elements of this dtype: itself, except for raw, which keeps the dtype's own bytes."""
        ...

    def nbytes(self, n_elems: int) -> int:
        """Wire bytes of a chunk of n_elems >= 0 elements, a multiple of WIRE_ALIGNMENT; 0 for 0."""
        ...

    def encode(
        self,
        x: np.ndarray,  # (n,), float32 (raw: its own dtype)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
    ) -> None:
        """Turn x into wire bytes. Raises CodecError if out has another size."""
        ...

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # (n,), float32 (raw: its own dtype), written
    ) -> None:
        """Turn wire bytes into elements. Raises CodecError if wire has another size."""
        ...

    def error_bound(
        self,
        x: np.ndarray,  # (n,) float32
    ) -> np.ndarray:  # float64 (n,)
        """Largest |decode(encode(x)) - x| of each element, before any narrowing; inf where the block is not finite."""
        ...
