"""raw: the elements' own bytes, untouched. What uncompressed collectives send; what codecs are compared with.

    chunk:  [n elements, little endian][zero bytes up to a multiple of 16]

Spelled "raw" (float32), "raw:bfloat16", "raw:float16", "raw:float64" (docs/wire-format.md, raw).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.codec import Carried, check_chunk, checked_count, padded
from zcomm.wire.draw import Draw

_DTYPES = {dtype.spelling: dtype for dtype in DType}


@dataclass(frozen=True, slots=True)
class Raw(Carried):
    """Elements of one dtype as they are. Sums of raw:float64 run in float64, all others in float32."""

    dtype: DType = DType.FLOAT32

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType):
            raise CodecError(f"raw carries {', '.join(map(repr, DType))}, got {self.dtype!r}; use one of these")

    def __str__(self) -> str:
        return "raw" if self.dtype is DType.FLOAT32 else f"raw:{self.dtype.spelling}"

    def for_dtype(self, dtype: DType) -> Raw:
        """raw for elements of this dtype."""
        return self if dtype is self.dtype else Raw(dtype)

    def nbytes(self, n_elems: int) -> int:
        """The elements' bytes, padded."""
        n_elems = checked_count(n_elems)
        return padded(n_elems * self.dtype.itemsize)

    def encode(
        self,
        x: np.ndarray,  # (n,) of self.dtype
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # unused: nothing is left to chance
    ) -> None:
        """Copy x into out. Raises CodecError if out has another size."""
        check_chunk(self, x, self.dtype, out)
        out[: x.nbytes] = x.view(np.uint8)
        out[x.nbytes :] = 0

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # (n,) of self.dtype, written
    ) -> None:
        """Copy wire into out. Raises CodecError if wire has another size."""
        check_chunk(self, out, self.dtype, wire)
        out.view(np.uint8)[:] = wire[: out.nbytes]

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """0; inf where x is not finite, the protocol's mark for no error to bound."""
        return np.where(np.isfinite(x), 0.0, np.inf)


def parse(
    head: str,  # "raw"
    options: list[str],  # what followed it, cut at each colon
) -> Raw:
    """Raw from its spelling. Raises CodecError for a dtype or an option it does not have."""
    spelled = ":".join(options)
    if options and spelled not in _DTYPES:
        raise CodecError(f"raw takes one option, a dtype ({', '.join(_DTYPES)}), got {spelled!r}; write {head!r}")
    return Raw(_DTYPES[spelled]) if options else Raw()
