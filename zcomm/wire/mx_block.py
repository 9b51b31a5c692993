"""mx_block: the OCP microscaling formats "mxfp8" (e4m3) and "mxfp4" (e2m1): 32 elements to a power-of-two scale.

    chunk:   [e8m0 scales of block 0, 1, ..., a byte each][zeros to 16][codes of block 0, 1, ...][zeros to 16]
    codes:   planes, zcomm/wire/planes.py

Scale and rounding are those of the OCP Microscaling Formats specification 1.0, section 6.3: the scale is the largest
power of two in the block over the largest one that the element format has; what is then too large becomes the largest
code. The specification leaves packing, zero blocks and bad elements open: docs/wire-format.md, mx_block. Same names
in cuda/mx_block.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.blocks import BLOCK_STEP, INF, TINY, amax_bits, blocks, rows
from zcomm.wire.codec import check_chunk, check_count, padded
from zcomm.wire.draw import Draw
from zcomm.wire.minifloat import E2M1, E4M3, MiniFloat, from_mini, rounding_bound, to_mini
from zcomm.wire.planes import pack, unpack

BLOCK = 32
NAN_SCALE = 0xFF
_FORMS = {"mxfp4": E2M1, "mxfp8": E4M3}
_LARGEST_EXPONENT = {"mxfp4": 2, "mxfp8": 8}  # of the element format's numbers


@dataclass(frozen=True, slots=True)
class MxBlock:
    """Elements over a power of two as e4m3 ("mxfp8") or e2m1 ("mxfp4"), rounded to nearest, ties to even."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in tuple(_FORMS):
            raise CodecError(f"mx_block is {' or '.join(_FORMS)}, got {self.name!r}; use one of these")

    def __str__(self) -> str:
        return self.name

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return BLOCK

    @property
    def form(self) -> MiniFloat:
        """The format of the codes."""
        return _FORMS[self.name]

    def for_dtype(self, dtype: DType) -> MxBlock:
        """Itself: the bytes do not depend on the elements' dtype."""
        return self

    def nbytes(self, n_elems: int) -> int:
        """Scales, padded, and codes, padded."""
        check_count(n_elems)
        n_stored = -(-n_elems // BLOCK_STEP) * BLOCK_STEP
        return self._codes_offset(n_elems) + padded(n_stored * self.form.bits // 8)

    def encode(
        self,
        x: np.ndarray,  # float32 (n,)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # unused: nothing is left to chance
    ) -> None:
        """Round x block by block into out. Raises CodecError if out has another size."""
        check_chunk(self, x, DType.FLOAT32, out)
        out[:] = 0
        for part in blocks(x.size, BLOCK, self.form.bits, self._codes_offset(x.size)):
            elements = rows(x[part.elements], part.stored)
            scales, inv = self._scales(elements)
            out[part.first : part.first + part.n_blocks] = scales
            with np.errstate(all="ignore"):
                scaled = elements * inv[:, None]
            scaled[inv == 0] = 0
            out[part.codes] = pack(to_mini(scaled, self.form), self.form.bits).reshape(-1)

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # float32 (n,), written
    ) -> None:
        """Codes' numbers times scales. Raises CodecError if wire has another size."""
        check_chunk(self, out, DType.FLOAT32, wire)
        for part in blocks(out.size, BLOCK, self.form.bits, self._codes_offset(out.size)):
            codes = unpack(wire[part.codes].reshape(part.n_blocks, -1), self.form.bits, part.stored)
            scales = from_e8m0(wire[part.first : part.first + part.n_blocks])
            with np.errstate(all="ignore"):
                elements = from_mini(codes, self.form) * scales[:, None]
            out[part.elements] = elements.reshape(-1)[: part.elements.stop - part.elements.start]

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """Half a step of the element's code, or what is beyond the largest; |x| in zero blocks; inf in bad ones."""
        # Scales are powers of two: nothing else is rounded, but for what is too small to have a code.
        bound = np.empty(x.size, np.float64)
        for part in blocks(x.size, BLOCK, self.form.bits, self._codes_offset(x.size)):
            elements = rows(x[part.elements], part.stored)
            scales, inv = self._scales(elements)
            step = from_e8m0(scales)[:, None].astype(np.float64)
            with np.errstate(invalid="ignore"):  # signalling NaNs
                magnitude = np.abs(elements.astype(np.float64))
            coded = rounding_bound(magnitude / step, self.form) * step
            of_rows = np.where(inv[:, None] > 0, coded, np.where(scales[:, None] == 0, magnitude, np.inf))
            bound[part.elements] = of_rows.reshape(-1)[: part.elements.stop - part.elements.start]
        return bound

    def _codes_offset(self, n_elems: int) -> int:
        """Where the codes of a chunk begin."""
        return padded(-(-n_elems // BLOCK))

    def _scales(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> tuple[np.ndarray, np.ndarray]:  # e8m0 uint8 (m,); float32 (m,), 0 where every code is 0
        """The scale of each row, and what its elements are multiplied with."""
        amax = amax_bits(elements)
        carries = (amax >= TINY) & (amax < INF)
        scales = np.where(carries, (amax >> 23) - np.uint32(_LARGEST_EXPONENT[self.name]), 0)
        inv = (np.where(carries, np.uint32(254) - scales, 0) << 23).astype(np.uint32).view(np.float32)
        return np.where(amax >= INF, NAN_SCALE, scales).astype(np.uint8), inv


def from_e8m0(
    scales: np.ndarray,  # uint8 (m,)
) -> np.ndarray:  # float32 (m,)
    """2^(scale - 127); NaN for 0xff."""
    bits = np.where(scales == 0, np.uint32(0x00400000), scales.astype(np.uint32) << 23)
    return np.where(scales == NAN_SCALE, np.uint32(0x7FC00000), bits).astype(np.uint32).view(np.float32)


def parse(
    head: str,  # "mxfp4" or "mxfp8"
    options: list[str],  # what followed it, cut at each colon
) -> MxBlock:
    """MxBlock from its spelling. Raises CodecError for any option: it has none."""
    if options:
        raise CodecError(f"{head} takes no options, got {':'.join(options)!r}; its block is {BLOCK}; write {head!r}")
    return MxBlock(head)
