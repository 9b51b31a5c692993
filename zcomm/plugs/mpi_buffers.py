"""mpi4py's ways of saying what memory a call means, read as arrays of floats: `x`, `[x, count]`, `[x, MPI.FLOAT]`,
`[x, count, MPI.FLOAT]`, `[x, (count, displacement), MPI.FLOAT]`.

A bare array may have any strides: its elements count in C order. In a list the memory counts, as MPI does it, so it
must be contiguous, in C's order or Fortran's. What holds no floats is `Other`, and goes to MPI as it came. v-forms have
counts and displacements for each rank in place of one. Datatypes of the program's own: mpi_datatypes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any, NamedTuple

import numpy as np

from zcomm.buffers import DType, span_of
from zcomm.collectives.arguments import check_writable
from zcomm.errors import BufferError, MissingExtra
from zcomm.plugs.mpi_datatypes import Places, dtype_of, element_dtype

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library
    raise MissingExtra(f"mpi4py cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'") from error

_FLOATS = {dtype.spelling for dtype in DType}
_NUMPY_FLOATS = {dtype.numpy for dtype in DType}  # in this machine's byte order


class Other(NamedTuple):
    """A message that zcomm does not compress."""

    what: str  # it holds: "int32", "MPI_INT"


def read(
    message: Any,  # as mpi4py takes it
    role: str,  # how errors call it
    n_blocks: int = 1,  # blocks of the count given that the memory holds: a gathered buffer has one from each rank
    is_counted: bool = False,  # whether the caller counts the elements, so that bytes may be left over
) -> Any:  # a numpy array, torch tensor or cupy array that shares the message's memory, or Other
    """The floats that a message means. Raises BufferError for what neither zcomm nor MPI can make sense of."""
    if not isinstance(message, (list, tuple)):
        array = _array(message)
        if isinstance(array, np.ndarray) and array.dtype in _NUMPY_FLOATS:  # numpy is slow to spell a name
            return array
        name = _dtype_name(array)
        return array if name in _FLOATS else Other(name)
    memory, count, displacement, datatype = _parts(message, role)
    array = _array(memory)
    name = _dtype_name(array)
    if datatype is not None and hasattr(array, "dtype"):
        dtype = dtype_of(datatype)
        if dtype is None:
            return Other(datatype.name or "a datatype of the program's own")
        array = _reinterpreted(array, dtype, role, is_counted or count is not None)
    elif name not in _FLOATS:
        return Other(name)
    flat = flattened(_in_memory_order(array), role)
    if count is None:
        return flat[displacement:]
    end = displacement + count * n_blocks
    if end > len(flat):
        raise BufferError(f"{role} holds {len(flat)} elements; expected {end} at least, by its count and displacement")
    return flat[displacement:end]


class Blocks(NamedTuple):
    """One block of memory for each rank."""

    whole: Any  # all blocks side by side, in rank order; None where they are not
    apart: list[Any]  # the blocks, where they are not side by side
    counts: tuple[int, ...] | None  # elements of each; None: all equal, and their number is whole's
    places: Places | None = None  # where they belong, if whole is a copy

    def each(self, size: int, role: str) -> list[Any]:
        """The blocks one by one. Raises BufferError where the memory is strided, or cannot be shared equally."""
        if self.apart:
            return self.apart
        flat = flattened(self.whole, role)
        if self.counts is None and len(flat) % size:
            raise BufferError(f"{role} has {len(flat)} elements, which {size} ranks cannot share equally")
        counts = (len(flat) // size,) * size if self.counts is None else self.counts
        starts = [0, *accumulate(counts)]
        return [flat[start:end] for start, end in pairwise(starts)]


def read_blocks(
    message: Any,  # as mpi4py takes it
    role: str,
    size: int,  # ranks
    vector: bool,  # as mpi4py's v-forms take it: counts and displacements for each rank
) -> Any:  # Blocks, or Other
    """The blocks that a message means, by mpi4py's rules: what is not said is shared as equally as it can be."""
    places = _places(message, role, size, vector)
    if places is not None:
        return Blocks(places.array, [], places.counts if vector else None, places)
    if not vector:
        array = read(message, role, size)
        return array if isinstance(array, Other) else Blocks(array, [], None)
    memory, counts, displacements, datatype = message, None, None, None
    if isinstance(message, (list, tuple)):
        memory, counts, displacements, datatype = _items(message, role)
    array = read(memory if datatype is None else [memory, datatype], role, is_counted=counts is not None)
    if isinstance(array, Other):
        return array
    flat = flattened(array, role)
    if counts is None:
        counts = [len(flat) // size + (len(flat) % size > rank) for rank in range(size)]
    counts = one_each(counts, size, role, "counts")
    starts = [0, *accumulate(counts)]
    displacements = _displacements(displacements, counts, size, role)
    ends = [at + count for at, count in zip(displacements, counts, strict=True)]
    if max(ends) > len(flat):
        raise BufferError(
            f"{role} holds {len(flat)} elements; expected {max(ends)} at least, by its counts and displacements"
        )
    if list(displacements) == starts[:-1]:
        return Blocks(flat[: starts[-1]], [], counts)
    return Blocks(None, [flat[at:end] for at, end in zip(displacements, ends, strict=True)], counts)


def read_part(
    message: Any,  # as mpi4py takes it
    role: str,
) -> tuple[Any, Places | None]:
    """As read(), also for datatypes of the program's own; and where the elements belong, if the array is a copy."""
    places = _places(message, role, 1, vector=False)
    return (read(message, role), None) if places is None else (places.array, places)


def _places(message: Any, role: str, size: int, vector: bool) -> Places | None:
    """Where the floats of a datatype of the program's own lie; None for other messages."""
    if not isinstance(message, (list, tuple)):
        return None
    datatype = _items(message, role)[3]
    if datatype is None or datatype == MPI.DATATYPE_NULL or datatype.is_predefined or datatype.extent <= 0:
        return None
    dtype = element_dtype(datatype)
    array = _array(message[0])
    if dtype is None or getattr(array, "is_cuda", False) or not hasattr(array, "dtype"):
        return None
    flat = flattened(_in_memory_order(array), role)
    address = flat.data_ptr() if hasattr(flat, "data_ptr") else flat.ctypes.data
    n_items = flat.nbytes // datatype.extent
    if role == "recvbuf":
        check_writable(array, role)
    counts, displacements = _items(message, role)[1:3]
    if not vector:
        _, count, first, _ = _parts(message, role)
        count = (n_items - first) // size if count is None else count
        counts, displacements = [count] * size, [first + rank * count for rank in range(size)]
    else:
        if counts is None:
            counts = [n_items // size + (n_items % size > rank) for rank in range(size)]
        counts = one_each(counts, size, role, "counts")
        displacements = _displacements(displacements, counts, size, role)
    return Places(message[0], address, counts, displacements, datatype, dtype, is_target=role == "recvbuf")


def _displacements(given: Any, counts: Sequence[int], size: int, role: str) -> Sequence[int]:
    """Of each block: as given, a number alone being the distance of one from the next; else one after the other."""
    if given is None:
        return [0, *accumulate(counts)][:-1]
    if not hasattr(given, "__len__"):
        return [rank * _whole(given, role, "displacement") for rank in range(size)]
    found = [_whole(number, role, "displacements") for number in given]
    if len(found) == size:
        starts = accumulate(counts, initial=0)  # of a block of nothing it does not matter where it lies
        found = [at if count else start for at, count, start in zip(found, counts, starts, strict=False)]
    return one_each(found, size, role, "displacements")


def one_each(numbers: Any, size: int, role: str, what: str) -> tuple[int, ...]:
    """Whole numbers of 0 or more, one for each rank; a number alone is everyone's. Raises BufferError for others."""
    given = tuple(numbers) if hasattr(numbers, "__len__") else (numbers,) * size
    found = tuple(_whole(number, role, what) for number in given)
    if len(found) != size or min(found) < 0:
        raise BufferError(f"{role} has {what} {list(found)}; expected {size} of 0 or more, one for each rank")
    return found


def _whole(number: Any, role: str, what: str) -> int:
    """A number that counts elements. Raises BufferError for 2.5 and 2.0 alike, as a half may be meant by another."""
    try:
        return index(number)
    except TypeError:
        raise BufferError(f"{role} has {what} {number!r}; expected whole numbers") from None


def flattened(array: Any, role: str) -> Any:
    """The array as one dimension of the same memory. Raises BufferError if it is not contiguous."""
    if not _is_contiguous(array, role):
        raise BufferError(f"{role} is strided where memory counts; pass the array alone, not in place, or contiguous")
    return array.reshape(-1)


def _is_contiguous(array: Any, role: str) -> bool:
    """Whether the elements lie side by side in C order. Raises BufferError for what is no array."""
    if hasattr(array, "is_contiguous"):
        return bool(array.is_contiguous())
    if not hasattr(getattr(array, "flags", None), "c_contiguous"):
        span_of(array, role)  # says what it is and what was expected
    return bool(array.flags.c_contiguous)


def _in_memory_order(array: Any) -> Any:
    """An array whose elements lie in Fortran order, with its dimensions turned round; others as they are."""
    if hasattr(array, "permute"):
        turned = array.permute(*reversed(range(array.ndim)))
        return turned if turned.is_contiguous() else array
    return array.T if getattr(getattr(array, "flags", None), "f_contiguous", False) else array


def _parts(message: Any, role: str) -> tuple[Any, int | None, int, Any]:
    """memory, count, displacement, datatype of a list."""
    memory, count, displacement, datatype = _items(message, role)
    if isinstance(count, list) and len(count) == 2 and displacement is None:
        count, displacement = count
    count = None if count is None else _whole(count, role, "count")
    displacement = 0 if displacement is None else _whole(displacement, role, "displacement")
    if displacement < 0 or (count is not None and count < 0):
        raise BufferError(f"{role} has count {count} and displacement {displacement}; expected none below 0")
    return memory, count, displacement, datatype


def _items(message: Any, role: str) -> tuple[Any, Any, Any, Any]:
    """memory, counts, displacements, datatype of a list, with mpi4py's rules for what may be left out."""
    n = len(message)
    memory, counts, displacements, datatype = None, None, None, None
    if n == 2 and isinstance(message[1], (str, MPI.Datatype)):
        memory, datatype = message
    elif n == 2:
        memory, counts = message
    elif n == 3:
        memory, counts, datatype = message
    elif n == 4:
        memory, counts, displacements, datatype = message
    else:
        raise BufferError(f"{role} is a list of {n} items; expected 2 to 4: [array, count, displacement, datatype]")
    if isinstance(counts, tuple) and len(counts) == 2 and displacements is None:
        counts, displacements = counts
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    return memory, counts, displacements, datatype


def _array(memory: Any) -> Any:
    """The memory as an array; anything with Python's buffer protocol as numpy's."""
    if isinstance(memory, np.ma.MaskedArray):  # refused by name later: MPI would send what the mask hides
        return memory
    if isinstance(memory, np.ndarray):  # a memmap, a matrix: as plain memory
        return memory if type(memory) is np.ndarray else memory.view(np.ndarray)
    if isinstance(memory, np.generic):  # one number, which cannot be written
        array = np.asarray(memory)
        array.flags.writeable = False
        return array
    if hasattr(memory, "dtype"):
        return memory
    if memory is None:  # of no elements
        return np.empty(0, np.float32)
    try:
        return np.asarray(memoryview(memory))
    except (TypeError, ValueError):  # no memory, or a format that numpy does not know
        return memory


def _dtype_name(array: Any) -> str:
    """As numpy and torch both write it."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        return f"a {type(array).__name__}"
    return str(getattr(dtype, "name", None) or dtype).removeprefix("torch.")


def _reinterpreted(
    array: Any,
    dtype: DType,
    role: str,
    is_counted: bool,  # whether a count says how many elements are meant
) -> Any:
    """The memory of an array as elements of dtype; the array itself where it has that dtype."""
    if _dtype_name(array) == dtype.spelling:
        return array
    if not isinstance(array, np.ndarray):
        raise BufferError(f"{role} is {_dtype_name(array)}, its datatype {dtype.spelling}; expected the same")
    flat = flattened(_in_memory_order(array), role).view(np.uint8)
    left_over = flat.size % dtype.itemsize
    if left_over and not is_counted:
        raise BufferError(f"{role} has {flat.size} bytes; expected a multiple of {dtype.itemsize}, as {dtype.spelling}")
    return flat[: flat.size - left_over].view(dtype.numpy)
