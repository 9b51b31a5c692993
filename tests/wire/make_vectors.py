"""Writes tests/wire/vectors/*.npz: golden bytes from a slow scalar implementation of docs/wire-format.md.

    python tests/wire/make_vectors.py

Numbers are the exact fractions of exact.py, element by element. It shares no code and no idea with zcomm.wire, so that
a mistake has to be made twice to go unseen.
Run it again only when the wire format's version changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
from exact import (
    BF16,
    DRAW,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    FP32,
    NAN,
    Format,
    around,
    at_most,
    closest,
    nearest,
    random_bits,
    to_fp32,
    to_integer,
    value,
    walsh,
)

FOLDER = Path(__file__).with_name("vectors")

Encoder = Callable[[list[int]], tuple[list[int], list[int]]]


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


def int_block(x: list[int], bits: int, block: int, rounding: str = "nearest") -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    qmax = 2 ** (bits - 1) - 1
    scales: list[int] = []
    codes: list[int] = []
    decoded: list[int] = []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale = block_scale(part, qmax)
        if rounding == "shift" and any(abs(value(bits, FP32) or Fraction(0)) >= 2**126 for bits in part):
            scale = None
        size = len(part) + -len(part) % 8
        q = [0] * size
        of_block = random_bits(start) if rounding == "shift" and scale else 0
        shift = [of_block % 256, of_block // 256] if rounding == "shift" else []
        if scale is None:
            scales += [0xC0, 0x7F, *shift]
            decoded += [0x7FC00000] * len(part)
        else:
            scales += [scale % 256, scale // 256, *shift]
            s = value(scale, BF16)
            assert s is not None
            for i, element in enumerate(part):
                of_element = value(element, FP32)
                assert of_element is not None
                if s > 0:
                    steps = to_fp32(of_element * to_fp32(1 / s))
                    q[i] = to_integer(steps)
                    if rounding != "nearest":
                        u = of_block if rounding == "shift" else random_bits(start + i)
                        up = to_fp32(steps + 128 + Fraction(u, 65536))
                        q[i] = up.numerator // up.denominator - 128
                    q[i] = max(-qmax, min(qmax, q[i]))
                shifted = (Fraction(1, 2) - Fraction(of_block, 65536)) * s if rounding == "shift" else Fraction(0)
                decoded.append(nearest(q[i] * s + shifted, FP32))
        codes += plane_bits(q, bits)
    return padded(scales) + padded(codes), decoded


def int_asym(x: list[int], bits: int, block: int, by_chance: bool = False) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    largest = 2**bits - 1
    pairs: list[int] = []
    codes: list[int] = []
    decoded: list[int] = []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        values = [value(element, FP32) for element in part]
        q = [0] * (len(part) + -len(part) % 8)
        if any(v is None or abs(v) >= 2**126 for v in values):
            pairs += [0xC0, 0x7F, 0, 0]
            decoded += [NAN] * len(part)
            codes += plane_bits(q, bits)
            continue
        numbers = [v for v in values if v is not None]
        least, scale = 0, 0
        if max(abs(v) for v in numbers) >= Fraction(1, 2**96):
            least = at_most(min(numbers))
        m = value(least, BF16)
        assert m is not None
        reach = to_fp32(max(numbers) - m)
        if least == 0 and max(abs(v) for v in numbers) < Fraction(1, 2**96):
            reach = Fraction(0)
        if reach >= Fraction(1, 2**96):
            step = to_fp32(reach / largest)
            scale = nearest(step, BF16)
            while value(scale, BF16) < step:  # type: ignore[operator]
                scale += 1
        s = value(scale, BF16)
        assert s is not None
        for i, number in enumerate(numbers):
            if scale:
                steps = to_fp32(to_fp32(number - m) * to_fp32(1 / s))
                q[i] = to_integer(steps)
                if by_chance:
                    up = to_fp32(steps + Fraction(random_bits(start + i), 65536))
                    q[i] = min(largest, up.numerator // up.denominator)
            decoded.append(nearest(q[i] * s + m, FP32))
        pairs += [scale % 256, scale // 256, least % 256, least // 256]
        codes += plane_bits(q, bits)
    return padded(pairs) + padded(codes), decoded


def hadamard(x: list[int], *inner: int | str) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits of an int_block behind the rotation."""
    scaled = []
    for bits in x + [0] * (-len(x) % 32):
        number = value(bits, FP32)
        scaled.append(bits if number is None else nearest(number / 32, FP32))
    rotated = [y for start in range(0, len(scaled), 32) for y in walsh(scaled[start : start + 32])]
    wire, decoded = int_block(rotated, *inner)  # type: ignore[arg-type]
    back = [y for start in range(0, len(decoded), 32) for y in walsh(decoded[start : start + 32])]
    return wire, back[: len(x)]


