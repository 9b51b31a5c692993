"""The root mean square of each codec's error is what theory says, for every block, width and dtype."""

from __future__ import annotations

import checks
import numpy as np
import pytest

from zcomm.buffers import DType
from zcomm.wire.codec import Codec
from zcomm.wire.elements import narrow, widen
from zcomm.wire.fp8_block import Fp8Block
from zcomm.wire.hadamard import Hadamard, rotated
from zcomm.wire.int_asym import IntAsym
from zcomm.wire.int_block import BITS, ROUNDINGS, IntBlock
from zcomm.wire.minifloat import E2M1, MiniFloat
from zcomm.wire.mx_block import MxBlock
from zcomm.wire.nvfp4 import NvFp4

BLOCKS = (8, 24, 64, 128, 256, 1024)
CHANCES = ("nearest", "stochastic")
INTS: list[Codec] = [IntBlock(bits, block, rounding) for bits in BITS for block in BLOCKS for rounding in ROUNDINGS]
INTS += [IntAsym(bits, block, rounding) for bits in BITS for block in BLOCKS for rounding in CHANCES]
FLOATS = [Fp8Block(name, block, rounding) for name in ("e4m3", "e5m2") for block in BLOCKS for rounding in CHANCES]
OTHERS = [MxBlock(name, rounding) for name in ("mxfp8", "mxfp4") for rounding in CHANCES] + [*map(NvFp4, CHANCES)]
ROTATED = [Hadamard(IntBlock(bits, 128, rounding)) for bits in (8, 6, 5) for rounding in ROUNDINGS]
ROTATED += [Hadamard(IntAsym(6, 128)), Hadamard(Fp8Block("e4m3", 128, "stochastic"))]
N_ELEMS = 24 * 1024


def step_of_float(x: np.ndarray, form: MiniFloat) -> np.ndarray:
    """Distance of neighbouring numbers of the format around x."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x), form.smallest_normal)))
    return 2.0 ** (exponent - form.mantissa)


def expected_square(kind: Codec, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Mean square of each element's error: a step squared over 12, each by chance over 6; what clips, its distance."""
    parts = 6 if kind.rounding == "stochastic" else 12  # type: ignore[attr-defined]
    if isinstance(kind, IntBlock | IntAsym):
        return scale**2 / parts
    form = E2M1 if isinstance(kind, NvFp4) else kind.form  # type: ignore[attr-defined]
    inside = np.minimum(np.abs(x) / scale, form.largest)
    beyond = np.maximum(np.abs(x) / scale - form.largest, 0)
    return scale**2 * np.where(beyond > 0, beyond**2, step_of_float(inside, form) ** 2 / parts)


def scales_of(kind: Codec, x: np.ndarray) -> np.ndarray:
    """The scale of each element, from what the largest codes of its block decode to."""
    if isinstance(kind, NvFp4):
        return np.repeat(kind._scales(x).values, 16).astype(np.float64)
    wire = checks.encoded(kind, x)
    if isinstance(kind, MxBlock):
        return np.repeat(2.0 ** (wire[: x.size // 32].astype(np.float64) - 127), 32)
    nbytes = kind.scale_nbytes  # type: ignore[attr-defined]
    bits = wire[: nbytes * (x.size // kind.block)].view(np.uint16)[:: nbytes // 2]
    return np.repeat((bits.astype(np.uint32) << 16).view(np.float32), kind.block).astype(np.float64)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.spelling)
@pytest.mark.parametrize("kind", [*INTS, *FLOATS, *OTHERS, *ROTATED], ids=str)
def test_the_error_is_a_step_over_the_root_of_12(kind: Codec, dtype: DType) -> None:
    # Uniform elements are uniform within a step; rotated ones are nearly normal, for which 5 bits are enough.
    rng = np.random.default_rng(len(str(kind)))
    x = widen(narrow(rng.uniform(-1, 1, N_ELEMS).astype(np.float32), dtype), dtype)
    y = checks.decoded(kind, checks.encoded(kind, x), x.size)

    if isinstance(kind, Hadamard):
        coded = rotated(x)
        expected = 32 * np.mean(expected_square(kind.inner, coded, scales_of(kind.inner, coded)))
    else:
        expected = np.mean(expected_square(kind, x, scales_of(kind, x)))

    # bfloat16 has as many significant bits as 8-bit codes, so its elements are not uniform within a step; and the
    # scale takes a block's largest element to a code, so that one of a block, or the two at its ends, is nearly exact.
    n_exact = 2 if isinstance(kind, IntAsym) else 1
    tolerance = (0.24 if dtype is DType.BFLOAT16 else 0.1) + n_exact / kind.block
    assert np.mean((y.astype(np.float64) - x) ** 2) == pytest.approx(expected, rel=tolerance)
