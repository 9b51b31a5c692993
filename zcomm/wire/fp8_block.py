"""fp8_block: 8-bit floats, one bfloat16 scale per block. "fp8_e4m3", "fp8_e5m2".

    chunk:   [bfloat16 scales of block 0, 1, ...][zeros to 16][codes of element 0, 1, ...][zeros to 16]

The scale takes the block's largest magnitude to the format's largest, 448 or 57344, and is rounded away from zero, so
nothing clips. A code's number times its scale is exact in fp32. Codes are rounded to nearest, ties to even, or, spelled
"fp8_e4m3:stochastic", up or down by chance. The rules, one by one: docs/wire-format.md, fp8_block. Same names in
cuda/fp8_block.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zcomm.errors import CodecError
from zcomm.wire.block_loops import BlockQuantizer, Coded
from zcomm.wire.blocks import TINY, Scales, amax_bits, block_scales, check_block, from_bfloat16, to_bfloat16_bytes
from zcomm.wire.minifloat import E4M3, E5M2, MiniFloat, from_mini, rounding_bound, to_mini
from zcomm.wire.options import NEAREST, STOCHASTIC, check_rounding, take_block, take_word

DEFAULT_BLOCK = 128
ROUNDINGS = (NEAREST, STOCHASTIC)
_FORMS = {form.name: form for form in (E4M3, E5M2)}
# 2^-96 and 2^-80: above, numbers times scales, and sums of them, are never subnormal.
_TINY = {"e4m3": TINY, "e5m2": 0x17800000}


@dataclass(frozen=True, slots=True)
class Fp8Block(BlockQuantizer):
    """Elements over their block's scale as "e4m3" or "e5m2", rounded to "nearest" or "stochastic"."""

    element: str
    block: int = DEFAULT_BLOCK
    rounding: str = NEAREST

    def __post_init__(self) -> None:
        if self.element not in tuple(_FORMS):
            raise CodecError(f"fp8_block has elements {' or '.join(_FORMS)}, got {self.element!r}; use one of these")
        check_block(f"fp8_{self.element}", self.block, DEFAULT_BLOCK)
        check_rounding(f"fp8_{self.element}", self.rounding, ROUNDINGS)

    def __str__(self) -> str:
        block = "" if self.block == DEFAULT_BLOCK else f":{self.block}"
        return f"fp8_{self.element}{block}" + ("" if self.rounding == NEAREST else f":{self.rounding}")

    @property
    def form(self) -> MiniFloat:
        """The format of the codes."""
        return _FORMS[self.element]

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8

    @property
    def by_chance(self) -> bool:
        """Unless to nearest."""
        return self.rounding != NEAREST

    def encode_rows(
        self,
        elements: np.ndarray,  # float32 (m, r)
        chance: np.ndarray | None,  # uint16 (m, r)
    ) -> Coded:
        """Elements over their scale as floats of 8 bits."""
        scales = self._scales(elements)
        with np.errstate(all="ignore"):
            scaled = elements * scales.inv[:, None]
        scaled[scales.inv == 0] = 0
        return Coded(to_bfloat16_bytes(scales.bits), to_mini(scaled, self.form, chance))

    def decode_rows(
        self,
        codes: np.ndarray,  # uint8 (m, r)
        scales: np.ndarray,  # uint8 (m, 2)
    ) -> np.ndarray:  # float32 (m, r)
        """Codes' numbers times scales."""
        return from_mini(codes, self.form) * from_bfloat16(scales.view(np.uint16)[:, 0])[:, None]

    def bound_rows(
        self,
        elements: np.ndarray,  # float32 (m, r)
    ) -> np.ndarray:  # float64 (m, r)
        """Half a step of the element's code (stochastic: one) times the scale, and a little; |x| in zero blocks."""
        # As for int_block: fl(x inv) = x/s (1 + c), |c| < 2^-21, and nothing clips.
        scales = self._scales(elements)
        step = scales.values[:, None].astype(np.float64)
        magnitude = np.abs(elements.astype(np.float64))
        in_steps = rounding_bound(magnitude / step * (1 + 2.0**-21), self.form, self.by_chance)
        coded = in_steps * step + 2.0**-21 * magnitude
        return np.where(scales.inv[:, None] > 0, coded, np.where(step == 0, magnitude, np.inf))

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
    """Fp8Block from its spelling. Raises CodecError for a block it cannot have, or another option."""
    rest = list(options)
    block = take_block(rest, DEFAULT_BLOCK)
    rounding = take_word(rest, ROUNDINGS[1:], NEAREST)
    if rest:
        raise CodecError(
            f"{head} takes a block in elements, then {STOCHASTIC}, got {':'.join(options)!r}; "
            f"write {head}:{DEFAULT_BLOCK} or {head}:{DEFAULT_BLOCK}:{STOCHASTIC}"
        )
    return Fp8Block(head.removeprefix("fp8_"), block, rounding)
