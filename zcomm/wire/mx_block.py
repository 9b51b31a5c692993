"""mx_block: the OCP microscaling formats "mxfp8" (e4m3) and "mxfp4" (e2m1): 32 elements to a power-of-two scale.

    chunk:   [e8m0 scales of block 0, 1, ..., a byte each][zeros to 16][codes of block 0, 1, ...][zeros to 16]
    codes:   planes, zcomm/wire/planes.py

Scale and rounding are those of the OCP Microscaling Formats specification 1.0, section 6.3: the scale is the largest
power of two in the block over the largest one that the element format has; what is then too large becomes the largest
code. "mxfp4:stochastic" rounds up or down by chance, and doubles the scale where something would be too large, for
what is cut off has no mean to keep. The specification leaves packing, zero blocks and bad elements open:
docs/wire-format.md, mx_block. Same names in cuda/mx_block.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zcomm.errors import CodecError
from zcomm.wire.block_loops import BlockQuantizer, Coded
from zcomm.wire.blocks import INF, TINY, amax_bits
from zcomm.wire.minifloat import E2M1, E4M3, MiniFloat, from_mini, rounding_bound, to_mini
from zcomm.wire.options import NEAREST, STOCHASTIC, check_rounding, take_word

BLOCK = 32
NAN_SCALE = 0xFF
ROUNDINGS = (NEAREST, STOCHASTIC)
_FORMS = {"mxfp4": E2M1, "mxfp8": E4M3}
_LARGEST_EXPONENT = {"mxfp4": 2, "mxfp8": 8}  # of the element format's numbers


@dataclass(frozen=True, slots=True)
class MxBlock(BlockQuantizer):
    """Elements over a power of two as e4m3 ("mxfp8") or e2m1 ("mxfp4"), rounded to "nearest" or "stochastic"."""

    name: str
    rounding: str = NEAREST

    def __post_init__(self) -> None:
        if self.name not in tuple(_FORMS):
            raise CodecError(f"mx_block is {' or '.join(_FORMS)}, got {self.name!r}; use one of these")
        check_rounding(self.name, self.rounding, ROUNDINGS)

    def __str__(self) -> str:
        return self.name + ("" if self.rounding == NEAREST else f":{self.rounding}")

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return BLOCK

    @property
    def form(self) -> MiniFloat:
        """The format of the codes."""
        return _FORMS[self.name]

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.form.bits

    @property
    def by_chance(self) -> bool:
        """Unless to nearest."""
        return self.rounding != NEAREST

    @property
    def scale_nbytes(self) -> int:
        """An exponent."""
        return 1

    def encode_rows(
        self,
        elements: np.ndarray,  # float32 (m, 32)
        chance: np.ndarray | None,  # uint16 (m, 32)
    ) -> Coded:
        """Elements over their power of two as small floats."""
        scales, inv = self._scales(elements)
        with np.errstate(all="ignore"):
            scaled = elements * inv[:, None]
        scaled[inv == 0] = 0
        return Coded(scales[:, None], to_mini(scaled, self.form, chance))

    def decode_rows(
        self,
        codes: np.ndarray,  # uint8 (m, 32)
        scales: np.ndarray,  # uint8 (m, 1)
    ) -> np.ndarray:  # float32 (m, 32)
        """Codes' numbers times scales."""
        return from_mini(codes, self.form) * from_e8m0(scales)

    def bound_rows(
        self,
        elements: np.ndarray,  # float32 (m, 32)
    ) -> np.ndarray:  # float64 (m, 32)
        """Half a step of the element's code (stochastic: one), or what is beyond the largest; |x| in zero blocks."""
        # Scales are powers of two: nothing else is rounded, but for what is too small to have a code.
        scales, inv = self._scales(elements)
        step = from_e8m0(scales)[:, None].astype(np.float64)
        magnitude = np.abs(elements.astype(np.float64))
        coded = rounding_bound(magnitude / step, self.form, self.by_chance) * step
        return np.where(inv[:, None] > 0, coded, np.where(scales[:, None] == 0, magnitude, np.inf))

    def _scales(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> tuple[np.ndarray, np.ndarray]:  # e8m0 uint8 (m,); float32 (m,), 0 where every code is 0
        """The scale of each row, and what its elements are multiplied with."""
        amax = amax_bits(elements)
        carries = (amax >= TINY) & (amax < INF)
        scales = np.where(carries, (amax >> 23) - np.uint32(_LARGEST_EXPONENT[self.name]), 0)
        if self.by_chance:
            largest = np.float32(self.form.largest).view(np.uint32)
            cut_off = (amax & 0x7FFFFF > largest & 0x7FFFFF) & (amax < 0x7F000000)  # doubled, 2^127 may overflow
            scales = np.where(carries & cut_off, scales + 1, scales)
        inv = (np.where(carries, np.uint32(254) - scales, 0) << 23).astype(np.uint32).view(np.float32)
        return np.where(amax >= INF, NAN_SCALE, scales).astype(np.uint8), inv


def from_e8m0(
    scales: np.ndarray,  # uint8
) -> np.ndarray:  # float32, same shape
    """2^(scale - 127); NaN for 0xff."""
    bits = np.where(scales == 0, np.uint32(0x00400000), scales.astype(np.uint32) << 23)
    return np.where(scales == NAN_SCALE, np.uint32(0x7FC00000), bits).astype(np.uint32).view(np.float32)


def parse(
    head: str,  # "mxfp4" or "mxfp8"
    options: list[str],  # what followed it, cut at each colon
) -> MxBlock:
    """MxBlock from its spelling. Raises CodecError for any option but a rounding."""
    rest = list(options)
    rounding = take_word(rest, ROUNDINGS[1:], NEAREST)
    if rest:
        raise CodecError(
            f"{head} takes one option, {STOCHASTIC}, got {':'.join(options)!r}; its block is {BLOCK}; write {head!r}"
        )
    return MxBlock(head, rounding)
