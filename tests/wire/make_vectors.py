"""Writes tests/wire/vectors/*.npz: golden bytes from a slow scalar implementation of docs/wire-format.md.

    python tests/wire/make_vectors.py

The codecs are those of exact_codecs.py, which shares nothing with zcomm.wire. Run it again only when the wire format's
version changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
from exact import BF16, DRAW, E2M1, E4M3, E5M2, FP16, FP32, nearest
from exact_codecs import cast, fp8_block, hadamard, int_asym, int_block, mx_block, nvfp4, raw

FOLDER = Path(__file__).with_name("vectors")

Encoder = Callable[[list[int]], tuple[list[int], list[int]]]


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