def small_float(
    element: int,  # fp32 bits
    numbers: list[Fraction],
    inverse: Fraction,
    scale: Fraction,
    u: int | None = None,  # random bits, to round by them
) -> tuple[int, int]:
    """Code and decoded fp32 bits."""
    sign, magnitude = divmod(element, 2**31)
    number = value(magnitude, FP32)
    assert number is not None
    scaled = to_fp32(number * inverse)
    code = closest(scaled, numbers) if u is None else around(scaled, numbers, u)
    per_sign = 128 if len(numbers) > 8 else 8
    return sign * per_sign + code, (sign << 31) + nearest(numbers[code] * scale, FP32)


def floats_of(
    part: list[int],  # fp32 bits of a block
    start: int,  # index of its first element
    numbers: list[Fraction],
    inverse: Fraction,
    scale: Fraction,
    by_chance: bool,
) -> list[tuple[int, int]]:
    """Codes and decoded fp32 bits of a block."""
    drawn = [random_bits(start + i) if by_chance else None for i in range(len(part))]
    return [small_float(e, numbers, inverse, scale, u) for e, u in zip(part, drawn, strict=True)]


def fp8_block(
    x: list[int], numbers: list[Fraction], block: int, tiny: int, by_chance: bool = False
) -> tuple[list[int], list[int]]:
    """Wire bytes and decoded fp32 bits."""
    scales: list[int] = []
    codes: list[int] = []
    decoded: list[int] = []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale = block_scale(part, int(numbers[-1]), tiny)
        scales += [0xC0, 0x7F] if scale is None else [scale % 256, scale // 256]
        s = value(scale, BF16) if scale else None
        pairs = floats_of(part, start, numbers, to_fp32(1 / s), s, by_chance) if s else []
        codes += [code for code, _ in pairs] or [0] * len(part)
        decoded += [back for _, back in pairs] or [NAN if scale is None else 0] * len(part)
    codes += [0] * (-len(codes) % 8)
    return padded(scales) + padded(codes), decoded


def mx_block(
    x: list[int], numbers: list[Fraction], largest_exponent: int, by_chance: bool = False
) -> tuple[list[int], list[int]]:
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
            if by_chance and numbers[-1] * Fraction(2) ** exponent < largest < Fraction(2) ** 127:
                exponent += 1
            power = Fraction(2) ** exponent
            pairs = floats_of(part, start, numbers, 1 / power, power, by_chance)
        scales.append(exponent + 127)
        q = [code for code, _ in pairs] + [0] * (-len(part) % 8)
        codes += plane_bits(q, 8 if len(numbers) > 8 else 4)
        decoded += [back for _, back in pairs]
    return padded(scales) + padded(codes), decoded


def nvfp4(x: list[int], by_chance: bool = False) -> tuple[list[int], list[int]]:
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
        for i, (part, is_bad) in enumerate(zip(parts, bad, strict=True)):
            pairs = [(0, NAN if is_bad else 0)] * len(part)
            scale = 0x7F if is_bad else 0
            if not is_bad and region > 0:
                largest = max(value(bits % 2**31, FP32) or Fraction(0) for bits in part)
                exact = to_fp32(to_fp32(largest / 6) * to_fp32(1 / region))
                scale = closest(exact, E4M3)
                if by_chance and E4M3[scale] < min(exact, E4M3[-1]):
                    scale += 1
                if scale > 0:
                    s = E4M3[scale] * region
                    pairs = floats_of(part, begin + 16 * i, E2M1, to_fp32(1 / s), s, by_chance)
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


def ints(*options: int | str) -> tuple[int, Encoder]:
    """An int_block by its width, block and rounding."""
    return int(options[1]), lambda x: int_block(x, *options)  # type: ignore[arg-type]


def rotated(*options: int | str) -> tuple[int, Encoder]:
    """One behind the rotation."""
    return int(options[1]), lambda x: hadamard(x, *options)  # type: ignore[arg-type]


CODECS: dict[str, tuple[int, Encoder]] = {  # a block for the inputs, and what makes wire bytes and decoded fp32 bits
    **{f"int{bits}": ints(bits, 256 if bits >= 5 else 128) for bits in range(2, 9)},
    "int4:64": ints(4, 64),
    "int8:8": ints(8, 8),
    "int6:24": ints(6, 24),
    "int3:40": ints(3, 40),
    "int7:16": ints(7, 16),
    "int8:stochastic": ints(8, 256, "stochastic"),
    "int4:64:stochastic": ints(4, 64, "stochastic"),
    "int2:stochastic": ints(2, 128, "stochastic"),
    "int8:shift": ints(8, 256, "shift"),
    "int4:64:shift": ints(4, 64, "shift"),
    "int2:24:shift": ints(2, 24, "shift"),
    "int8:asym": (256, lambda x: int_asym(x, 8, 256)),
    "int4:64:asym": (64, lambda x: int_asym(x, 4, 64)),
    "int2:24:asym": (24, lambda x: int_asym(x, 2, 24)),
    "int5:asym:stochastic": (256, lambda x: int_asym(x, 5, 256, True)),
    "int8:64:asym:stochastic": (64, lambda x: int_asym(x, 8, 64, True)),
    "hadamard:int4": rotated(4, 128),
    "hadamard:int6:16": rotated(6, 16),
    "hadamard:int8:stochastic": rotated(8, 256, "stochastic"),
    "hadamard:int4:shift": rotated(4, 128, "shift"),
    "fp8_e4m3": (64, lambda x: fp8_block(x, E4M3, 128, -96)),
    "fp8_e4m3:24": (64, lambda x: fp8_block(x, E4M3, 24, -96)),
    "fp8_e5m2": (64, lambda x: fp8_block(x, E5M2, 128, -80)),
    "fp8_e4m3:stochastic": (64, lambda x: fp8_block(x, E4M3, 128, -96, True)),
    "fp8_e5m2:40:stochastic": (64, lambda x: fp8_block(x, E5M2, 40, -80, True)),
    "mxfp8": (64, lambda x: mx_block(x, E4M3, 8)),
    "mxfp4": (64, lambda x: mx_block(x, E2M1, 2)),
    "mxfp8:stochastic": (64, lambda x: mx_block(x, E4M3, 8, True)),
    "mxfp4:stochastic": (64, lambda x: mx_block(x, E2M1, 2, True)),
    "nvfp4": (64, nvfp4),
    "nvfp4:stochastic": (64, lambda x: nvfp4(x, True)),
    "bf16": (64, lambda x: cast(x, BF16, 0x7FC0)),
    "fp16": (64, lambda x: cast(x, FP16, 0x7E00)),
    "raw": (64, raw),
}


def main() -> None:
    """Write every file."""
    FOLDER.mkdir(exist_ok=True)
    for name, (block, encoded) in CODECS.items():
        arrays = {"draw": np.array(DRAW, np.uint64)} if "stochastic" in name or "shift" in name else {}
        for case, x in inputs(block).items():
            wire, decoded = encoded(x)
            arrays[f"{case}/x"] = np.array(x, np.uint32)
            arrays[f"{case}/wire"] = np.array(wire, np.uint8)
            arrays[f"{case}/decoded"] = np.array(decoded, np.uint32)
        np.savez_compressed(FOLDER / f"{name.replace(':', '-')}.npz", **arrays)
        print(name, sum(len(a) for a in arrays.values()), "values")


if __name__ == "__main__":
    main()
