"""Checks of what callers hand to a collective: before any byte moves, and saying what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import numpy as np

from zcomm.buffers import Span, copy_back, overlap, span_of, tell_autograd
from zcomm.errors import BufferError, GroupError
from zcomm.transports.transport import Transport


class Arguments:
    """Reads the arguments of one group's calls."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._device = transport.device
        self._group_name = transport.group_name

    def read(self, array: Any, role: str) -> Span:
        """An input as flat memory."""
        return flattened(array, role, self._device)

    def written(self, array: Any, role: str) -> Span:
        """An output as flat memory. Where it is strided, `deliver` copies the result back."""
        span = flattened(array, role, self._device)
        check_writable(array, role)
        tell_autograd(array)
        return span

    def one_each(self, arrays: Sequence[Any], role: str) -> Sequence[Any]:
        """A list of one array for each rank."""
        if not isinstance(arrays, Sequence) or len(arrays) != self.size:
            came = f"{len(arrays)}" if isinstance(arrays, Sequence) else f"a {type(arrays).__name__}"
            raise BufferError(f"{role} must be a list of {self.size} tensors, one for each rank, got {came}")
        return arrays

    def root(self, rank: Any, role: str) -> int:
        """A rank of the group."""
        if isinstance(rank, bool) or not hasattr(rank, "__index__") or not 0 <= index(rank) < self.size:
            raise GroupError(f"{role}={rank!r} is not a rank of {self._group_name}; expected 0 to {self.size - 1}")
        return index(rank)

    def peer(self, rank: Any, role: str) -> int:
        """Another rank of the group."""
        if self.root(rank, role) == self.rank:
            raise GroupError(f"{role}={rank} is this rank itself; expected another")
        return index(rank)

    def only(self, rank: int, n_elems: int) -> tuple[int, ...]:
        """All elements on one rank."""
        return tuple(n_elems if each == rank else 0 for each in range(self.size))

    def counts(self, counts: Sequence[int] | None, own: int, role: str) -> tuple[int, ...]:
        """Elements of each rank's shard. Raises BufferError unless there is one for each rank and own is this one's."""
        if counts is None:
            return (own,) * self.size
        shards = self._checked(counts, "counts")
        if shards[self.rank] != own:
            raise BufferError(f"{role} of rank {self.rank} has {own} elements; counts says {shards[self.rank]}")
        return shards

    def parts(self, parts: Sequence[int] | None, n_elems: int, role: str, called: str) -> tuple[int, ...]:
        """Elements of each rank's part of an array of n_elems; equal ones if parts is None."""
        if parts is None:
            if n_elems % self.size:
                raise BufferError(
                    f"{role} has {n_elems} elements, which {self.size} ranks cannot share equally; say {called}="
                )
            return (n_elems // self.size,) * self.size
        checked = self._checked(parts, called)
        if sum(checked) != n_elems:
            raise BufferError(f"{role} has {n_elems} elements; expected {sum_of(checked)} = {sum(checked)}")
        return checked

    def _checked(self, counts: Sequence[int], role: str) -> tuple[int, ...]:
        try:
            shards = tuple(index(count) for count in counts)
        except TypeError:
            shards = ()
        if len(shards) != self.size or any(count < 0 for count in shards):
            raise BufferError(f"{role} must be {self.size} whole numbers of elements, one for each rank, got {counts}")
        return shards


def deliver(span: Span, array: Any) -> Callable[[], None] | None:
    """What copies a result into a strided array; None where the span is the array itself."""
    return None if span.owner is array else lambda: copy_back(span.owner, array)


def sum_of(counts: Sequence[int]) -> str:
    """How errors show counts: "4 ranks x 10", "10 + 0 + 7"."""
    if len(set(counts)) == 1:
        return f"{len(counts)} ranks x {counts[0]}"
    return " + ".join(map(str, counts))


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
        if array.flags.c_contiguous:
            return
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
    check_dtype(output, source)


def check_dtype(output: Span, source: Span) -> None:
    """Raise BufferError unless both have one dtype."""
    if output.dtype != source.dtype:
        raise BufferError(f"output is {output.dtype.spelling}, input {source.dtype.spelling}; expected the same dtype")


def check_whole(
    output: Span,
    source: Span,
    shards: Sequence[int],  # elements of each rank's
) -> None:
    """Raise BufferError unless output has as many elements as all shards, and source's dtype."""
    n_elems = sum(shards)
    check_output(output, source, n_elems, "" if output.n_elems == n_elems else sum_of(shards))


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
