"""Promise 4: shape and dtype in = out, on every path: synchronous or not, single, list and mixed."""

from __future__ import annotations

import forms
import ml_dtypes
import numpy as np
import pytest
from planted import assert_noticed, faults

from zcomm.buffers import DType
from zcomm.collectives import packing

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


def check() -> None:
    def program(comm):
        for asynchronous in (False, True):
            for codec in ("raw", "int8"):
                for name, form in forms.FORMS.items():
                    for dtype in DTYPES:
                        x = (np.arange(8 * comm.size) % 5 + 1).astype(dtype)
                        case = form(comm, x, "avg", lambda values: values.reshape(1, -1, 1).copy())
                        before = [(array.shape, array.dtype) for array in case.written]
                        forms.carry_out(case, asynchronous, codec=codec)
                        assert [(array.shape, array.dtype) for array in case.written] == before, name
                mixed = [
                    np.full((2, 3), 1 + 2**-20, np.float32),
                    np.full((), 1 + 2**-40, np.float64),
                    np.full((4, 1), 3, np.float16),
                ]
                before = [array.copy() for array in mixed]
                work = comm.all_reduce_coalesced(mixed, "avg", codec, asynchronous)
                if asynchronous:
                    work.wait()
                for array, was in zip(mixed, before, strict=True):
                    assert (array.shape, array.dtype) == (was.shape, was.dtype)
                    if codec == "raw":  # each keeps the precision of its own dtype
                        assert np.array_equal(array, was)

    forms.run("2x2", program, check="never")


def test_every_path_keeps_shape_and_dtype():
    check()


def mixed_lists_take_the_first_dtype(monkeypatch):
    monkeypatch.setattr(packing, "_common", lambda dtypes: dtypes[0])


def mixed_lists_go_through_float16(monkeypatch):
    monkeypatch.setattr(packing, "_common", lambda dtypes: dtypes[0] if len(set(dtypes)) == 1 else DType.FLOAT16)


def results_of_lists_are_spread_one_place_too_far(monkeypatch):
    def spread(self):
        for (part, _), array in zip(self._parts(), (*self._arrays[1:], self._arrays[0]), strict=True):
            array.reshape(-1)[...] = np.resize(part, array.size)

    monkeypatch.setattr(packing.Packed, "spread", spread)


@faults(mixed_lists_take_the_first_dtype, mixed_lists_go_through_float16, results_of_lists_are_spread_one_place_too_far)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(check, fault, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_an_array_of_another_dtype_is_never_returned_in_its_place(dtype):
    """By construction: results go into the caller's memory, whose dtype nobody can change; here is its address."""

    def program(comm):
        x = np.ones(100, dtype)
        address = x.__array_interface__["data"][0]
        assert comm.all_reduce(x, "avg") is None
        assert x.__array_interface__["data"][0] == address
        assert np.allclose(x.astype(float), 1, rtol=0.01)

    forms.run("2", program)
