"""Checks of what callers hand to a collective: before any byte moves, and saying what came and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np

from zcomm.buffers import Span, overlap, span_of
from zcomm.errors import BufferError


def flattened(
    array: Any,  # what the caller gave
    role: str,  # how errors call it
    device: str,  # where the group moves bytes
) -> Span:
    """The array as contiguous memory on device; the span's owner is a copy where the array is strided."""
    span = span_of(array, role)
    if span.device != device:
        raise BufferError(
            f"{role} is on {span.device}, but this group moves bytes on {device}, and zcomm copies nothing between "
            "devices; move it yourself, or use a group of that device"
        )
    return span


def check_writable(array: Any, role: str) -> None:
    """Raise BufferError for an output that cannot hold one element per place."""
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise BufferError(f"{role} is a read-only array; expected one that can be written")
        strides = array.strides
    elif hasattr(array, "stride"):
        if array.is_contiguous():
            return
        strides = array.stride()
    else:
        strides = getattr(array, "strides", ())
    reach = 1  # elements that the dimensions of smaller stride cover
    unit = array.itemsize if isinstance(array, np.ndarray) else 1
    for stride, n in sorted((abs(stride) // unit, n) for stride, n in zip(strides, array.shape, strict=True)):
        if n > 1 and stride < reach and 0 not in array.shape:
            raise BufferError(
                f"{role} of shape {tuple(array.shape)} and strides {tuple(strides)} holds several elements in one "
                "place; expected one element per place: a contiguous copy"
            )
        reach += (n - 1) * stride


def check_output(
    output: Span,
    source: Span,
    n_elems: int,  # that output must have
    because: str,  # where the number comes from
) -> None:
    """Raise BufferError unless output has the count and dtype that source asks for."""
    if output.n_elems != n_elems:
        raise BufferError(f"output has {output.n_elems} elements; expected {because} = {n_elems}")
    if output.dtype != source.dtype:
        raise BufferError(f"output is {output.dtype.spelling}, input {source.dtype.spelling}; expected the same dtype")


def check_overlap(
    part: Span,
    whole: Span,
    start: int | None,  # element of whole where part may lie; None: nowhere
) -> None:
    """Raise BufferError if part lies in whole anywhere but at start."""
    if overlap(part, whole) and (start is None or part.address != whole.address + start * part.dtype.itemsize):
        raise BufferError(
            "output and input overlap; expected separate memory"
            + ("" if start is None else ", or the smaller to be this rank's part of the larger")
        )
