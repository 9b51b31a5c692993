"""Whether arrays of any strides share memory, against a count of who writes each byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from zcomm.collectives.places import some_share_memory

N_BYTES = 60


@st.composite
def views(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Offset, bytes of an element, shape and strides of a view of N_BYTES bytes."""
    itemsize = draw(st.sampled_from([1, 4]))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    strides = tuple(draw(st.integers(-7, 7).filter(bool)) for _ in shape)
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    least, most = -sum(min(0, each) for each in reach), N_BYTES - itemsize - sum(max(0, each) for each in reach)
    return draw(st.integers(least, most)), itemsize, shape, strides


@given(st.lists(views(), min_size=1, max_size=4))
def test_it_is_found_exactly_where_two_write_one_byte(places):
    memory, writers = np.zeros(N_BYTES, np.uint8), np.zeros(N_BYTES, int)
    arrays = []
    for offset, itemsize, shape, strides in places:
        memory[...] = 0
        arrays.append(as_strided(memory[offset : offset + itemsize].view(f"V{itemsize}"), shape, strides))
        arrays[-1][...] = np.void(b"\1" * itemsize)
        writers += memory

    assert some_share_memory(arrays) == (writers.max() > 1)


def test_torch_s_strides_are_in_elements():
    torch = pytest.importorskip("torch")
    matrix = torch.zeros(5, 7, dtype=torch.bfloat16)

    assert not some_share_memory([matrix[:, column] for column in range(7)])
    assert not some_share_memory([matrix.t()[1], matrix[:, 2], matrix[:, 3:]])
    assert some_share_memory([matrix.t()[1], matrix[:, 1]])
    assert some_share_memory([matrix[:, :3], matrix[4, 2:4]])
