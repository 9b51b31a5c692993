"""Promise 3: any shape, count and strides, any number of ranks; inputs are never modified."""

from __future__ import annotations

import ctypes

import forms
import numpy as np
import pytest
from planted import assert_noticed, faults

from zcomm import buffers
from zcomm.collectives import arguments, communicator
from zcomm.collectives.run import Run

SHAPES = [(), (0,), (1,), (7,), (2, 3), (1, 5, 1), (3, 0, 2), (2, 1, 3, 1, 4)]


def strided(shape: tuple[int, ...], x: float) -> np.ndarray:
    """Values that depend on position, each in the middle of three."""
    view = np.full((*shape, 3), -1.0, np.float32)[..., 1]
    view[...] = np.arange(view.size).reshape(shape) + x
    return view


def check(placement: str) -> None:
    size = forms.PLACEMENTS[placement].size

    def program(comm):
        for shape in SHAPES:
            for make in (lambda shape, x: strided(shape, x).copy(), strided):
                x = make(shape, comm.rank)
                comm.all_reduce(x, "sum", "raw")
                wanted = size * strided(shape, 0).copy() + sum(range(size))
                assert x.shape == shape
                assert np.array_equal(x, wanted), shape
                source, out = make(shape, comm.rank), make((size, *shape), 0)
                before = source.copy()
                comm.all_gather_single(out, source, "raw")
                assert np.array_equal(out, np.stack([strided(shape, rank) for rank in range(size)])), shape
                assert np.array_equal(source, before), "the input was modified"
        for n in (1, 2, 37):
            for name, form in forms.FORMS.items():
                inputs = [strided((n * size,), rank).copy() for rank in range(size)]
                got = forms.carry_out(form(comm, inputs[comm.rank], "sum", np.copy), codec="raw")
                assert np.array_equal(got, forms.exact(name, inputs, comm.rank)), (name, n)

    forms.run(placement, program, check="never")


@pytest.mark.parametrize("placement", forms.PLACEMENTS)
def test_any_shape_strides_and_world_is_right_and_inputs_stay(placement):
    check(placement)


def strides_are_not_looked_at(monkeypatch):
    def read(array, role):
        address = array.__array_interface__["data"][0]
        return buffers.Span(address, array.size, buffers.DType.FLOAT32, "cpu", array)

    monkeypatch.setattr(arguments, "span_of", read)


def results_are_not_copied_back(monkeypatch):
    monkeypatch.setattr(communicator, "deliver", lambda span, array: None)


def an_input_is_written_to(monkeypatch):
    encode = Run.encode

    def careless(self, codec, pieces):
        encode(self, codec, pieces)
        source = self._source
        if source.n_elems and source.address != self._target.address:
            memory = (ctypes.c_uint8 * source.nbytes).from_address(source.address)
            memory[source.nbytes - 1] ^= 0x40

    monkeypatch.setattr(Run, "encode", careless)


@faults(strides_are_not_looked_at, results_are_not_copied_back, an_input_is_written_to)
def test_a_product_that_breaks_it_is_found(fault, monkeypatch):
    assert_noticed(lambda: check("2"), fault, monkeypatch)
