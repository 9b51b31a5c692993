"""Element types: what comes in goes out, through every form; integers, bools, complex and tiny floats are refused."""

from __future__ import annotations

import forms
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch

import zcomm
from zcomm.buffers import DType
from zcomm.errors import BufferError

TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
REFUSED_NUMPY = (
    *(np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.bool_),
    *(np.complex64, np.complex128, np.longdouble, np.datetime64, np.str_, np.object_),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
)
REFUSED_TORCH = (
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2),
)


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.spelling)
@pytest.mark.parametrize("placement", ["3", "2x2"])
def test_every_form_gives_the_dtype_it_was_given(placement, dtype):
    size = forms.PLACEMENTS[placement].size

    def program(comm):
        for name, form in forms.FORMS.items():
            for codec, asynchronous in (("raw", True), ("fp16", False), ("int8", True)):
                inputs = [oracle.values(rank, 12 * size, dtype.numpy) for rank in range(size)]
                case = form(comm, inputs[comm.rank], "avg", np.copy)
                got = forms.carry_out(case, asynchronous, codec=codec)
                assert all(array.dtype == dtype.numpy for array in case.written), (name, codec)
                wanted = forms.exact(name, inputs, comm.rank, 1 / size if name in forms.REDUCING else 1)
                assert got.shape == wanted.shape
                assert np.allclose(got.astype(np.float64), wanted, atol=0.2, rtol=0.02), (name, codec)

    forms.run(placement, program, check="never")


@pytest.mark.parametrize("dtype", list(TORCH), ids=lambda dtype: dtype.spelling)
def test_torch_tensors_are_what_arrays_are_and_keep_their_kind(dtype):
    def program(comm):
        for name, form in forms.FORMS.items():
            x = oracle.values(comm.rank, 12 * comm.size, np.dtype(np.float32))
            as_torch = lambda values: torch.from_numpy(values.astype(np.float32)).to(TORCH[dtype])
            as_numpy = lambda values: values.astype(dtype.numpy)
            case = form(comm, x, "sum", as_torch)
            got = forms.carry_out(case, codec="int8")
            wanted = forms.carry_out(form(comm, x, "sum", as_numpy), codec="int8")
            assert got.astype(np.float32).tobytes() == wanted.astype(np.float32).tobytes(), name
            for tensor in case.written:
                assert tensor.dtype == TORCH[dtype]
                assert tensor.device.type == "cpu"
                assert not tensor.requires_grad
                assert type(tensor) is torch.Tensor

    forms.run("3", program, check="never")


def test_what_is_no_float_is_refused_in_every_form_before_a_byte_moves():
    def program(comm):
        before = comm._transport.wire_bytes_sent
        for codec in ("raw", "int8"):
            for name, form in forms.FORMS.items():
                for refused in (*REFUSED_NUMPY, *REFUSED_TORCH):
                    is_torch = isinstance(refused, torch.dtype)

                    def make(x, refused=refused, is_torch=is_torch):
                        return torch.zeros(x.size).to(refused) if is_torch else np.zeros(x.size, refused)

                    case = form(comm, np.ones(4 * comm.size, np.float32), "sum", make)
                    arrays = [*case.written, *case.read]
                    assert arrays or name
                    if arrays:
                        with pytest.raises(BufferError, match=r"dtype|type"):
                            case.call(codec=codec)
        assert comm._transport.wire_bytes_sent == before

    forms.run("1", program)  # every rank checks its own arguments, so one rank tells
    forms.run("2", lambda comm: _all_ranks_refuse(comm))


def _all_ranks_refuse(comm) -> None:
    with pytest.raises(BufferError, match="uint8") as caught:
        comm.all_reduce(np.full(3, 200, np.uint8))
    assert "never quantized" in str(caught.value)


def test_two_dtypes_in_one_call_are_refused_where_they_must_be_one():
    def program(comm):
        full, half = np.ones(4, np.float32), np.ones(4 * comm.size, np.float16)
        for call in (
            lambda: comm.all_gather_single(half, full),
            lambda: comm.reduce_scatter_single(full, half),
            lambda: comm.all_to_all_single(np.ones(4 * comm.size, np.float32), half),
            lambda: comm.all_reduce(full, output=np.ones(4, np.float64)),
            lambda: comm.reduce_scatter(full, [np.ones(4, np.float16)] * comm.size),
        ):
            with pytest.raises(BufferError, match="same dtype"):
                call()

    forms.run("2", program)


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16", "fp16", "mxfp4", "nvfp4", "fp8_e4m3", "hadamard:int4"])
def test_every_dtype_costs_the_same_bytes(codec):
    def program(comm):
        sent = []
        for dtype in DType:
            for name in ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast"):
                before = comm._transport.wire_bytes_sent
                x = np.ones(1037 * comm.size, dtype.numpy)
                forms.carry_out(forms.FORMS[name](comm, x, "sum", np.copy), codec=codec)
                sent.append((name, comm._transport.wire_bytes_sent - before))
        return sent

    for sent in forms.run("2x2", program, check="never", one_shot_bytes=0):
        n = len(sent) // len(DType)
        assert all(sent[i * n : (i + 1) * n] == sent[:n] for i in range(len(DType)))


# -- over gloo and MPI ------------------------------------------------------------------------------------------------


def check_gloo_dtypes() -> None:
    """gloo sums uint8 with wrap-around and moves no float8; zcomm moves bytes and adds itself."""
    import torch.distributed as dist

    rank = dist.get_rank()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.full((300,), 200.0 + rank, dtype=dtype)
        zcomm.all_reduce(x, codec="raw")
        assert x.dtype == dtype
        assert (x == 806).all() or dtype is torch.bfloat16
        assert torch.allclose(x.float(), torch.full((300,), 806.0), rtol=0.01)
        out = torch.empty(1200, dtype=dtype)
        work = zcomm.all_gather_single(out, torch.full((300,), float(rank), dtype=dtype), codec="int8", async_op=True)
        work.wait()
        assert torch.allclose(out.float().reshape(4, -1), torch.arange(4.0)[:, None], rtol=0.01)
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.int64):
        with pytest.raises(BufferError, match=str(dtype).removeprefix("torch.")):
            zcomm.all_reduce(torch.ones(3).to(dtype), codec="raw")


def test_gloo_carries_every_float(torch_world):
    torch_world.run(check_gloo_dtypes)


def test_floats_that_are_not_taken_are_not_called_integers():
    for other in (torch.ones(4).to(torch.float8_e4m3fn), np.ones(4, np.longdouble)):
        with pytest.raises(BufferError, match=r"has dtype float\d+.*Convert it to one of them") as caught:
            zcomm.local.run(2, lambda transport, x=other: zcomm.Communicator(transport).all_reduce(x))
        assert "Integers" not in str(caught.value)
