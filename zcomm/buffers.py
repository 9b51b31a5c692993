"""Tensors and arrays seen as flat memory: address, count, dtype, device. No framework is imported here.

A torch, numpy or cupy object is recognised by what it offers, so `import zcomm` needs numpy only. A `Span` never owns
memory of its own: `owner` keeps the object it came from alive. float32, bfloat16, float16 and float64 are the dtypes
that collectives take; everything else is refused here, before any byte moves (docs/sharp-bits.md).
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zcomm.errors import BufferError


class DType(enum.IntEnum):
    """Element types that collectives take; the numbers are those of the C ABI (cpu/native.h)."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT64 = 3

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype (bfloat16 from ml_dtypes)."""
        return _NUMPY[self]

    @property
    def spelling(self) -> str:
        """The dtype's name as numpy and torch both write it, e.g. "bfloat16"."""
        return self.name.lower()


_ITEMSIZE = {DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT64: 8}
_NUMPY = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT16: np.dtype(np.float16),
    DType.FLOAT64: np.dtype(np.float64),
}
_BY_NAME = {dtype.spelling: dtype for dtype in DType}


class Span(NamedTuple):
    """Contiguous elements somewhere in memory."""

    address: int  # of the first element
    n_elems: int
    dtype: DType
    device: str  # "cpu", "cuda:0"
    owner: object  # keeps the memory alive

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return self.n_elems * _ITEMSIZE[self.dtype]
