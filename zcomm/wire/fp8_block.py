"""fp8_block: 8-bit floats, one bfloat16 scale per block. "fp8_e4m3", "fp8_e5m2".

    chunk:   [bfloat16 scales of block 0, 1, ...][zeros to 16][codes of element 0, 1, ...][zeros to 16]

The scale takes the block's largest magnitude to the format's largest, 448 or 57344, and is rounded away from zero, so
nothing clips. A code's number times its scale is exact in fp32. The rules, one by one: docs/wire-format.md, fp8_block.
Same names in cuda/fp8_block.cuh.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.blocks import BLOCK_STEP, TINY, Scales, amax_bits, block_scales, blocks, check_block, rows
from zcomm.wire.codec import check_chunk, check_count, padded
from zcomm.wire.draw import Draw
from zcomm.wire.minifloat import E4M3, E5M2, MiniFloat, from_mini, rounding_bound, to_mini

DEFAULT_BLOCK = 128
_FORMS = {form.name: form for form in (E4M3, E5M2)}
# 2^-96 and 2^-80: above, numbers times scales, and sums of them, are never subnormal.
_TINY = {"e4m3": TINY, "e5m2": 0x17800000}


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """Elements over their block's scale as "e4m3" or "e5m2", rounded to nearest, ties to even."""

    element: str
    block: int = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        if self.element not in tuple(_FORMS):
            raise CodecError(f"fp8_block has elements {' or '.join(_FORMS)}, got {self.element!r}; use one of these")
        check_block(f"fp8_{self.element}", self.block, DEFAULT_BLOCK)

    def __str__(self) -> str:
        return f"fp8_{self.element}" if self.block == DEFAULT_BLOCK else f"fp8_{self.element}:{self.block}"

    @property
    def form(self) -> MiniFloat:
        """The format of the codes."""
        return _FORMS[self.element]

    def for_dtype(self, dtype: DType) -> Fp8Block:
        """Itself: the bytes do not depend on the elements' dtype."""
        return self

    def nbytes(self, n_elems: int) -> int:
        """Scales, padded, and codes, padded."""
        check_count(n_elems)
        return self._codes_offset(n_elems) + padded(-(-n_elems // BLOCK_STEP) * BLOCK_STEP)

    def encode(
        self,
        x: np.ndarray,  # float32 (n,)
        out: np.ndarray,  # uint8 (self.nbytes(n),), written, padding included
        draw: Draw | None = None,  # unused: nothing is left to chance
    ) -> None:
        """Round x block by block into out. Raises CodecError if out has another size."""
        check_chunk(self, x, DType.FLOAT32, out)
        out[:] = 0
        for part in blocks(x.size, self.block, 8, self._codes_offset(x.size)):
            elements = rows(x[part.elements], part.stored)
            scales = self._scales(elements)
            out[2 * part.first : 2 * (part.first + part.n_blocks)] = scales.bits.view(np.uint8)
            with np.errstate(all="ignore"):
                scaled = elements * scales.inv[:, None]
            scaled[scales.inv == 0] = 0
            out[part.codes] = to_mini(scaled, self.form).reshape(-1)

    def decode(
        self,
        wire: np.ndarray,  # uint8 (self.nbytes(n),)
        out: np.ndarray,  # float32 (n,), written
    ) -> None:
        """Codes' numbers times scales. Raises CodecError if wire has another size."""
        check_chunk(self, out, DType.FLOAT32, wire)
        for part in blocks(out.size, self.block, 8, self._codes_offset(out.size)):
            numbers = from_mini(wire[part.codes].reshape(part.n_blocks, -1), self.form)
            bits = wire[2 * part.first : 2 * (part.first + part.n_blocks)].view(np.uint16)
            with np.errstate(all="ignore"):
                elements = numbers * Scales(bits, bits).values[:, None]
            out[part.elements] = elements.reshape(-1)[: part.elements.stop - part.elements.start]

    def error_bound(
        self,
        x: np.ndarray,  # float32 (n,)
    ) -> np.ndarray:  # float64 (n,)
        """Half a step of the element's code times the scale, and a little; |x| in zero blocks; inf in bad ones."""
        # As for int_block: fl(x inv) = x/s (1 + c), |c| < 2^-21, and nothing clips.
        bound = np.empty(x.size, np.float64)
        for part in blocks(x.size, self.block, 8, self._codes_offset(x.size)):
            elements = rows(x[part.elements], part.stored)
            scales = self._scales(elements)
            step = scales.values[:, None].astype(np.float64)
            with np.errstate(invalid="ignore", divide="ignore"):  # signalling NaNs, zero scales
                magnitude = np.abs(elements.astype(np.float64))
                coded = rounding_bound(magnitude / step * (1 + 2.0**-21), self.form) * step + 2.0**-21 * magnitude
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
        return block_scales(amax_bits(elements), self.form.largest, _TINY[self.element])


def parse(
    head: str,  # "fp8_e4m3" or "fp8_e5m2"
    options: list[str],  # what followed it, cut at each colon
) -> Fp8Block:
    """Fp8Block from its spelling. Raises CodecError for a block it cannot have, or more than a block."""
    element = head.removeprefix("fp8_")
    if not options:
        return Fp8Block(element)
    if len(options) > 1 or re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", options[0]) is None:
        raise CodecError(
            f"{head} takes one option, its block in elements, got {':'.join(options)!r}; write {head}:{DEFAULT_BLOCK}"
        )
    return Fp8Block(element, int(options[0]))
