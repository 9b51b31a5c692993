"""The small floats of fp8_block, mx_block and nvfp4."""

import ml_dtypes
import numpy as np
import pytest

from zcomm.wire.minifloat import E2M1, E4M3, E5M2, MiniFloat, from_mini, to_mini

OTHERS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: getattr(ml_dtypes, "float4_e2m1fn", None)}
FORMS = pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.name)


@FORMS
def test_codes_are_those_of_ml_dtypes_where_nothing_is_too_large(form: MiniFloat) -> None:
    if OTHERS[form] is None:
        pytest.skip("this ml_dtypes has no float4_e2m1fn")
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(100_000) * 2.0 ** rng.integers(-20, 20, 100_000)
    numbers = from_mini(np.arange(form.largest_code + 1, dtype=np.uint8), form)
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (0, np.inf)])
    x = np.concatenate([wide, numbers, ties, -ties, beside]).astype(np.float32)
    x = x[np.abs(x) <= form.largest]

    codes = to_mini(x, form)

    assert codes.tobytes() == x.astype(OTHERS[form]).view(np.uint8).tobytes()


@FORMS
def test_numbers_are_those_of_ml_dtypes_for_every_code(form: MiniFloat) -> None:
    if OTHERS[form] is None:
        pytest.skip("this ml_dtypes has no float4_e2m1fn")
    codes = np.arange(2**form.bits, dtype=np.uint8)

    expected = codes.view(OTHERS[form]).astype(np.float32)

    assert np.array_equal(from_mini(codes, form), expected, equal_nan=True)
    assert from_mini(codes, form)[form.largest_code] == form.largest


@FORMS
def test_what_is_too_large_becomes_the_largest(form: MiniFloat) -> None:
    x = np.array([form.largest * 1.3, 1e30, np.inf, -np.inf], np.float32)

    assert np.abs(from_mini(to_mini(x, form), form)).tolist() == [form.largest] * 4
