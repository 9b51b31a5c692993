"""nvfp4: NVIDIA's 4-bit float: 16 elements to an e4m3 scale, 1024 elements to an fp32 scale over those.

    chunk:   [fp32 scales of region 0, 1, ...][zeros to 16][e4m3 scales of block 0, 1, ...][zeros to 16]
             [codes of block 0, 1, ...][zeros to 16]
    codes:   e2m1 in planes, zcomm/wire/planes.py

The two levels are those of NVIDIA's recipe ("Pretraining Large Language Models with NVFP4", arXiv 2509.25149): the
fp32 scale takes the largest magnitude to 448 x 6, a block's scale takes its own to 6 and is rounded to nearest, what is
then too large becomes 6. The recipe has one fp32 scale per tensor; here a scale over 1024 elements, so that where a
tensor is cut changes nothing. It is rounded up to eight significant bits: products are exact. "nvfp4:stochastic" rounds
codes up or down by chance, and blocks' scales up, for what is cut off has no mean to keep. The rules, one by one:
docs/wire-format.md, nvfp4. Same names in cuda/nvfp4.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.blocks import BLOCK_STEP, INF, amax_bits, block_scales, blocks, rows
from zcomm.wire.codec import Quantizer, check_chunk, checked_count, padded
from zcomm.wire.draw import Draw, check_draw, half_words
from zcomm.wire.minifloat import E2M1, E4M3, from_mini, rounding_bound, to_mini
from zcomm.wire.options import NEAREST, STOCHASTIC, check_rounding, take_word
from zcomm.wire.planes import pack, unpack

BLOCK, REGION = 16, 1024
LARGEST = E4M3.largest * E2M1.largest  # 2688, of a region over its scale
NAN_SCALE = 0x7F
ROUNDINGS = (NEAREST, STOCHASTIC)


class _Scales(NamedTuple):
    """Scales of m blocks, and what elements are multiplied with: 0 where every code of the block is 0."""

    regions: np.ndarray  # float32 (ceil(m / 64),)
    codes: np.ndarray  # uint8 (m,), e4m3
    inv: np.ndarray  # float32 (m,)

    @property
    def values(self) -> np.ndarray:  # float32 (m,)
        """What a block's codes are multiplied with."""
        of_block = np.repeat(self.regions, REGION // BLOCK)[: self.codes.size]
        with np.errstate(all="ignore"):
            return from_mini(self.codes, E4M3) * of_block


@dataclass(frozen=True, slots=True)
class NvFp4(Quantizer):
    """Elements over two scales as e2m1, rounded to "nearest" or "stochastic"."""

    rounding: str = NEAREST

    def __post_init__(self) -> None:
        check_rounding("nvfp4", self.rounding, ROUNDINGS)

    def __str__(self) -> str:
        return "nvfp4" + ("" if self.rounding == NEAREST else f":{self.rounding}")

    @property
    def block(self) -> int:
        """Elements that share anything: the upper scale."""
        return REGION

    @property
    def by_chance(self) -> bool:
        """Unless to nearest."""
        return self.rounding != NEAREST

    def nbytes(self, n_elems: int) -> int:
        """Both kinds of scales, padded, and codes, padded."""
        n_elems = checked_count(n_elems)
        return self._codes_offset(n_elems) + padded(-(-n_elems // BLOCK_STEP) * BLOCK_STEP // 2)

    def encode(
        self,
        x: np.ndarray,  # float32 (n,)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # stochastic: the random bits
    ) -> None:
        """Round x region by region into out. Raises CodecError if out has another size or a draw is missing."""
        check_chunk(self, x, DType.FLOAT32, out)
        chance = half_words(check_draw(self, draw), x.size) if self.by_chance else None
        scales, blocks_offset = self._scales(x), self._blocks_offset(x.size)
        out[:] = 0
        out[: scales.regions.nbytes] = scales.regions.view(np.uint8)
        out[blocks_offset : blocks_offset + scales.codes.size] = scales.codes
        for part in blocks(x.size, BLOCK, E2M1.bits, self._codes_offset(x.size)):
            elements = rows(x[part.elements], part.stored)
            inv = scales.inv[part.first : part.first + part.n_blocks]
            with np.errstate(all="ignore"):
                scaled = elements * inv[:, None]
            scaled[inv == 0] = 0
            codes = to_mini(scaled, E2M1, None if chance is None else rows(chance[part.elements], part.stored))
            codes.reshape(-1)[part.elements.stop - part.elements.start :] = 0
            out[part.codes] = pack(codes, E2M1.bits).reshape(-1)

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # float32 (n,), written
    ) -> None:
        """Codes' numbers times their block's scale times its region's. Raises CodecError if wire has another size."""
        check_chunk(self, out, DType.FLOAT32, wire)
        n_blocks, blocks_offset = -(-out.size // BLOCK), self._blocks_offset(out.size)
        regions = wire[: 4 * -(-out.size // REGION)].view(np.float32)
        scales = _Scales(regions, wire[blocks_offset : blocks_offset + n_blocks], np.empty(0, np.float32)).values
        for part in blocks(out.size, BLOCK, E2M1.bits, self._codes_offset(out.size)):
            codes = unpack(wire[part.codes].reshape(part.n_blocks, -1), E2M1.bits, part.stored)
            with np.errstate(all="ignore"):
                elements = from_mini(codes, E2M1) * scales[part.first : part.first + part.n_blocks, None]
            out[part.elements] = elements.reshape(-1)[: part.elements.stop - part.elements.start]

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """Half a step of its code (stochastic: one), or what is beyond the largest; |x| in zero blocks."""
        scales = self._scales(x)
        step = np.repeat(scales.values.astype(np.float64), BLOCK)[: x.size]
        inv = np.repeat(scales.inv, BLOCK)[: x.size]
        with np.errstate(invalid="ignore", divide="ignore"):  # signalling NaNs, zero scales
            magnitude = np.abs(x.astype(np.float64))
            in_steps = rounding_bound(magnitude / step * (1 + 2.0**-21), E2M1, self.by_chance)
            coded = in_steps * step + 2.0**-21 * magnitude
        return np.where(inv > 0, coded, np.where(step == 0, magnitude, np.inf))

    def _blocks_offset(self, n_elems: int) -> int:
        """Where the e4m3 scales of a chunk begin."""
        return padded(4 * -(-n_elems // REGION))

    def _codes_offset(self, n_elems: int) -> int:
        """Where the codes of a chunk begin."""
        return self._blocks_offset(n_elems) + padded(-(-n_elems // BLOCK))

    def _scales(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> _Scales:
        """The scales of all blocks. A bad element is its block's, not its region's."""
        n_blocks = -(-x.size // BLOCK)
        amax = amax_bits(rows(x, BLOCK)) if x.size else np.empty(0, np.uint32)
        bad = amax >= INF
        finite = np.where(bad, np.uint32(0), amax)
        of_regions = rows(finite, REGION // BLOCK).max(axis=1) if x.size else finite
        upper = block_scales(of_regions, LARGEST)
        regions, inv_regions = (np.repeat(of, REGION // BLOCK)[:n_blocks] for of in (upper.values, upper.inv))
        with np.errstate(all="ignore"):
            exact = finite.view(np.float32) / np.float32(E2M1.largest) * inv_regions
            codes = to_mini(exact, E4M3)
            if self.by_chance:
                codes = np.where(from_mini(codes, E4M3) < exact, np.minimum(codes + 1, E4M3.largest_code), codes)
                codes = codes.astype(np.uint8)
            inv = np.float32(1) / (from_mini(codes, E4M3) * regions)
        inv = np.where((codes == 0) | bad, np.float32(0), inv)
        return _Scales(upper.values, np.where(bad, np.uint8(NAN_SCALE), codes), inv)


def parse(
    head: str,  # "nvfp4"
    options: list[str],  # what followed it, cut at each colon
) -> NvFp4:
    """NvFp4 from its spelling. Raises CodecError for any option but a rounding."""
    rest = list(options)
    rounding = take_word(rest, ROUNDINGS[1:], NEAREST)
    if rest:
        raise CodecError(f"{head} takes one option, {STOCHASTIC}, got {':'.join(options)!r}; write {head!r}")
    return NvFp4(rounding)
