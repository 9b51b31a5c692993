"""raw: bytes untouched."""

import checks
import numpy as np
import pytest

from zcomm.buffers import DType
from zcomm.errors import CodecError
from zcomm.wire.raw import Raw
from zcomm.wire.registry import codec

ALL = [Raw(dtype) for dtype in DType]


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_raw_is_a_value(kind: Raw) -> None:
    checks.check_identity(kind)


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_raw_takes_the_elements_bytes_padded(kind: Raw) -> None:
    size = kind.dtype.itemsize

    checks.check_nbytes(kind, {0: 0, 1: 16, 8: 8 * size, 9: -(-9 * size // 16) * 16, 4096: 4096 * size})


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_raw_brings_every_bit_pattern_back(kind: Raw) -> None:
    bits = np.random.default_rng(0).integers(0, 256, 37 * kind.dtype.itemsize, dtype=np.uint8)
    x = bits.view(kind.dtype.numpy)

    wire = checks.encoded(kind, x)

    assert wire[: bits.size].tobytes() == bits.tobytes()
    assert not wire[bits.size :].any()
    assert checks.decoded(kind, wire, x.size).tobytes() == x.tobytes()


def test_raw_has_no_error_to_bound() -> None:
    x = np.array([1.5, -0.0, np.inf, np.nan], np.float32)

    assert Raw().error_bound(x).tolist() == [0.0, 0.0, np.inf, np.inf]


def test_raw_follows_the_dtype() -> None:
    assert [str(Raw().for_dtype(dtype)) for dtype in DType] == [
        "raw",
        "raw:bfloat16",
        "raw:float16",
        "raw:float64",
    ]
    assert Raw(DType.FLOAT16).for_dtype(DType.FLOAT32) == Raw()


def test_raw_golden_bytes() -> None:
    checks.check_golden("raw")


@pytest.mark.parametrize("spec", ["raw:int32", "raw:Float32", "raw:", "raw:float32:float32"])
def test_raw_refuses_other_spellings_and_names_its_own(spec: str) -> None:
    with pytest.raises(CodecError, match=r"one option, a dtype \(float32, bfloat16, float16, float64\)"):
        codec(spec)


@pytest.mark.parametrize("dtype", ["float32", np.float32, None, True, [], 0])
def test_raw_refuses_what_is_no_dtype_and_names_its_own(dtype: object) -> None:
    with pytest.raises(CodecError, match=r"raw carries DType\.FLOAT32, DType\.BFLOAT16, .*, got"):
        Raw(dtype)  # type: ignore[arg-type]
