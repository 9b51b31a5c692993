"""bf16 and fp16: one rounding per element."""

import checks
import numpy as np
import pytest

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.cast import Cast

ALL = [Cast(DType.BFLOAT16), Cast(DType.FLOAT16)]


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_cast_is_a_value(kind: Cast) -> None:
    checks.check_identity(kind)
    assert all(kind.for_dtype(dtype) is kind for dtype in DType)


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_cast_takes_two_bytes_an_element(kind: Cast) -> None:
    checks.check_nbytes(kind, {0: 0, 1: 16, 8: 16, 9: 32, 4096: 8192})


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_cast_golden_bytes(name: str) -> None:
    checks.check_golden(name)


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_cast_rounds_every_16_bit_float_to_itself(kind: Cast) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(kind.dtype.numpy)
    x = every.astype(np.float32)

    back = checks.encoded(kind, x).view(np.uint16)

    numbers = ~np.isnan(x)
    assert (back[numbers] == every.view(np.uint16)[numbers]).all()
    quiet = 0x7FC0 if str(kind) == "bf16" else 0x7E00
    assert (back[~numbers] & 0x7FFF == quiet).all()
    assert (back[~numbers] >> 15 == every.view(np.uint16)[~numbers] >> 15).all()


@pytest.mark.parametrize("kind", ALL, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_cast_stays_within_its_bound(kind: Cast, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 20_001, dtype=np.uint32).view(np.float32)
    usual = (rng.standard_normal(20_001) * 2.0 ** rng.integers(-30, 16, 20_001)).astype(np.float32)

    for x in (bits, usual):
        checks.check_error_bound(kind, x)
        checks.check_deterministic(kind, x)


def test_fp16_overflows_to_infinity_from_half_a_step_above_its_largest() -> None:
    x = np.array([65504, 65519.996, 65520, -65520, 1e30], np.float32)
    kind = Cast(DType.FLOAT16)

    y = checks.decoded(kind, checks.encoded(kind, x), x.size)

    assert y.tolist() == [65504, 65504, np.inf, -np.inf, np.inf]
    assert np.isinf(kind.error_bound(x)).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, "bfloat16", None, True, []])
def test_cast_refuses_other_dtypes_and_names_its_own(dtype: object) -> None:
    with pytest.raises(CodecError, match=r"DType\.BFLOAT16 or DType\.FLOAT16"):
        Cast(dtype)  # type: ignore[arg-type]
