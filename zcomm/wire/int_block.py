"""int_block: signed integers of 2 to 8 bits, one bfloat16 scale per block. "int8", "int4" and their kin.

    chunk:   [scales of block 0, 1, ...][zeros to 16][codes of block 0, 1, ...][zeros to 16]
    scale:   bfloat16; "int8:shift": and behind it the block's random bits, 2 bytes
    codes:   planes, zcomm/wire/planes.py

A code times its scale is exact in fp32, so no engine can differ by contraction. The scale is rounded away from zero,
so the largest element never clips. Codes are rounded to nearest, ties to even, or by chance, so that the mean of what
is decoded is the element: "int4:stochastic", each element by itself; "int4:shift", a whole block by one random shift,
which is taken off again: no more noise than to nearest, but zeros move (QSDP: Markov et al., ICML 2023, arXiv
2302.02390). The rules, one by one: docs/wire-format.md, int_block. Same names in cuda/int_block.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zcomm.errors import CodecError
from zcomm.wire.block_loops import BlockQuantizer, Coded
from zcomm.wire.blocks import INF, LIMIT, Scales, amax_bits, block_scales, check_block, from_bfloat16, to_bfloat16_bytes
from zcomm.wire.draw import by_chance
from zcomm.wire.options import NEAREST, SHIFT, STOCHASTIC, check_rounding, take_block, take_word

BITS = range(2, 9)
ROUNDINGS = (NEAREST, STOCHASTIC, SHIFT)


def default_block(bits: int) -> int:
    """The block that a width's short spelling stands for: coarse codes get finer scales."""
    return 256 if bits >= 5 else 128


def check_bits(bits: object) -> None:
    """Raise CodecError for a width that no code has."""
    if type(bits) is not int or bits not in BITS:
        raise CodecError(f"int_block has codes of 2 to 8 bits, got {bits!r}; use int8, int4, ...")


@dataclass(frozen=True, slots=True)
class IntBlock(BlockQuantizer):
    """Symmetric codes of `bits` bits in blocks of `block` elements, rounded "nearest", "stochastic" or by "shift"."""

    bits: int
    block: int
    rounding: str = NEAREST

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_block(f"int{self.bits}", self.block, default_block(self.bits))
        check_rounding(f"int{self.bits}", self.rounding, ROUNDINGS)

    def __str__(self) -> str:
        block = "" if self.block == default_block(self.bits) else f":{self.block}"
        return f"int{self.bits}{block}" + ("" if self.rounding == NEAREST else f":{self.rounding}")

    @property
    def qmax(self) -> int:
        """The largest code; the smallest is -qmax."""
        return 2 ** (self.bits - 1) - 1

    @property
    def by_chance(self) -> bool:
        """Unless to nearest."""
        return self.rounding != NEAREST

    @property
    def scale_nbytes(self) -> int:
        """The scale, and a shift."""
        return 4 if self.rounding == SHIFT else 2

    def encode_rows(
        self,
        elements: np.ndarray,  # float32 (m, r)
        chance: np.ndarray | None,  # uint16 (m, r)
    ) -> Coded:
        """Elements over their scale, rounded."""
        scales = self._scales(elements)
        with np.errstate(all="ignore"):
            steps = elements * scales.inv[:, None]
        halves = [scales.bits]
        if chance is None:
            codes = np.rint(steps)
        else:
            if self.rounding == SHIFT:
                chance = chance[:, :1]
                halves.append(np.where(scales.inv > 0, chance[:, 0], np.uint16(0)))
            codes = np.clip(by_chance(steps, chance), -self.qmax, self.qmax)
        codes[scales.inv == 0] = 0
        return Coded(to_bfloat16_bytes(*halves), codes.astype(np.int8).view(np.uint8))

    def decode_rows(
        self,
        codes: np.ndarray,  # uint8 (m, r)
        scales: np.ndarray,  # uint8 (m, scale_nbytes)
    ) -> np.ndarray:  # float32 (m, r)
        """Codes times scales; the shift taken off."""
        sign, halves = np.uint8(1 << (self.bits - 1)), scales.view(np.uint16)
        scale = from_bfloat16(halves[:, 0])[:, None]
        elements = ((codes ^ sign) - sign).view(np.int8).astype(np.float32) * scale
        if self.rounding == SHIFT:
            elements += (np.float32(0.5) - halves[:, 1:].astype(np.float32) * np.float32(2.0**-16)) * scale
        return elements

    def bound_rows(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> np.ndarray:  # float64 (m, r)
        """Half a step of its block's scale (stochastic: one) and a little; |x| in zero blocks; inf in bad ones."""
        # inv = (1/s)(1 + a) and fl(x inv) = x inv (1 + b) with |a| <= 2^-22 (1/s is subnormal for s > 2^126;
        # otherwise 2^-24) and |b| <= 2^-24, so x inv = x/s (1 + c), |c| < 2^-21. Rounding to an integer adds
        # at most 1/2, a code times s is exact, and no code clips: |x| <= qmax s, or at the cap |x|/s < qmax +
        # 1/2 (cuda/int_block.cuh). Hence |decoded - x| <= s/2 + 2^-21 |x|. By chance the code lies within 1 of
        # the sum of a step and a random number, and that sum is rounded to a multiple of 2^-16: s (1 + 2^-17).
        # A shift is taken off again, which leaves half of that, and one more rounding of the result.
        rounded = {NEAREST: 0.5, STOCHASTIC: 1 + 2.0**-17, SHIFT: 0.5 + 2.0**-16}[self.rounding]
        scales = self._scales(elements)
        step = scales.values[:, None].astype(np.float64)
        magnitude = np.abs(elements.astype(np.float64))
        coded = rounded * step + (2.0**-20 if self.rounding == SHIFT else 2.0**-21) * magnitude
        return np.where(scales.inv[:, None] > 0, coded, np.where(step == 0, magnitude, np.inf))

    def _scales(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> Scales:
        """The scale of each row."""
        amax = amax_bits(elements)
        if self.rounding == SHIFT:
            amax = np.where(amax >= LIMIT, np.uint32(INF), amax)
        return block_scales(amax, self.qmax)


def parse(
    head: str,  # "int2" ... "int8"
    options: list[str],  # what followed it, cut at each colon
) -> IntBlock:
    """IntBlock from its spelling. Raises CodecError for a block it cannot have, or another option."""
    bits, rest = int(head.removeprefix("int")), list(options)
    block = take_block(rest, default_block(bits))
    rounding = take_word(rest, ROUNDINGS[1:], NEAREST)
    if rest:
        raise CodecError(
            f"{head} takes a block in elements, then asym, then a rounding, got {':'.join(options)!r}; "
            f"write {head}:{default_block(bits)} or {head}:{default_block(bits)}:stochastic"
        )
    return IntBlock(bits, block, rounding)
