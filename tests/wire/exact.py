"""Numbers of the wire in exact fractions, every rounding spelled out: what exact_codecs.py is written in.

It shares no code and no idea with zcomm.wire (no float arithmetic, no masks, no vector operations).
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Format(NamedTuple):
    """A binary floating-point format."""

    width: int  # bits altogether
    precision: int  # significant bits, the implicit one included
    smallest: int  # exponent of the smallest subnormal

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)

    @property
    def infinity(self) -> int:
        return (self.sign - 1) >> (self.precision - 1) << (self.precision - 1)


FP32, BF16, FP16 = Format(32, 24, -149), Format(16, 8, -133), Format(16, 11, -24)


def value(bits: int, form: Format) -> Fraction | None:
    """The number that bits stand for; None for Inf and NaN."""
    magnitude = bits & (form.sign - 1)
    if magnitude >= form.infinity:
        return None
    exponent, fraction = divmod(magnitude, 1 << (form.precision - 1))
    if exponent > 0:
        fraction += 1 << (form.precision - 1)
    number = Fraction(fraction) * Fraction(2) ** (form.smallest + max(exponent - 1, 0))
    return -number if bits & form.sign else number


def nearest(number: Fraction, form: Format) -> int:
    """Bits of the closest number in the format, ties to the even one; Inf beyond half a step over the largest."""
    sign, number = (form.sign, -number) if number < 0 else (0, number)
    low, high = 0, form.infinity  # value(low) <= number < value(high); Inf counts as the next power of two
    if number >= Fraction(2) ** (form.smallest + (form.infinity >> (form.precision - 1)) + form.precision - 2):
        return sign | form.infinity
    while high - low > 1:
        middle = (low + high) // 2
        of_middle = value(middle, form)
        assert of_middle is not None
        low, high = (middle, high) if of_middle <= number else (low, middle)
    below = value(low, form)
    assert below is not None
    above = value(high, form)
    if above is None:
        above = 2 * below - (value(low - 1, form) or Fraction(0))
    if number - below != above - number:
        return sign | (low if number - below < above - number else high)
    return sign | (low if low % 2 == 0 else high)


def to_fp32(number: Fraction) -> Fraction:
    """The number as one fp32 operation leaves it. Only for results that do not overflow."""
    rounded = value(nearest(number, FP32), FP32)
    assert rounded is not None
    return rounded


def to_integer(number: Fraction) -> int:
    """Nearest integer, ties to even."""
    return round(number)


def at_most(number: Fraction) -> int:
    """bfloat16 bits of the largest bfloat16 that is not above; none is tiny or a negative zero."""
    least = Fraction(1, 2**96)
    if abs(number) < least:
        return 0 if number >= 0 else BF16.sign + nearest(least, BF16)
    bits = nearest(number, BF16)
    while value(bits, BF16) > number:  # type: ignore[operator]
        bits += 1 if number < 0 else -1
    return bits


def magnitudes(exponents: int, fractions: int, bias: int, count: int) -> list[Fraction]:
    """What the codes of a small float stand for, without their sign, in the order of the codes."""
    found = []
    for exponent in range(2**exponents):
        for fraction in range(2**fractions):
            leading = 1 if exponent > 0 else 0
            number = leading + Fraction(fraction, 2**fractions)
            found.append(number * Fraction(2) ** (max(exponent, 1) - bias))
    return found[:count]


E4M3, E5M2, E2M1 = magnitudes(4, 3, 7, 127), magnitudes(5, 2, 15, 124), magnitudes(2, 1, 1, 8)


def closest(number: Fraction, numbers: list[Fraction]) -> int:
    """The code of the closest number to a positive one, ties to the even code."""
    return min(range(len(numbers)), key=lambda code: (abs(numbers[code] - number), code % 2))


def around(number: Fraction, numbers: list[Fraction], u: int) -> int:
    """One of the codes next to a positive number: of its step, the part from the lower code up is rounded by chance."""
    below = max(code for code in range(len(numbers)) if numbers[code] <= number)
    if below == len(numbers) - 1:
        return below
    part = (number - numbers[below]) / (numbers[below + 1] - numbers[below])
    total = to_fp32(part + 128 + Fraction(u, 65536))
    return below + total.numerator // total.denominator - 128


NAN = 0x7FC00000


def added(a: int, b: int) -> int:
    """The sum of two fp32 numbers, as bits; any NaN is NAN."""
    infinite = [bits for bits in (a, b) if bits % 2**31 >= FP32.infinity]
    if infinite:
        one_kind = all(bits == infinite[0] for bits in infinite) and infinite[0] % 2**31 == FP32.infinity
        return infinite[0] if one_kind else NAN
    return nearest((value(a, FP32) or Fraction(0)) + (value(b, FP32) or Fraction(0)), FP32)


def negated(a: int) -> int:
    return a ^ 2**31


def walsh(group: list[int]) -> list[int]:
    """The 32 sums and differences of a group: those of pairs of neighbours first."""
    for log in range(5):
        group = [
            added(negated(group[i]), group[i - 2**log]) if i // 2**log % 2 else added(group[i], group[i + 2**log])
            for i in range(32)
        ]
    return group


DRAW = (0x9E3779B97F4A7C15, 0x1_0000_0007, 2**35 - 5)  # seed, call, index of the first element


def random_bits(element: int) -> int:
    """The sixteen bits that DRAW gives to an element: Philox4x32-7."""
    seed, call, first = DRAW
    group, half = divmod(first + element, 8)
    word = 2**32
    c = [group % word, group // word, call % word, call // word]
    for i in range(7):
        key = [(seed % word + i * 0x9E3779B9) % word, (seed // word + i * 0xBB67AE85) % word]
        high0, low0 = divmod(c[0] * 0xD2511F53, word)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, word)
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
    return sum(value * word**i for i, value in enumerate(c)) // 65536**half % 65536
