"""The codecs of docs/wire-format.md a second time, element by element in the exact fractions of exact.py.

It shares no code and no idea with zcomm.wire, so that a mistake has to be made twice to go unseen. Each codec takes the
bits of float32 elements and gives the wire bytes and the bits of what they decode to.
"""

from __future__ import annotations

from fractions import Fraction

from exact import (
    BF16,
    E2M1,
    E4M3,
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
