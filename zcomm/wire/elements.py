"""Elements of the four dtypes and fp32, the only arithmetic type of the wire: how they turn into each other.

Widening bfloat16 and float16 is exact. Narrowing rounds to nearest, ties to even; what is too large becomes Inf; a NaN
becomes the quiet NaN of its sign (0x7fc0 and 0x7e00). float64 goes to float32 first and from there to the others, so it
is rounded twice where the target is 16 bits wide (docs/wire-format.md, Elements).
"""

from __future__ import annotations

import numpy as np

from zcomm.buffers import DType

BF16_QUIET_NAN = 0x7FC0
FP16_QUIET_NAN = 0x7E00


def widen(
    x: np.ndarray,  # (n,) any of the four dtypes
    dtype: DType,
) -> np.ndarray:  # float32 (n,)
    """Elements of dtype as float32 (float64: rounded)."""
    if dtype is DType.BFLOAT16:
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return x.astype(np.float32)


def narrow(
    x: np.ndarray,  # float32 (n,)
    dtype: DType,
) -> np.ndarray:  # (n,) of dtype
    """float32 as elements of dtype (float64: exact)."""
    if dtype is DType.BFLOAT16:
        bits = x.view(np.uint32)
        kept = bits >> 16
        rounded = (bits + 0x7FFF + (kept & 1)) >> 16
        quiet = (kept & 0x8000) | BF16_QUIET_NAN
        return np.where(np.isnan(x), quiet, rounded).astype(np.uint16).view(dtype.numpy)
    with np.errstate(all="ignore"):
        narrowed = x.astype(dtype.numpy)
    if dtype is DType.FLOAT16:
        bits16 = narrowed.view(np.uint16)
        bits16[np.isnan(x)] = (bits16[np.isnan(x)] & 0x8000) | FP16_QUIET_NAN
    return narrowed
