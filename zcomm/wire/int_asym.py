"""int_asym: unsigned integers of 2 to 8 bits from the block's least element up. "int4:asym", "int8:64:asym", ...

    chunk:   [scale and minimum of block 0, 1, ...][zeros to 16][codes of block 0, 1, ...][zeros to 16]
    scale and minimum:  bfloat16 each, 4 bytes together
    codes:   planes, zcomm/wire/planes.py

An element is its block's minimum and code times scale. All 2^bits codes share out the distance from the least element
to the largest one, where int_block spends half of them on the other sign: twice as fine for elements of one sign, and
finer still for those that lie close together, far from zero. The minimum is rounded down and the scale up, so nothing
clips. The product is exact and the sum is the only rounding, so no engine can differ by contraction. The rules, one by
one: docs/wire-format.md, int_asym. Same names in cuda/int_asym.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zcomm.errors import CodecError
from zcomm.wire.block_loops import BlockQuantizer, Coded
from zcomm.wire.blocks import (
    LIMIT,
    NAN_SCALE,
    TINY,
    amax_bits,
    bfloat16_above,
    check_block,
    from_bfloat16,
    to_bfloat16_bytes,
)
from zcomm.wire.int_block import check_bits, default_block
from zcomm.wire.options import NEAREST, STOCHASTIC, check_rounding, take_block, take_word

ROUNDINGS = (NEAREST, STOCHASTIC)


class _Ranges(NamedTuple):
    """Where the codes of m blocks lie. inv is 0 where every code of the block is 0."""

    scale: np.ndarray  # uint16 (m,), bfloat16
    least: np.ndarray  # uint16 (m,), bfloat16
    inv: np.ndarray  # float32 (m,), what elements less `least` are multiplied with


@dataclass(frozen=True, slots=True)
class IntAsym(BlockQuantizer):
    """Codes of `bits` bits from a minimum, in blocks of `block` elements, rounded to "nearest" or "stochastic"."""

    bits: int
    block: int
    rounding: str = NEAREST

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_block(f"int{self.bits}:asym", self.block, default_block(self.bits))
        check_rounding(f"int{self.bits}:asym", self.rounding, ROUNDINGS)

    def __str__(self) -> str:
        block = "" if self.block == default_block(self.bits) else f":{self.block}"
        return f"int{self.bits}{block}:asym" + ("" if self.rounding == NEAREST else f":{self.rounding}")

    @property
    def largest(self) -> int:
        """The largest code; the smallest is 0."""
        return 2**self.bits - 1

    @property
    def by_chance(self) -> bool:
        """Unless to nearest."""
        return self.rounding != NEAREST

    @property
    def scale_nbytes(self) -> int:
        """The scale and the minimum."""
        return 4

    def encode_rows(
        self,
        elements: np.ndarray,  # float32 (m, r)
        chance: np.ndarray | None,  # uint16 (m, r)
    ) -> Coded:
        """What elements exceed the minimum by, over their scale, rounded."""
        ranges = self._ranges(elements)
        with np.errstate(all="ignore"):
            steps = (elements - from_bfloat16(ranges.least)[:, None]) * ranges.inv[:, None]
        if chance is None:
            codes = np.rint(steps)
        else:
            with np.errstate(all="ignore"):
                codes = np.floor(steps + chance.astype(np.float32) * np.float32(2.0**-16))
            codes = np.minimum(codes, np.float32(self.largest))
        codes[ranges.inv == 0] = 0
        return Coded(to_bfloat16_bytes(ranges.scale, ranges.least), codes.astype(np.uint8))

    def decode_rows(
        self,
        codes: np.ndarray,  # uint8 (m, r)
        scales: np.ndarray,  # uint8 (m, 4)
    ) -> np.ndarray:  # float32 (m, r)
        """Codes times scales, and the minimum."""
        scale, least = (from_bfloat16(of_blocks)[:, None] for of_blocks in scales.view(np.uint16).T)
        return codes.astype(np.float32) * scale + least

    def bound_rows(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> np.ndarray:  # float64 (m, r)
        """Half a step (stochastic: one) and a little; |x| in zero blocks, x - minimum in flat ones; inf in bad ones."""
        # With d = fl(x - least), fl(d inv) = d/s (1 + c), |c| < 2^-21, as for int_block; no code clips. The sum is
        # rounded once more, by 2^-24 of a result that is no more than the error away from x.
        ranges = self._ranges(elements)
        rounded = 0.5 if self.rounding == NEAREST else 1 + 2.0**-16
        step, least = (from_bfloat16(of)[:, None].astype(np.float64) for of in (ranges.scale, ranges.least))
        above, magnitude = elements.astype(np.float64) - least, np.abs(elements.astype(np.float64))
        coded = rounded * step + 2.0**-21 * above + 2.0**-23 * (magnitude + step)
        return np.where(ranges.inv[:, None] > 0, coded, np.where(step == 0, np.abs(above) * (1 + 2.0**-21), np.inf))

    def _ranges(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> _Ranges:
        """Minimum and scale of each row."""
        amax = amax_bits(elements)
        carries = (amax >= TINY) & (amax < LIMIT)
        in_order = _in_order(elements.view(np.int32))
        lowest, highest = (_in_order(of.astype(np.int32)) for of in (in_order.min(axis=1), in_order.max(axis=1)))
        least = np.where(carries, _bfloat16_below(lowest.view(np.uint32)), np.uint16(0))
        with np.errstate(all="ignore"):
            reach = highest.view(np.float32) - from_bfloat16(least)
            spreads = carries & (reach >= np.uint32(TINY).view(np.float32))
            scale = bfloat16_above(np.where(spreads, reach, np.float32(1)) / np.float32(self.largest))
            inv = np.float32(1) / from_bfloat16(scale)
        scale = np.where(spreads, scale, np.where(amax >= LIMIT, np.uint16(NAN_SCALE), np.uint16(0)))
        return _Ranges(scale, least, np.where(spreads, inv, np.float32(0)))


def _in_order(
    bits: np.ndarray,  # int32
) -> np.ndarray:  # int32
    """Bits of floats as integers that order themselves like the floats, -0 before 0; and back."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _bfloat16_below(
    bits: np.ndarray,  # uint32 (m,), of floats
) -> np.ndarray:  # uint16 (m,)
    """The largest bfloat16 that is not above; none of them is tiny or a negative zero."""
    magnitude, negative = bits & np.uint32(0x7FFFFFFF), bits >> 31 != 0
    down = np.where(negative, (magnitude + np.uint32(0xFFFF)) >> 16, magnitude >> 16)
    tiny = np.where(negative & (magnitude > 0), np.uint32(TINY >> 16), np.uint32(0))
    kept = np.where(magnitude < TINY, tiny, down)
    return (kept | np.where(negative & (kept > 0), np.uint32(0x8000), np.uint32(0))).astype(np.uint16)


def parse(
    head: str,  # "int2" ... "int8"
    options: list[str],  # what followed it, cut at each colon: "asym" is among it
) -> IntAsym:
    """IntAsym from its spelling. Raises CodecError for a block it cannot have, or another option."""
    bits, rest = int(head.removeprefix("int")), list(options)
    block = take_block(rest, default_block(bits))
    asym = take_word(rest, ("asym",), "")
    rounding = take_word(rest, ROUNDINGS[1:], NEAREST)
    if rest or not asym:
        raise CodecError(
            f"{head} takes a block in elements, then asym, then {STOCHASTIC}, got {':'.join(options)!r}; "
            f"write {head}:{default_block(bits)}:asym or {head}:{default_block(bits)}:asym:{STOCHASTIC}"
        )
    return IntAsym(bits, block, rounding)
