"""Datatypes of the program's own that are made of floats of one kind: columns, subarrays, structures.

MPI asks of ranks only that they mean the same elements: the root may gather into columns what others send as plain
arrays. So what zcomm does with a call must not depend on the datatype, which other ranks do not know: such elements are
laid side by side before the call, and put in their places after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import MissingExtra

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library
    raise MissingExtra(f"mpi4py cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'") from error

_BY_TYPESTR = {"f2": DType.FLOAT16, "f4": DType.FLOAT32, "f8": DType.FLOAT64}


def dtype_of(datatype: Any) -> DType | None:
    """The float dtype of a datatype that MPI brings, or None."""
    if not datatype.is_predefined:
        return None
    if datatype == getattr(MPI, "BFLOAT16_T", MPI.DATATYPE_NULL) != MPI.DATATYPE_NULL:
        return DType.BFLOAT16
    return _BY_TYPESTR.get(datatype.typestr)


def element_dtype(datatype: Any) -> DType | None:
    """The one float dtype of all elements of a datatype, or None."""
    if datatype == MPI.DATATYPE_NULL or datatype.is_predefined:
        return None if datatype == MPI.DATATYPE_NULL else dtype_of(datatype)
    base, _, parameters = datatype.decode()
    found = {element_dtype(part) for part in parameters.get("datatypes", [base])}
    for part in (base, *parameters.get("datatypes", [])):
        if not part.is_predefined:
            part.Free()  # decode() makes new ones
    return found.pop() if len(found) == 1 else None


class Places:
    """Where the elements of a message lie: blocks of a datatype's items, at displacements from an address."""

    def __init__(
        self,
        memory: Any,  # kept
        address: int,  # of memory
        counts: Sequence[int],  # items of each block
        displacements: Sequence[int],  # of each block, in extents of the datatype
        datatype: Any,  # element_dtype() is dtype
        dtype: DType,
        is_target: bool,  # whether deliver() will be called
    ) -> None:
        self._memory = memory
        self._address = address
        self._datatype = datatype.Dup() if is_target else datatype  # a program may free its own during a call
        if is_target:
            weakref.finalize(self, _free, self._datatype)  # also where the call is refused
        self._blocks = list(zip(counts, displacements, strict=True))
        self.counts = tuple(count * (datatype.size // dtype.itemsize) for count in counts)  # elements
        self.array = np.empty(sum(self.counts), dtype.numpy)  # side by side
        for there, here in self._pairs():
            self._datatype.Pack(there, here, 0, MPI.COMM_SELF)

    def deliver(self) -> None:
        """Put what stands in array in its places. Once."""
        for there, here in self._pairs():
            self._datatype.Unpack(here, 0, there, MPI.COMM_SELF)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """The memory of each block, and its elements in array, as bytes."""
        packed, at, extent = self.array.view(np.uint8), 0, self._datatype.extent
        for count, displacement in self._blocks:
            end = at + count * self._datatype.size
            if end > at:
                address = self._address + displacement * extent
                yield MPI.memory.fromaddress(address, count * extent), packed[at:end]
            at = end


def _free(datatype: Any) -> None:
    if not MPI.Is_finalized():
        datatype.Free()
