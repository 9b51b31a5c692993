"""Writes tests/wire/vectors/*.npz: golden bytes from a slow scalar implementation of docs/wire-format.md.

    python tests/wire/make_vectors.py

Numbers are exact fractions and every rounding is spelled out, element by element. It shares no code and no idea with
zcomm.wire (no float arithmetic, no masks, no vector operations), so that a mistake has to be made twice to go unseen.
Run it again only when the wire format's version changes.
"""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER = Path(__file__).with_name("vectors")


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


def block_scale(block: list[int], qmax: int, tiny: int = -96) -> int | None:
    """bfloat16 bits of a block's scale; None if the block is not finite."""
    values = [value(bits, FP32) for bits in block]
    if None in values:
        return None
    largest = max(abs(v) for v in values if v is not None)
    if largest < Fraction(2) ** tiny:
        return 0
    quotient = to_fp32(largest / qmax)
    scale = nearest(quotient, BF16)
    while value(scale, BF16) is not None and value(scale, BF16) < quotient:  # type: ignore[operator]
        scale += 1
    while value(scale, BF16) is not None and value(scale, BF16) * qmax < largest:  # type: ignore[operator]
        scale += 1
    beyond = Fraction(2) ** 128  # the first power of two that fp32 has no number for
    while value(scale, BF16) is None or value(scale, BF16) * qmax >= beyond:  # type: ignore[operator]
        scale -= 1
    return scale


