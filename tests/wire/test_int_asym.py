"""int_asym: 2 to 8 bits from the block's least element up."""

import checks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcomm.errors import CodecError
from zcomm.wire.int_asym import IntAsym
from zcomm.wire.int_block import BITS, IntBlock, default_block
from zcomm.wire.registry import codec

GOLDEN = ["int8:asym", "int4:64:asym", "int2:24:asym", "int5:asym:stochastic", "int8:64:asym:stochastic"]
SHORT = [IntAsym(bits, default_block(bits)) for bits in BITS]
KINDS = [*SHORT, IntAsym(4, 64), IntAsym(8, 8), IntAsym(3, 4096), *map(codec, GOLDEN)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_int_asym_is_a_value(kind: IntAsym) -> None:
    checks.check_identity(kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_int_asym_golden_bytes(name: str) -> None:
    checks.check_golden(name)


def test_int_asym_sizes_are_those_of_the_table_in_the_docs() -> None:
    checks.check_nbytes(IntAsym(8, 256), {0: 0, 1: 32, 9: 32, 256: 272, 1025: 32 + 1040, 4096: 64 + 4096})
    checks.check_nbytes(IntAsym(4, 128), {0: 0, 1: 32, 9: 32, 128: 80, 4096: 128 + 2048})
    checks.check_nbytes(IntAsym(3, 64), {0: 0, 1: 32, 64: 16 + 32, 4096: 256 + 1536})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_int_asym_stays_within_its_bound(kind: IntAsym) -> None:
    rng = np.random.default_rng(0)
    far = (1000 + rng.standard_normal(5_003)).astype(np.float32)
    large = (rng.uniform(-1, 1, far.size) * np.nextafter(np.float32(2.0**126), np.float32(0))).astype(np.float32)

    checks.check_elements_of_all_sorts(kind)
    for x in (far, -far, large, np.full_like(far, -3.3)):
        checks.check_error_bound(kind, x)
        checks.check_deterministic(kind, x)
    assert np.isfinite(kind.error_bound(large)).all()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.sampled_from([IntAsym(bits, 16, rounding) for bits in BITS for rounding in ("nearest", "stochastic")]),
)
def test_int_asym_stays_within_its_bound_on_any_floats(elements: list[float], kind: IntAsym) -> None:
    checks.check_error_bound(kind, np.array(elements, np.float32))


@pytest.mark.parametrize("kind", SHORT, ids=str)
def test_int_asym_spends_every_code_between_the_least_and_the_largest_element(kind: IntAsym) -> None:
    # 2^bits numbers that are one step apart, anywhere: each has a code of its own, and nothing is lost.
    numbers = np.arange(2**kind.bits) / 4 + 96
    x = np.resize(numbers, -(-numbers.size // kind.block) * kind.block).astype(np.float32)
    wide = IntAsym(kind.bits, max(kind.block, 256))

    assert (checks.decoded(wide, checks.encoded(wide, x), x.size) == x).all()


@pytest.mark.parametrize("bits", BITS)
def test_int_asym_is_twice_as_fine_where_all_elements_have_one_sign(bits: int) -> None:
    x = np.abs(np.random.default_rng(1).standard_normal(256 * 100)).astype(np.float32)

    def rms(kind: IntAsym | IntBlock) -> float:
        return float(np.sqrt(np.mean((checks.decoded(kind, checks.encoded(kind, x), x.size) - x) ** 2)))

    ratio = 2**bits - 1, 2 ** (bits - 1) - 1  # steps from 0 to the largest element
    assert rms(IntBlock(bits, 256)) / rms(IntAsym(bits, 256)) == pytest.approx(ratio[0] / ratio[1], rel=0.25)


def test_int_asym_keeps_a_block_of_equal_elements() -> None:
    x = np.repeat(np.array([1.5, -2.0, 2.0**-96, 0, -0.0], np.float32), 8)  # bfloat16 numbers

    for bits in BITS:
        y = checks.decoded(IntAsym(bits, 8), checks.encoded(IntAsym(bits, 8), x), x.size)
        assert (y == x).all()
        assert not np.signbit(y[24:]).any()


def test_int_asym_rounds_the_minimum_down_and_the_scale_up() -> None:
    x = np.array([1.00390625, 2, 3, 4, 5, 6, 7, 8, -1.00390625, 0, 0, 0, 0, 0, 0, 3], np.float32)  # 1 + 2^-8, a tie

    wire = checks.encoded(IntAsym(4, 8), x)

    # 1 and -1.0078125; (8 - 1) / 15 and 4.0078125 / 15, up to a bfloat16
    assert wire[:8].view(np.uint16).tolist() == [0x3EEF, 0x3F80, 0x3E89, 0xBF81]
    assert wire[16:24].tolist() == [0x90, 0xB2, 0xD4, 0xF6, 0x40, 0x44, 0x44, 0xF4]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**126, -(2.0**127)])
def test_int_asym_turns_a_block_with_a_bad_element_into_nan_and_no_other(kind: IntAsym, bad: float) -> None:
    checks.check_bad_block(kind, bad)


def test_int_asym_keeps_no_difference_under_two_to_the_minus_96() -> None:
    tiny = np.float32(2.0**-96)
    x = np.array([tiny, 1.5 * tiny, 0, 0, 0, 0, 0, -tiny / 4, *[tiny / 2] * 8], np.float32)

    y = checks.decoded(IntAsym(8, 8), checks.encoded(IntAsym(8, 8), x), x.size)

    assert (np.abs(y[:8] - x[:8]) <= IntAsym(8, 8).error_bound(x)[:8]).all()
    assert not y[8:].any()


def test_a_partial_block_does_not_see_elements_that_are_not_there() -> None:
    x = np.array([7, 7.5, 7.25], np.float32)

    wire = checks.encoded(IntAsym(8, 64), x)

    assert wire[:4].view(np.uint16)[1] == 0x40E0  # 7, not 0
    assert not wire[19:].any()


@pytest.mark.parametrize("spec", ["int8:asym:shift", "int8:asym:asym", "int8:stochastic:asym", "int4:asym:64"])
def test_int_asym_refuses_other_options_with_an_example(spec: str) -> None:
    with pytest.raises(CodecError, match=r"then asym, then stochastic, got .*write int.*:asym:stochastic"):
        codec(spec)


@pytest.mark.parametrize("options", [(9, 128), (4, 12), (4, 128, "shift"), (4, 128, None)])
def test_int_asym_refuses_what_it_is_not_and_says_what_it_is(options: tuple) -> None:
    with pytest.raises(CodecError, match=r"2 to 8 bits|multiple of 8 from 8|rounds to nearest or stochastic"):
        IntAsym(*options)
