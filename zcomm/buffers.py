"""Tensors and arrays seen as flat memory: address, count, dtype, device. No framework is imported here.

A torch, numpy or cupy object is recognised by what it offers, so `import zcomm` needs numpy only. A `Span` never owns
memory of its own: `owner` keeps the object it came from alive. float32, bfloat16, float16 and float64 are the dtypes
that collectives take; everything else is refused here, before any byte moves (docs/sharp-bits.md).
"""

from __future__ import annotations

import ctypes
import enum
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zcomm.errors import BufferError
from zcomm.streams import copy_on_device, is_torch


class DType(enum.IntEnum):
    """Element types that collectives take; the numbers are those of the C ABI (cpu/native.h)."""

    FLOAT32 = 0, 4
    BFLOAT16 = 1, 2
    FLOAT16 = 2, 2
    FLOAT64 = 3, 8

    itemsize: int  # bytes per element

    def __new__(cls, number: int, itemsize: int) -> DType:
        """A dtype that is the number."""
        dtype = int.__new__(cls, number)
        dtype._value_, dtype.itemsize = number, itemsize
        return dtype

    def __repr__(self) -> str:
        return f"DType.{self.name}"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype (bfloat16 from ml_dtypes)."""
        return _NUMPY[self]

    @property
    def spelling(self) -> str:
        """The dtype's name as numpy and torch both write it, e.g. "bfloat16"."""
        return self.name.lower()


_NUMPY = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT16: np.dtype(np.float16),
    DType.FLOAT64: np.dtype(np.float64),
}
_BY_NAME = {dtype.spelling: dtype for dtype in DType}
_BY_NUMPY = {dtype: kind for kind, dtype in _NUMPY.items()}  # in this machine's byte order; numpy spells names slowly


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
        return self.n_elems * self.dtype.itemsize

    def part(self, start: int, stop: int) -> Span:
        """Elements start to stop of this span, sharing its memory."""
        return self._replace(address=self.address + start * self.dtype.itemsize, n_elems=stop - start)


def span_of(
    array: Any,  # a torch tensor, numpy or cupy array of any shape and strides
    role: str,  # how errors call it: "input", "output"
) -> Span:
    """See an array as flat memory. The span's owner is the array itself, or a contiguous copy of a strided one.

    Raises BufferError for another kind of object, an integer, bool or complex dtype, a sparse or sub-classed tensor.
    """
    kind = type(array)
    read = _READERS.get(kind)
    if read is None:
        read = _READERS[kind] = _reader(array, role)
    try:
        return read(array, role)
    except (RuntimeError, NotImplementedError) as error:  # torch's own, from tensors that are not plain memory
        raise BufferError(f"{role} cannot be read as memory: {error}; expected a plain dense tensor") from error


def copy_back(result: Any, array: Any) -> None:
    """Write the elements of the contiguous result into the strided array it stands for."""
    if hasattr(array, "detach"):
        array.detach().copy_(result)
    else:
        array[...] = result


def tell_autograd(array: Any) -> None:
    """Say that an array will be written: a backward that has saved a torch tensor's values raises, as after mul_()."""
    if is_torch(array):
        sys.modules["torch"].autograd.graph.increment_version(array)


def copy_memory(source: Span, target: Span) -> None:
    """Copy source's elements to target, which has as many of the same dtype; on a GPU in its current stream's order."""
    if source.address == target.address:
        return
    if source.device == "cpu":
        ctypes.memmove(target.address, source.address, source.nbytes)
    else:
        copy_on_device(source.address, target.address, source.nbytes, source.device, is_torch(target.owner))


def overlap(a: Span, b: Span) -> bool:
    """Whether two spans share any byte."""
    return (
        a.device == b.device
        and a.address < b.address + b.nbytes
        and b.address < a.address + a.nbytes
        and a.n_elems > 0
        and b.n_elems > 0
    )


_READERS: dict[type, Any] = {}  # type of array -> how to read it; types, not values, so it stays small
_TORCH_DTYPES: dict[Any, DType] = {}  # torch.dtype objects met so far


