"""Floats of 4 and 8 bits: e4m3 and e5m2 of the OCP 8-bit float specification, e2m1 of OCP MX.

    e4m3   s eeee mmm   bias 7    largest 448 = 0x7e     0x7f is NaN, no Inf
    e5m2   s eeeee mm   bias 15   largest 57344 = 0x7b   0x7c is Inf, 0x7d to 0x7f are NaN
    e2m1   s ee m       bias 1    largest 6 = 0x7        neither

Rounding is to nearest, ties to even, or by chance; what is too large becomes the largest. Same names in
cuda/minifloat.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zcomm.wire.draw import by_chance


class MiniFloat(NamedTuple):
    """A format. Codes carry their sign in their highest bit."""

    name: str
    bits: int
    mantissa: int  # bits of the fraction
    bias: int
    largest_code: int
    largest: int  # the number of that code
    special: int  # codes from here on, without the sign, are Inf and NaN

    @property
    def smallest_normal(self) -> float:
        """Below, steps are as small as they get."""
        return 2.0 ** (1 - self.bias)


E4M3 = MiniFloat("e4m3", 8, 3, 7, 0x7E, 448, 0x7F)
E5M2 = MiniFloat("e5m2", 8, 2, 15, 0x7B, 57344, 0x7C)
E2M1 = MiniFloat("e2m1", 4, 1, 1, 0x7, 6, 0x8)


def to_mini(
    x: np.ndarray,  # float32, no NaN
    form: MiniFloat,
    chance: np.ndarray | None = None,  # uint16, same shape: random bits, to round by them
) -> np.ndarray:  # uint8, same shape, low form.bits bits used
    """The nearest code, or by chance one of the two codes around, so that their mean is the number."""
    bits = x.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    code = _nearest(magnitude, form) if chance is None else _by_chance(magnitude, form, chance)
    sign = (bits >> 31) << np.uint32(form.bits - 1)
    return (np.minimum(code, np.uint32(form.largest_code)) | sign).astype(np.uint8)


def _nearest(
    magnitude: np.ndarray,  # uint32
    form: MiniFloat,
) -> np.ndarray:  # uint32, same shape
    """The nearest code, past the largest too."""
    shift = 23 - form.mantissa
    to_even = np.uint32((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)
    normal = ((magnitude + to_even) >> shift) - np.uint32((127 - form.bias) << form.mantissa)
    # A unit of this number is the format's smallest step.
    anchor = np.float32(2.0 ** (24 - form.bias - form.mantissa))
    with np.errstate(all="ignore"):
        subnormal = (magnitude.view(np.float32) + anchor).view(np.uint32) - anchor.view(np.uint32)
    return np.where(magnitude < np.float32(form.smallest_normal).view(np.uint32), subnormal, normal)


def _by_chance(
    magnitude: np.ndarray,  # uint32
    form: MiniFloat,
    chance: np.ndarray,  # uint16, same shape
) -> np.ndarray:  # uint32, same shape
    """One of the two codes around: the steps from the last power of two, or from 0, rounded by chance."""
    smallest = np.float32(form.smallest_normal).view(np.uint32)
    small = magnitude < smallest
    with np.errstate(all="ignore"):
        subnormal = magnitude.view(np.float32) * np.float32(2.0 ** (form.bias + form.mantissa - 1))
    normal = ((magnitude & np.uint32(0x7FFFFF)) | np.uint32((127 + form.mantissa) << 23)).view(np.float32)
    powers = np.where(small, np.uint32(0), (magnitude - smallest) >> 23)
    count = by_chance(np.where(small, subnormal, normal), chance).astype(np.uint32)
    return (powers << np.uint32(form.mantissa)) + count  # all steps of a power of two lead to the next one


def from_mini(
    codes: np.ndarray,  # uint8, low form.bits bits used
    form: MiniFloat,
) -> np.ndarray:  # float32, same shape
    """The number of each code."""
    return _numbers(form)[codes]


def _numbers(form: MiniFloat) -> np.ndarray:  # float32 (2^bits,)
    """The number of every code."""
    codes = np.arange(2**form.bits)
    magnitude = codes & (2 ** (form.bits - 1) - 1)
    exponent, fraction = magnitude >> form.mantissa, magnitude & (2**form.mantissa - 1)
    significand = np.where(exponent > 0, fraction + 2**form.mantissa, fraction).astype(np.float64)
    numbers = significand * 2.0 ** (np.maximum(exponent, 1) - form.bias - form.mantissa)
    numbers[magnitude >= form.special] = np.nan
    if form is E5M2:
        numbers[magnitude == form.special] = np.inf
    return np.where(codes >> (form.bits - 1), -numbers, numbers).astype(np.float32)


def rounding_bound(
    x: np.ndarray,  # float64, magnitudes
    form: MiniFloat,
    is_by_chance: bool = False,
) -> np.ndarray:  # float64, same shape
    """Largest distance of each number from its code's: half a step, by chance one, and what is beyond the largest."""
    half_step = np.maximum(x, form.smallest_normal) * 2.0 ** -(form.mantissa + 1)
    return half_step * (2 if is_by_chance else 1) + np.maximum(x - form.largest, 0.0)