def plane_bits(codes: list[int], bits: int) -> list[int]:
    """The bytes of one block's codes, bit by bit."""
    r, out, low = len(codes), [], 0
    for field in (8, 4, 2, 1):
        if not bits & field:
            continue
        per_byte = 8 // field
        length = r // per_byte
        plane = [0] * length
        for element, code in enumerate(codes):
            for bit in range(field):
                is_set = (code >> (low + bit)) % 2  # Python's shift of a negative number is two's complement
                plane[element % length] += is_set << (element // length * field + bit)
        out += plane
        low += field
    return out


def padded(data: list[int]) -> list[int]:
    """Zero bytes up to a multiple of 16."""
    return data + [0] * (-len(data) % 16)


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


def int_block(x: list[int], bits: int, block: int, by_chance: bool = False) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    qmax = 2 ** (bits - 1) - 1
    scales: list[int] = []
    codes: list[int] = []
    decoded: list[int] = []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale = block_scale(part, qmax)
        size = len(part) + -len(part) % 8
        q = [0] * size
        if scale is None:
            scales += [0xC0, 0x7F]
            decoded += [0x7FC00000] * len(part)
        else:
            scales += [scale % 256, scale // 256]
            s = value(scale, BF16)
            assert s is not None
            for i, element in enumerate(part):
                of_element = value(element, FP32)
                assert of_element is not None
                if s > 0:
                    steps = to_fp32(of_element * to_fp32(1 / s))
                    if by_chance:
                        up = to_fp32(steps + 128 + Fraction(random_bits(start + i), 65536))
                        q[i] = max(-qmax, min(qmax, up.numerator // up.denominator - 128))
                    else:
                        q[i] = max(-qmax, min(qmax, to_integer(steps)))
                decoded.append(nearest(q[i] * s, FP32))
        codes += plane_bits(q, bits)
    return padded(scales) + padded(codes), decoded


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


def hadamard(x: list[int], *inner: int) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits of an int_block behind the rotation."""
    scaled = []
    for bits in x + [0] * (-len(x) % 32):
        number = value(bits, FP32)
        scaled.append(bits if number is None else nearest(number / 32, FP32))
    rotated = [y for start in range(0, len(scaled), 32) for y in walsh(scaled[start : start + 32])]
    wire, decoded = int_block(rotated, *inner)  # type: ignore[arg-type]
    back = [y for start in range(0, len(decoded), 32) for y in walsh(decoded[start : start + 32])]
    return wire, back[: len(x)]


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


def small_float(
    element: int,  # fp32 bits
    numbers: list[Fraction],
    inverse: Fraction,
    scale: Fraction,
) -> tuple[int, int]:
    """Code and decoded fp32 bits."""
    sign, magnitude = divmod(element, 2**31)
    number = value(magnitude, FP32)
    assert number is not None
    code = closest(to_fp32(number * inverse), numbers)
    per_sign = 128 if len(numbers) > 8 else 8
    return sign * per_sign + code, (sign << 31) + nearest(numbers[code] * scale, FP32)


def fp8_block(x: list[int], numbers: list[Fraction], block: int, tiny: int) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    scales: list[int] = []
    codes: list[int] = []
    decoded: list[int] = []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale = block_scale(part, int(numbers[-1]), tiny)
        scales += [0xC0, 0x7F] if scale is None else [scale % 256, scale // 256]
        s = value(scale, BF16) if scale else None
        pairs = [small_float(e, numbers, to_fp32(1 / s), s) for e in part] if s else []
        codes += [code for code, _ in pairs] or [0] * len(part)
        decoded += [back for _, back in pairs] or [NAN if scale is None else 0] * len(part)
    codes += [0] * (-len(codes) % 8)
    return padded(scales) + padded(codes), decoded


def mx_block(x: list[int], numbers: list[Fraction], largest_exponent: int) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    scales: list[int] = []
    codes: list[int] = []
    decoded: list[int] = []
    for start in range(0, len(x), 32):
        part = x[start : start + 32]
        values = [value(bits % 2**31, FP32) for bits in part]
        largest = max((v for v in values if v is not None), default=Fraction(0))
        pairs = [(0, NAN if None in values else 0)] * len(part)
        exponent = -127
        if None in values:
            exponent = 128
        elif largest >= Fraction(1, 2**96):
            exponent = -largest_exponent + max(e for e in range(-96, 128) if Fraction(2) ** e <= largest)
            pairs = [small_float(e, numbers, Fraction(2) ** -exponent, Fraction(2) ** exponent) for e in part]
        scales.append(exponent + 127)
        q = [code for code, _ in pairs] + [0] * (-len(part) % 8)
        codes += plane_bits(q, 8 if len(numbers) > 8 else 4)
        decoded += [back for _, back in pairs]
    return padded(scales) + padded(codes), decoded


def nvfp4(x: list[int]) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    regions: list[int] = []
    scales: list[int] = []
    codes: list[int] = []
    decoded: list[int] = []
    for begin in range(0, len(x), 1024):
        parts = [x[start : start + 16] for start in range(begin, min(begin + 1024, len(x)), 16)]
        bad = [any(value(bits, FP32) is None for bits in part) for part in parts]
        good = [bits for part, is_bad in zip(parts, bad, strict=True) if not is_bad for bits in part]
        upper = block_scale(good or [0], 2688)
        assert upper is not None
        regions += list((upper << 16).to_bytes(4, "little"))
        region = value(upper, BF16)
        assert region is not None
        for part, is_bad in zip(parts, bad, strict=True):
            pairs = [(0, NAN if is_bad else 0)] * len(part)
            scale = 0x7F if is_bad else 0
            if not is_bad and region > 0:
                largest = max(value(bits % 2**31, FP32) or Fraction(0) for bits in part)
                scale = closest(to_fp32(to_fp32(largest / 6) * to_fp32(1 / region)), E4M3)
                if scale > 0:
                    s = E4M3[scale] * region
                    pairs = [small_float(e, E2M1, to_fp32(1 / s), s) for e in part]
            scales.append(scale)
            codes += plane_bits([code for code, _ in pairs] + [0] * (-len(part) % 8), 4)
            decoded += [back for _, back in pairs]
    return padded(regions) + padded(scales) + padded(codes), decoded


def cast(x: list[int], form: Format, quiet: int) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    wire: list[int] = []
    decoded: list[int] = []
    for bits in x:
        sign, magnitude = bits >> 31, bits % 2**31
        if magnitude > FP32.infinity:
            narrow, wide = quiet, 0x7FC00000
        elif magnitude == FP32.infinity:
            narrow, wide = form.infinity, FP32.infinity
        else:
            number = value(magnitude, FP32)
            assert number is not None
            narrow = nearest(number, form)
            back = value(narrow, form)
            wide = FP32.infinity if back is None else nearest(back, FP32)
        narrow += sign << 15
        wire += [narrow % 256, narrow // 256]
        decoded.append(wide + (sign << 31))
    return padded(wire), decoded


def raw(x: list[int]) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    return padded([byte for bits in x for byte in bits.to_bytes(4, "little")]), x


def inputs(block: int) -> dict[str, list[int]]:
    """Bit patterns of float32 elements, by the name of the case."""
    rng = random.Random(block)

    def of(number: float) -> int:
        return nearest(Fraction(number), FP32)

    def normal(n: int) -> list[int]:
        return [of(rng.gauss(0, 1)) for _ in range(n)]

    block = min(block, 256)
    ties = [of(0.5 * rng.randint(-255, 255)) for _ in range(block)]
    return {
        "empty": [],
        "one": [of(-3.25)],
        "seven": normal(7),
        "eight": normal(8),
        "nine": normal(9),
        "whole": normal(block),
        "partial": normal(block + block // 2 + 3),
        "wide": [of(rng.gauss(0, 1) * 2.0 ** rng.randint(-30, 30)) for _ in range(block + 5)],
        "zero": [0, 0x80000000] * (block // 2),
        "subnormal": [rng.randrange(2**23) + rng.randrange(2) * 2**31 for _ in range(block)],
        "under threshold": [0x0F7FFFFF, 0x8F7FFFFF, *[0] * 6],
        "at threshold": [0x0F800000, 0x8F800000, 0x0F000000, 1, *[0] * 4],
        "infinite, then finite": [*normal(block - 1), 0xFF800000, *normal(11)],
        "nan, then finite": [0x7F800001, *normal(block - 1), *normal(3)],
        "largest": [0x7F7FFFFF, 0xFF7FFFFF, 0x7F000000, 0x7E800000, 0x00000001, *normal(9)],
        "under the cap": [0x7F7EFFFF, 0x7E7FFFFF, 0xFEFFFFFF, *normal(5)],
        "ties": ties,
        "near ties": [bits + rng.choice((-1, 1)) if bits % 2**31 else bits for bits in ties],
        "any bits": [rng.randrange(2**32) for _ in range(16)],
        # Largest magnitudes one unit over a scale's reach, for every width, and codes next to a tie.
        "over a scale": [of(s * q) + 1 for s in (1, 1.0078125, 1.5, 1.9921875) for q in (127, 63, 31, 15, 7, 3, 1)],
        "rounded ties": [of(1.3359375 * 127), *[of(1.3359375 * (i + 0.5)) + i % 3 - 1 for i in range(-7, 8)]],
        "powers of two": [((i % 254 + 1) << 23) | (i % 2) << 31 for i in range(block)],
    }


def main() -> None:
    """Write every file."""
    FOLDER.mkdir(exist_ok=True)
    codecs: dict[str, tuple[int, ...]] = {f"int{bits}": (bits, 256 if bits >= 5 else 128) for bits in range(2, 9)}
    codecs |= {
        "int8:stochastic": (8, 256, True),
        "int4:64:stochastic": (4, 64, True),
        "int2:stochastic": (2, 128, True),
    }
    codecs |= {"int4:64": (4, 64), "int8:8": (8, 8), "int6:24": (6, 24), "int3:40": (3, 40), "int7:16": (7, 16)}
    codecs |= {"hadamard:int4": (4, 128), "hadamard:int6:16": (6, 16), "hadamard:int8:stochastic": (8, 256, True)}
    floats = {
        "fp8_e4m3": lambda x: fp8_block(x, E4M3, 128, -96),
        "fp8_e4m3:24": lambda x: fp8_block(x, E4M3, 24, -96),
        "fp8_e5m2": lambda x: fp8_block(x, E5M2, 128, -80),
        "mxfp8": lambda x: mx_block(x, E4M3, 8),
        "mxfp4": lambda x: mx_block(x, E2M1, 2),
        "nvfp4": nvfp4,
    }
    for name, block in [(name, codecs.get(name, (0, 64))[1]) for name in (*codecs, *floats, "bf16", "fp16", "raw")]:
        arrays = {"draw": np.array(DRAW, np.uint64)} if "stochastic" in name else {}
        for case, x in inputs(block).items():
            if name in floats:
                wire, decoded = floats[name](x)
            elif name.startswith("hadamard"):
                wire, decoded = hadamard(x, *codecs[name])
            elif name in codecs:
                wire, decoded = int_block(x, *codecs[name])
            elif name == "raw":
                wire, decoded = raw(x)
            else:
                form, quiet = (BF16, 0x7FC0) if name == "bf16" else (FP16, 0x7E00)
                wire, decoded = cast(x, form, quiet)
            arrays[f"{case}/x"] = np.array(x, np.uint32)
            arrays[f"{case}/wire"] = np.array(wire, np.uint8)
            arrays[f"{case}/decoded"] = np.array(decoded, np.uint32)
        np.savez_compressed(FOLDER / f"{name.replace(':', '-')}.npz", **arrays)
        print(name, sum(len(a) for a in arrays.values()), "values")


if __name__ == "__main__":
    main()
