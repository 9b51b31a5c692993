"""fp8_block: 8-bit floats, one bfloat16 scale per block."""

import checks
import numpy as np
import pytest

from zcomm.errors import CodecError
from zcomm.wire.fp8_block import Fp8Block

GOLDEN = ["fp8_e4m3", "fp8_e4m3:24", "fp8_e5m2", "fp8_e4m3:stochastic", "fp8_e5m2:40:stochastic"]
KINDS = [Fp8Block("e4m3"), Fp8Block("e5m2"), Fp8Block("e4m3", 24), Fp8Block("e5m2", 4096)]
KINDS += [Fp8Block("e4m3", 64, "stochastic"), Fp8Block("e5m2", 128, "stochastic")]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_fp8_block_is_a_value(kind: Fp8Block) -> None:
    checks.check_identity(kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_fp8_block_golden_bytes(name: str) -> None:
    checks.check_golden(name)


def test_fp8_block_sizes_are_those_of_the_table_in_the_docs() -> None:
    checks.check_nbytes(Fp8Block("e4m3"), {0: 0, 1: 32, 9: 32, 128: 144, 257: 16 + 272, 4096: 64 + 4096})
    checks.check_nbytes(Fp8Block("e5m2", 24), {0: 0, 1: 32, 17: 48, 240: 32 + 240})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_fp8_block_stays_within_its_bound(kind: Fp8Block) -> None:
    checks.check_elements_of_all_sorts(kind)
    checks.check_largest_stay_finite(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_fp8_block_turns_a_block_with_a_bad_element_into_nan_and_no_other(kind: Fp8Block, bad: float) -> None:
    checks.check_bad_block(kind, bad)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_fp8_block_never_clips_its_largest_element(kind: Fp8Block) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(50 * kind.block) * 2.0 ** rng.integers(-70, 120)).astype(np.float32)

    wire = checks.encoded(kind, x)

    scales = (wire[:100].view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    largest = np.abs(x).reshape(50, -1).max(axis=1).astype(np.float64)
    assert (scales * kind.form.largest >= largest).all()
    assert (scales * kind.form.largest <= largest * (1 + 2.0**-6)).all()


def test_fp8_block_sends_blocks_too_small_to_add_up_exactly_as_zeros() -> None:
    for kind, limit in ((Fp8Block("e4m3"), 2.0**-96), (Fp8Block("e5m2"), 2.0**-80)):
        x = np.zeros(256, np.float32)
        x[0], x[128] = limit, np.nextafter(np.float32(limit), np.float32(0))

        y = checks.decoded(kind, checks.encoded(kind, x), x.size)

        assert y[0] == pytest.approx(limit, rel=2.0**-6)
        assert not y[128:].any()


@pytest.mark.parametrize(
    "options", [("e3m4",), ("", 128), ("e4m3", 12), ("e4m3", 0), ("e4m3", None), ("e4m3", 128, "shift")]
)
def test_fp8_block_refuses_what_it_is_not_and_says_what_it_is(options: tuple) -> None:
    with pytest.raises(
        CodecError, match=r"e4m3 or e5m2|multiple of 8 from 8 to 65536.*use 128|rounds to nearest or stochastic"
    ):
        Fp8Block(*options)
