"""int_block: signed integers of 2 to 8 bits, one bfloat16 scale per block. "int8", "int4" and their kin.

    chunk:   [bfloat16 scales of block 0, 1, ...][zeros to 16][codes of block 0, 1, ...][zeros to 16]
    codes:   planes, zcomm/wire/planes.py

A code times its scale is exact in fp32, so no engine can differ by contraction. The scale is rounded away
from zero, so the largest element never clips. Codes are rounded to nearest, ties to even, or, spelled
"int4:stochastic", up or down by chance, so that their mean is the element. The rules, one by one:
docs/wire-format.md, int_block. Same names in cuda/int_block.cuh.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.blocks import BLOCK_STEP, Scales, amax_bits, block_scales, blocks, check_block, rows
from zcomm.wire.codec import check_chunk, check_count, padded
from zcomm.wire.draw import Draw, check_draw, half_words
from zcomm.wire.planes import pack, unpack

BITS = range(2, 9)
ROUNDINGS = ("nearest", "stochastic")


def default_block(bits: int) -> int:
    """The block that a width's short spelling stands for: coarse codes get finer scales."""
    return 256 if bits >= 5 else 128


@dataclass(frozen=True, slots=True)
class IntBlock:
    """Symmetric codes of `bits` bits in blocks of `block` elements, rounded to "nearest" or "stochastic"."""

    bits: int
    block: int
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise CodecError(f"int_block has codes of 2 to 8 bits, got {self.bits!r}; use int8, int4, ...")
        check_block(f"int{self.bits}", self.block, default_block(self.bits))
        if self.rounding not in ROUNDINGS:
            raise CodecError(f"int{self.bits} rounds to {' or '.join(ROUNDINGS)}, got {self.rounding!r}")

    def __str__(self) -> str:
        block = "" if self.block == default_block(self.bits) else f":{self.block}"
        return f"int{self.bits}{block}" + ("" if self.rounding == "nearest" else f":{self.rounding}")

    @property
    def qmax(self) -> int:
        """The largest code; the smallest is -qmax."""
        return 2 ** (self.bits - 1) - 1

    def for_dtype(self, dtype: DType) -> IntBlock:
        """Itself: the bytes do not depend on the elements' dtype."""
        return self

    def nbytes(self, n_elems: int) -> int:
        """Scales, padded, and codes, padded."""
        check_count(n_elems)
        n_stored = -(-n_elems // BLOCK_STEP) * BLOCK_STEP
        return self._codes_offset(n_elems) + padded(n_stored * self.bits // 8)

    def encode(
        self,
        x: np.ndarray,  # float32 (n,)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # stochastic: the random bits
    ) -> None:
        """Quantize x block by block into out. Raises CodecError if out has another size or a draw is missing."""
        check_chunk(self, x, DType.FLOAT32, out)
        chance = half_words(check_draw(self, draw), x.size) if self.rounding == "stochastic" else None
        out[:] = 0
        for part in blocks(x.size, self.block, self.bits, self._codes_offset(x.size)):
            elements = rows(x[part.elements], part.stored)
            scales = self._scales(elements)
            out[2 * part.first : 2 * (part.first + part.n_blocks)] = scales.bits.view(np.uint8)
            with np.errstate(all="ignore"):
                steps = elements * scales.inv[:, None]
            if chance is None:
                codes = np.rint(steps)
            else:
                codes = self._by_chance(steps, rows(chance[part.elements], part.stored))
            codes[scales.inv == 0] = 0
            out[part.codes] = pack(codes.astype(np.int8).view(np.uint8), self.bits).reshape(-1)

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # float32 (n,), written
    ) -> None:
        """Codes times scales. Raises CodecError if wire has another size."""
        check_chunk(self, out, DType.FLOAT32, wire)
        sign = np.uint8(1 << (self.bits - 1))
        for part in blocks(out.size, self.block, self.bits, self._codes_offset(out.size)):
            codes = unpack(wire[part.codes].reshape(part.n_blocks, -1), self.bits, part.stored)
            codes = ((codes ^ sign) - sign).view(np.int8)
            bits = wire[2 * part.first : 2 * (part.first + part.n_blocks)].view(np.uint16)
            with np.errstate(all="ignore"):
                elements = codes.astype(np.float32) * Scales(bits, bits).values[:, None]
            out[part.elements] = elements.reshape(-1)[: part.elements.stop - part.elements.start]

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """Half a step of its block's scale (stochastic: one) and a little; |x| in zero blocks; inf in bad ones."""
        # inv = (1/s)(1 + a) and fl(x inv) = x inv (1 + b) with |a| <= 2^-22 (1/s is subnormal for s > 2^126;
        # otherwise 2^-24) and |b| <= 2^-24, so x inv = x/s (1 + c), |c| < 2^-21. Rounding to an integer adds
        # at most 1/2, a code times s is exact, and no code clips: |x| <= qmax s, or at the cap |x|/s < qmax +
        # 1/2 (cuda/int_block.cuh). Hence |decoded - x| <= s/2 + 2^-21 |x|. By chance the code lies within 1 of
        # the sum of a step and a random number, and that sum is rounded to a multiple of 2^-16: s (1 + 2^-17).
        rounded = 0.5 if self.rounding == "nearest" else 1 + 2.0**-17
        bound = np.empty(x.size, np.float64)
        for part in blocks(x.size, self.block, self.bits, self._codes_offset(x.size)):
            elements = rows(x[part.elements], part.stored)
            scales = self._scales(elements)
            step = scales.values[:, None].astype(np.float64)
            with np.errstate(invalid="ignore"):  # signalling NaNs
                magnitude = np.abs(elements.astype(np.float64))
            coded = rounded * step + 2.0**-21 * magnitude
            of_rows = np.where(scales.inv[:, None] > 0, coded, np.where(step == 0, magnitude, np.inf))
            bound[part.elements] = of_rows.reshape(-1)[: part.elements.stop - part.elements.start]
        return bound

    def _codes_offset(self, n_elems: int) -> int:
        """Where the codes of a chunk begin."""
        return padded(2 * -(-n_elems // self.block))

    def _scales(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> Scales:
        """The scale of each row."""
        return block_scales(amax_bits(elements), self.qmax)

    def _by_chance(
        self,
        steps: np.ndarray,  # float32 (m, r), elements over their scale
        chance: np.ndarray,  # uint16 (m, r)
    ) -> np.ndarray:  # float32 (m, r)
        """Down to an integer, or up with the probability of what is left over, in multiples of 2^-16."""
        # 128 makes the sum positive and its last bit 2^-16; 128 + chance is exact.
        sums = steps + (np.float32(128) + chance.astype(np.float32) * np.float32(2.0**-16))
        return np.clip(np.floor(sums) - np.float32(128), -self.qmax, self.qmax)


def parse(
    head: str,  # "int2" ... "int8"
    options: list[str],  # what followed it, cut at each colon
) -> IntBlock:
    """IntBlock from its spelling. Raises CodecError for a block it cannot have, or another option."""
    bits = int(head.removeprefix("int"))
    block, rounding, rest = default_block(bits), "nearest", list(options)
    if rest and re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", rest[0]):
        block = int(rest.pop(0))
    if rest and rest[0] in ROUNDINGS[1:]:
        rounding = rest.pop(0)
    if rest:
        raise CodecError(
            f"{head} takes a block in elements, then a rounding, got {':'.join(options)!r}; "
            f"write {head}:{default_block(bits)} or {head}:{default_block(bits)}:stochastic"
        )
    return IntBlock(bits, block, rounding)
