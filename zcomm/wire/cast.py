"""bf16 and fp16: every element rounded to a 16-bit float. The lossy baseline, half the bytes of float32.

    chunk:  [n elements of 2 bytes, little endian][zero bytes up to a multiple of 16]

Rounding to nearest, ties to even; overflow gives Inf; NaN gives the quiet NaN of its sign (docs/wire-format.md, cast).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.codec import Carried, check_chunk, checked_count, padded
from zcomm.wire.draw import Draw
from zcomm.wire.elements import narrow, widen

_DTYPES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16}  # by the codec's spelling


@dataclass(frozen=True, slots=True)
class Cast(Carried):
    """Elements narrowed to one 16-bit float type, BFLOAT16 or FLOAT16."""

    dtype: DType

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType) or self.dtype.itemsize != 2:
            known = " or ".join(map(repr, _DTYPES.values()))
            raise CodecError(f"a cast goes to {known}, got {self.dtype!r}; use one of these")

    def __str__(self) -> str:
        return "bf16" if self.dtype is DType.BFLOAT16 else "fp16"

    def for_dtype(self, dtype: DType) -> Cast:
        """Itself: the wire's dtype does not depend on the elements'."""
        return self

    def nbytes(self, n_elems: int) -> int:
        """Two bytes per element, padded."""
        n_elems = checked_count(n_elems)
        return padded(2 * n_elems)

    def encode(
        self,
        x: np.ndarray,  # float32 (n,)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # unused: nothing is left to chance
    ) -> None:
        """Narrow x into out. Raises CodecError if out has another size."""
        check_chunk(self, x, DType.FLOAT32, out)
        out[: 2 * x.size] = narrow(x, self.dtype).view(np.uint8)
        out[2 * x.size :] = 0

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # float32 (n,), written
    ) -> None:
        """Widen wire into out. Raises CodecError if wire has another size."""
        check_chunk(self, out, DType.FLOAT32, wire)
        out[:] = widen(wire[: 2 * out.size].view(self.dtype.numpy), self.dtype)

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """Half a unit in the last place; inf where x is not finite or rounds to Inf."""
        # Half a unit is at most 2^-p |x| for p significant bits, and half the spacing of the subnormals below them.
        if self.dtype is DType.BFLOAT16:
            relative, absolute, overflow = 2.0**-8, 2.0**-134, 2.0**128 * (1 - 2.0**-9)
        else:
            relative, absolute, overflow = 2.0**-11, 2.0**-25, 65520.0
        with np.errstate(invalid="ignore"):  # signalling NaNs
            magnitude = np.abs(x.astype(np.float64))
        return np.where(magnitude < overflow, np.maximum(relative * magnitude, absolute), np.inf)


def parse(
    head: str,  # "bf16" or "fp16"
    options: list[str],  # what followed it, cut at each colon
) -> Cast:
    """Cast from its spelling. Raises CodecError for any option: it has none."""
    if options:
        raise CodecError(f"{head} takes no options, got {':'.join(options)!r}; write {head!r}")
    return Cast(_DTYPES[head])
