"""hadamard: another codec behind a rotation that spreads outliers over their neighbours. "hadamard:int4", say.

    chunk:   the inner codec's chunk of the rotated elements; their count is n rounded up to a multiple of 32
    rotate:  y = H x / 32 in groups of 32, H the 32 x 32 Walsh-Hadamard matrix of +1 and -1 in natural order; missing
             elements of the last group are 0. back: x = H y

H is symmetric and H H = 32, so the two undo each other; 1/32 is a power of two, hence exact, and keeps every sum in
range. The rotation commutes with sums: chunks are added as they are and rotated back once (`inner`; engines do so).
Source: SDP4Bit (Jia et al., NeurIPS 2024, arXiv 2410.15526), whose 1 / sqrt(32) on either side is not exact. Same
names in cuda/hadamard.cuh; rules in docs/wire-format.md, hadamard.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.codec import Codec, Quantizer, check_chunk, checked_count
from zcomm.wire.draw import Draw

GROUP = 32  # elements that are rotated together


@dataclass(frozen=True, slots=True)
class Hadamard(Quantizer):
    """A block codec of rotated elements."""

    inner: Codec

    def __post_init__(self) -> None:
        block = self.inner.block
        if block == 1 or isinstance(self.inner, Hadamard):
            raise CodecError(f"hadamard wraps a codec with blocks, got {self.inner}; use hadamard:int4 or the like")
        if block % GROUP and GROUP % block:
            raise CodecError(f"hadamard needs a block that divides {GROUP} or is a multiple of it, got {self.inner}")

    def __str__(self) -> str:
        return f"hadamard:{self.inner}"

    @property
    def block(self) -> int:
        """Elements that share anything: a scale, a rotation or both."""
        return max(GROUP, self.inner.block)

    @property
    def by_chance(self) -> bool:
        """Where the inner codec needs random bits."""
        return self.inner.by_chance

    def n_rotated(self, n_elems: int) -> int:
        """Elements of the inner codec's chunk."""
        return -(-n_elems // GROUP) * GROUP

    def nbytes(self, n_elems: int) -> int:
        """The inner codec's bytes."""
        n_elems = checked_count(n_elems)
        return self.inner.nbytes(self.n_rotated(n_elems))

    def encode(
        self,
        x: np.ndarray,  # float32 (n,)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # for an inner codec that rounds by chance; rotated elements count like elements
    ) -> None:
        """Rotate x and encode that. Raises CodecError if out has another size."""
        check_chunk(self, x, DType.FLOAT32, out)
        self.inner.encode(rotated(x), out, draw)

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # float32 (n,), written
    ) -> None:
        """Decode and rotate back. Raises CodecError if wire has another size."""
        check_chunk(self, out, DType.FLOAT32, wire)
        y = np.empty(self.n_rotated(out.size), np.float32)
        self.inner.decode(wire, y)
        out[:] = rotated_back(y)[: out.size]

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """The inner bounds of the element's group, added up, and a little; inf where any is or a sum may overflow."""
        # Going back adds the errors of 32 rotated elements. Five additions one after the other are off by less than
        # 6 2^-24 of what they add up: all of a group's magnitudes, 1/32 of them on the way there, 32 times.
        y = rotated(x)
        inner = self.inner.error_bound(y).reshape(-1, GROUP).sum(axis=1)
        with np.errstate(invalid="ignore"):  # NaNs
            magnitude = np.abs(np.pad(x, (0, y.size - x.size)).astype(np.float64)).reshape(-1, GROUP).sum(axis=1)
            bound = inner * (1 + 2.0**-21) + 2.0**-20 * magnitude + 2.0**-140
            bound = np.where(magnitude + bound < 2.0**127, bound, np.inf)
        return np.repeat(bound, GROUP)[: x.size]


def rotated(
    x: np.ndarray,  # float32 (n,)
) -> np.ndarray:  # float32 (n rounded up to a multiple of 32,)
    """H x / 32, group by group."""
    padded = np.pad(x, (0, -x.size % GROUP))
    with np.errstate(all="ignore"):
        return _through_stages(padded * np.float32(1 / GROUP))


def rotated_back(
    y: np.ndarray,  # float32 (m,), m a multiple of 32
) -> np.ndarray:  # float32 (m,)
    """H y, group by group."""
    return _through_stages(y)


def _through_stages(
    x: np.ndarray,  # float32 (m,), m a multiple of 32
) -> np.ndarray:  # float32 (m,)
    """H x: at distances 1, 2, 4, 8, 16 in this order, each pair becomes its sum and its difference."""
    for distance in (1, 2, 4, 8, 16):
        pairs = x.reshape(-1, 2, distance)
        with np.errstate(all="ignore"):
            x = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1).reshape(-1)
    return x