def _reader(array: Any, role: str) -> Any:
    """Choose how arrays of this type are read. Raises BufferError if there is no way."""
    kind = type(array)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is np.ndarray:
        return _read_numpy
    if name in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"):
        return _read_torch
    if hasattr(array, "__cuda_array_interface__") and not hasattr(array, "data_ptr"):
        return _read_cuda_array
    if isinstance(array, np.ndarray):
        raise BufferError(
            f"{role} is a {name}, a subclass of numpy.ndarray whose elements may mean something else; "
            f"pass the plain array: numpy.asarray({role})"
        )
    if hasattr(array, "to_local"):
        raise BufferError(f"{role} is a {kind.__name__}; pass the local tensor: .to_local()")
    if hasattr(array, "trigger_wait"):  # of torch's functional collectives
        raise BufferError(f"{role} is a {kind.__name__}, which may be under way; pass the plain tensor: .wait()")
    if hasattr(array, "data_ptr"):
        raise BufferError(
            f"{role} is a {kind.__name__}, a subclass of torch.Tensor whose bytes may mean something else; "
            "pass a plain torch.Tensor"
        )
    raise BufferError(f"{role} is a {name}; expected a torch.Tensor, numpy.ndarray or cupy.ndarray")


def _read_torch(tensor: Any, role: str) -> Span:
    dtype = _TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        dtype = _TORCH_DTYPES[tensor.dtype] = _dtype_named(str(tensor.dtype).removeprefix("torch."), role)
    if str(tensor.layout) != "torch.strided":
        raise BufferError(f"{role} has layout {tensor.layout}; expected a dense tensor: .to_dense()")
    if tensor.is_nested:
        raise BufferError(f"{role} is a nested tensor, whose rows differ in size; pass a list: .unbind()")
    if not tensor.is_contiguous() or tensor.is_neg():  # a view may hold the sign as a flag
        tensor = tensor.detach().resolve_neg().contiguous()
    address, n_elems = tensor.data_ptr(), tensor.numel()
    if not address and n_elems and not tensor.is_meta:
        raise BufferError(
            f"{role} of shape {tuple(tensor.shape)} has no memory; expected an ordinary tensor, not freed"
        )
    return Span(address, n_elems, dtype, "cpu" if tensor.is_cpu else str(tensor.device), tensor)


def _read_numpy(array: np.ndarray, role: str) -> Span:
    dtype = _BY_NUMPY.get(array.dtype)
    if dtype is None:
        dtype = _dtype_named(array.dtype.name, role)
        if not array.dtype.isnative:
            raise BufferError(
                f"{role} has byte order {array.dtype.byteorder!r}; expected this machine's own: "
                ".astype(array.dtype.newbyteorder('='))"
            )
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return Span(_start(array, dtype), array.size, dtype, "cpu", array)


def _start(array: Any, dtype: DType) -> int:
    """Where a contiguous array starts. numpy takes five times as long to say it as ctypes, which takes no bfloat16."""
    if array.flags.writeable and array.size and dtype is not DType.BFLOAT16:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return int(array.__array_interface__["data"][0])


def _read_cuda_array(array: Any, role: str) -> Span:
    dtype = _dtype_named(str(array.dtype), role)
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return Span(array.__cuda_array_interface__["data"][0], array.size, dtype, f"cuda:{array.device.id}", array)


def _dtype_named(name: str, role: str) -> DType:
    dtype = _BY_NAME.get(name)
    if dtype is None:
        known = ", ".join(_BY_NAME)
        if name.startswith("float"):  # too narrow to be summed in, or wider than what codecs compute in
            raise BufferError(
                f"{role} has dtype {name}; zcomm compresses {known}. Convert it to one of them first; float8 that "
                "is coded already travels as bytes, through torch.distributed or MPI"
            )
        raise BufferError(
            f"{role} has dtype {name}; zcomm compresses {known}. "
            "Integers, bools and complex numbers are never quantized: use torch.distributed or MPI for them"
        )
    return dtype
