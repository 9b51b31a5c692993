"""Whether arrays of any strides share memory, against a count of who writes each byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from zcomm.collectives.packing import _some_share_memory

N_BYTES = 60


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, shape and strides of a view of N_BYTES bytes."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    strides = tuple(draw(st.integers(-7, 7).filter(bool)) for _ in shape)
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    least, most = -sum(min(0, each) for each in reach), N_BYTES - 1 - sum(max(0, each) for each in reach)
    return draw(st.integers(least, most)), shape, strides


@given(st.lists(views(), min_size=1, max_size=4))
def test_it_is_found_exactly_where_two_write_one_byte(places):
    memory, writers = np.zeros(N_BYTES, np.uint8), np.zeros(N_BYTES, int)
    arrays = [as_strided(memory[offset:], shape, strides) for offset, shape, strides in places]
    for array in arrays:
        memory[...] = 0
        array[...] = 1
        writers += memory

    assert _some_share_memory(arrays) == (writers.max() > 1)


def test_torch_s_strides_are_in_elements():
    torch = pytest.importorskip("torch")
    matrix = torch.zeros(5, 7, dtype=torch.bfloat16)

    assert not _some_share_memory([matrix[:, column] for column in range(7)])
    assert not _some_share_memory([matrix.t()[1], matrix[:, 2], matrix[:, 3:]])
    assert _some_share_memory([matrix.t()[1], matrix[:, 1]])
    assert _some_share_memory([matrix[:, :3], matrix[4, 2:4]])
