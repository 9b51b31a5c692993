"""The protocol of a codec: a frozen value that says what the bytes of n elements are (docs/wire-format.md).

A codec compares, prints and parses from its own string. Its encode and decode are the numpy definition that
every engine must match byte for byte; collectives never call them, they ask an engine.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.draw import Draw

WIRE_ALIGNMENT = 16  # every encoded chunk is padded with zero bytes to a multiple of this


def padded(nbytes: int) -> int:
    """Round nbytes up to the wire's alignment."""
    return -(-nbytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


@runtime_checkable
class Codec(Protocol):
    """What the bytes of one chunk are. Implementations are frozen dataclasses."""

    def __str__(self) -> str:
        """The shortest spelling that `registry.codec` parses back to an equal value."""
        ...

    def __hash__(self) -> int:
        """Codecs are keys: equal codecs hash alike."""
        ...

    @property
    def block(self) -> int:
        """Elements that share anything, such as a scale: chunks are cut between blocks. 1 where none do."""
        ...

    @property
    def dtype(self) -> DType | None:
        """The dtype on the wire, where a chunk is elements and padding, as in raw and cast; None where it is codes."""
        ...

    @property
    def by_chance(self) -> bool:
        """Whether encoding needs a draw."""
        ...

    @property
    def holds_sums(self) -> bool:
        """Whether it holds the sum of what it holds: fp16 does not, so a mean is divided before its second hop."""
        ...

    def for_dtype(self, dtype: DType) -> Codec:
        """The codec that carries elements of this dtype: itself; for raw, the raw of that dtype."""
        ...

    def nbytes(self, n_elems: int) -> int:
        """Wire bytes of a chunk of n_elems >= 0 elements, a multiple of WIRE_ALIGNMENT; 0 for 0."""
        ...

    def encode(
        self,
        x: np.ndarray,  # (n,), float32 (raw: its own dtype)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # the random bits, for a codec that rounds by chance; others ignore it
    ) -> None:
        """Turn x into wire bytes. Raises CodecError if out has another size, or a draw is needed and missing."""
        ...

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # (n,), float32 (raw: its own dtype), written
    ) -> None:
        """Turn wire bytes into elements. Raises CodecError if wire has another size."""
        ...

    def error_bound(
        self,
        x: np.ndarray,  # (n,) float32
    ) -> np.ndarray:  # float64 (n,)
        """Largest |decode(encode(x)) - x| of each element, unnarrowed; inf where its block is not finite."""
        ...


_Self = TypeVar("_Self", bound="Quantizer")


class Quantizer:
    """What codecs of codes have in common, for them to inherit: the wire does not depend on the elements' dtype."""

    __slots__ = ()
    dtype: ClassVar[DType | None] = None
    holds_sums: ClassVar[bool] = True

    @property
    def by_chance(self) -> bool:
        """Nothing is left to chance, unless the codec says so."""
        return False

    def for_dtype(self: _Self, dtype: DType) -> _Self:
        """Itself."""
        return self


class Carried:
    """What raw and cast have in common, for them to inherit: a chunk is elements of one dtype, and padding."""

    __slots__ = ()

    if TYPE_CHECKING:  # a dataclass would take what it inherits for its field's default

        @property
        def dtype(self) -> DType:
            """The dtype of the elements on the wire."""

    @property
    def block(self) -> int:
        """No elements share anything."""
        return 1

    @property
    def by_chance(self) -> bool:
        """Nothing is left to chance."""
        return False

    @property
    def holds_sums(self) -> bool:
        """Whether the wire's dtype has float32's range."""
        return self.dtype is not DType.FLOAT16


def check_chunk(
    codec: Codec,
    elements: np.ndarray,  # (n,) of dtype
    dtype: DType,
    wire: np.ndarray,  # uint8 (codec.nbytes(n),)
) -> None:
    """Raise CodecError unless the two arrays are the two sides of one chunk of this codec."""
    for side, array in (("elements", elements), ("wire bytes", wire)):
        if not isinstance(array, np.ndarray):
            raise CodecError(
                f"{codec} takes its {side} as a numpy array, got a {type(array).__name__}; pass "
                "numpy.asarray(...) or tensor.numpy(); the collectives take tensors as they are"
            )
    if elements.ndim != 1 or elements.dtype != dtype.numpy or not elements.flags.c_contiguous:
        raise CodecError(
            f"{codec} takes a contiguous {dtype.spelling} array of one dimension, "
            f"got {elements.dtype} of shape {elements.shape}; pass np.ascontiguousarray(x, ...).reshape(-1)"
        )
    nbytes = codec.nbytes(elements.size)
    if wire.dtype != np.uint8 or wire.shape != (nbytes,) or not wire.flags.c_contiguous:
        raise CodecError(
            f"{codec} holds {elements.size} elements in {nbytes} bytes, "
            f"got wire bytes as {wire.dtype} of shape {wire.shape}; pass np.empty({nbytes}, np.uint8)"
        )


def checked_count(n_elems: Any) -> int:
    """A count as Python's int: a numpy integer of 32 bits would wrap where it becomes bytes.

    Raises CodecError for a count no chunk can have.
    """
    try:
        count = index(n_elems)
    except TypeError as error:
        raise CodecError(f"a chunk holds a whole number of elements, got {n_elems!r}; pass x.size, say") from error
    if count < 0:
        raise CodecError(f"a chunk holds 0 or more elements, got {n_elems}")
    return count
