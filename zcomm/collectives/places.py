"""Whether arrays of any strides share memory. Columns of one matrix lie among each other and have no byte in common."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from zcomm.streams import is_torch

Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides in bytes, bytes of an element
Place = tuple[int, Layout]  # address of the first element, and how the others lie

_SOMEWHERE = 1 << 62  # no memory is read


def some_share_memory(
    arrays: list[Any],  # torch, numpy or cupy arrays on one device; none of them empty
) -> bool:
    """Whether a byte is in two arrays."""
    places = [_place(array) for array in arrays]
    origin = min(address for address, _ in places)
    return _some_meet(tuple((address - origin, layout) for address, layout in places))


def _place(array: Any) -> Place:
    if is_torch(array):
        itemsize = array.element_size()
        return array.data_ptr(), (tuple(array.shape), tuple(stride * itemsize for stride in array.stride()), itemsize)
    address = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return address, (array.shape, array.strides, array.itemsize)


@lru_cache(maxsize=256)  # programs make the same call again and again, and the number of pairs is quadratic
def _some_meet(places: tuple[Place, ...]) -> bool:
    earlier: list[tuple[int, Place]] = []  # the end and the place of arrays whose memory may reach the next one
    for (start, end), place in sorted((_bounds(place), place) for place in places):
        earlier = [(their_end, theirs) for their_end, theirs in earlier if their_end > start]
        if any(np.shares_memory(_described(theirs), _described(place)) for _, theirs in earlier):
            return True
        earlier.append((end, place))
    return False


def _bounds(place: Place) -> tuple[int, int]:
    """The first byte, and the one behind the last."""
    address, (shape, strides, itemsize) = place
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    least, most = sum(min(0, each) for each in reach), sum(max(0, each) for each in reach)
    return address + least, address + most + itemsize


def _described(place: Place) -> np.ndarray:
    address, (shape, strides, itemsize) = place
    data = (_SOMEWHERE + address, True)
    interface = {"data": data, "shape": shape, "strides": strides, "typestr": f"|V{itemsize}", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))
