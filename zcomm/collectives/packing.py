"""Several arrays as one flat one, so that they travel as one message: lists, mixed shapes, mixed dtypes.

Arrays of one dtype are packed in it; mixed ones in float32, or float64 if one of them is. The codecs compute in float32
anyway, so packing changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from zcomm.buffers import DType, Span, overlap, span_of, tell_autograd
from zcomm.collectives.arguments import check_writable
from zcomm.collectives.places import some_share_memory
from zcomm.errors import BufferError
from zcomm.streams import cupy, is_torch


class Packed:
    """A flat array and the arrays it stands for, in order."""

    def __init__(
        self,
        arrays: Sequence[Any],  # torch tensors or cupy arrays on one device, or numpy arrays; not empty
        role: str,  # how errors call them
        written: bool,  # whether results go back into them
    ) -> None:
        if not isinstance(arrays, Sequence) or not arrays:
            raise BufferError(f"{role} must be a list of at least one tensor, got {type(arrays).__name__}")
        spans = [span_of(array, f"{role}[{number}]") for number, array in enumerate(arrays)]
        if len({span.device for span in spans}) > 1:
            raise BufferError(f"{role} are on {sorted({span.device for span in spans})}; expected one device")
        if len({isinstance(array, np.ndarray) for array in arrays}) > 1:
            raise BufferError(f"{role} mix numpy arrays with others; expected all of one kind: torch.from_numpy()")
        if written:
            for number, array in enumerate(arrays):
                check_writable(array, f"{role}[{number}]")
            if _some_overlap(arrays, spans):
                raise BufferError(f"two of {role} share memory; expected separate ones to write to")
            for array in arrays:
                tell_autograd(array)
        self._arrays = tuple(arrays)  # the caller may reuse the list before the call is complete
        self.counts = tuple(span.n_elems for span in spans)
        self.flat = _empty(arrays[0], sum(self.counts), _common([span.dtype for span in spans]))

    def fill(self) -> Any:
        """Copy the arrays into the flat one; returns it."""
        for part, array in self._parts():
            if is_torch(array):
                part.copy_(array.detach().reshape(-1))
            else:
                part[...] = array.reshape(-1)
        return self.flat

    def spread(self) -> None:
        """Copy the flat array back into the arrays, narrowing to their dtypes."""
        for part, array in self._parts():
            if is_torch(array):
                array.detach().copy_(part.reshape(array.shape))
            else:
                array[...] = part.reshape(array.shape).astype(array.dtype)

    def _parts(self) -> list[tuple[Any, Any]]:
        starts = [0, *accumulate(self.counts)]
        return [
            (self.flat[start : start + count], array)
            for start, count, array in zip(starts, self.counts, self._arrays, strict=False)
        ]


def _some_overlap(arrays: Sequence[Any], spans: list[Span]) -> bool:
    """Whether two arrays have a byte in common."""
    if all(span.owner is array for array, span in zip(arrays, spans, strict=True)):  # contiguous, all of them
        places = sorted((span for span in spans if span.n_elems), key=lambda span: span.address)
        return any(overlap(one, other) for one, other in pairwise(places))
    return some_share_memory([array for array, span in zip(arrays, spans, strict=True) if span.n_elems])


def _common(dtypes: list[DType]) -> DType:
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return DType.FLOAT64 if DType.FLOAT64 in dtypes else DType.FLOAT32


def _empty(like: Any, n_elems: int, dtype: DType) -> Any:
    """A new flat array of like's kind and device."""
    if isinstance(like, np.ndarray):
        return np.empty(n_elems, dtype.numpy)
    if not is_torch(like):
        with like.device:
            return cupy().empty(n_elems, dtype.numpy)
    narrow = like.detach().reshape(-1)[:0]
    converted = getattr(narrow, {DType.FLOAT32: "float", DType.FLOAT64: "double"}.get(dtype, "clone"))()
    return converted.new_empty(n_elems)
