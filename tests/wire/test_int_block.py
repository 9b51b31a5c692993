"""int_block: 2 to 8 bits, one bfloat16 scale per block."""

import checks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcomm.errors import CodecError
from zcomm.wire.draw import Draw, half_words
from zcomm.wire.int_block import BITS, ROUNDINGS, IntBlock, default_block

GOLDEN = [f"int{bits}" for bits in BITS] + ["int4:64", "int8:8", "int6:24", "int3:40", "int7:16"]
GOLDEN += ["int8:stochastic", "int4:64:stochastic", "int2:stochastic", "int8:shift", "int4:64:shift", "int2:24:shift"]
SHORT = [IntBlock(bits, default_block(bits)) for bits in BITS]
BY_CHANCE = [IntBlock(8, 256, "stochastic"), IntBlock(4, 64, "stochastic"), IntBlock(2, 128, "stochastic")]
SHIFTED = [IntBlock(8, 256, "shift"), IntBlock(4, 64, "shift"), IntBlock(2, 24, "shift")]


def scales_of(kind: IntBlock, wire: np.ndarray, n_elems: int) -> np.ndarray:
    """The scales of a chunk as float32."""
    n_blocks = -(-n_elems // kind.block)
    return (wire[: 2 * n_blocks].view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    "kind", [*SHORT, *BY_CHANCE, *SHIFTED, IntBlock(8, 512), IntBlock(4, 64), IntBlock(5, 65536)], ids=str
)
def test_int_block_is_a_value(kind: IntBlock) -> None:
    checks.check_identity(kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_int_block_golden_bytes(name: str) -> None:
    checks.check_golden(name)


def test_int_block_sizes_are_those_of_the_table_in_the_docs() -> None:
    checks.check_nbytes(IntBlock(8, 256), {0: 0, 1: 32, 8: 32, 9: 32, 256: 272, 257: 16 + 272, 4096: 32 + 4096})
    checks.check_nbytes(IntBlock(4, 128), {0: 0, 1: 32, 9: 32, 128: 80, 129: 96, 4096: 64 + 2048})
    checks.check_nbytes(IntBlock(6, 256), {0: 0, 1: 32, 17: 48, 256: 208, 4096: 32 + 3072})
    checks.check_nbytes(IntBlock(3, 128), {0: 0, 1: 32, 128: 64, 4096: 64 + 1536})


@pytest.mark.parametrize(
    ("bits", "ratios"),  # for blocks of 32, 64, 128: fp16's 16 bits over bits + 16 / block
    [
        (8, (1.8824, 1.9394, 1.9692)),
        (6, (2.4615, 2.5600, 2.6122)),
        (4, (3.5556, 3.7647, 3.8788)),
        (2, (6.4000, 7.1111, 7.5294)),
    ],
)
def test_int_block_saves_what_its_bits_and_scales_add_up_to(bits: int, ratios: tuple[float, ...]) -> None:
    n = 2**20

    measured = [2 * n / IntBlock(bits, block).nbytes(n) for block in (32, 64, 128)]

    assert measured == pytest.approx(ratios, abs=5e-5)


@pytest.mark.parametrize(
    "kind", [*SHORT, *BY_CHANCE, *SHIFTED, IntBlock(4, 8), IntBlock(8, 24), IntBlock(7, 4096)], ids=str
)
@pytest.mark.parametrize("seed", range(2))
def test_int_block_stays_within_its_bound(kind: IntBlock, seed: int) -> None:
    checks.check_elements_of_all_sorts(kind, seed=seed)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.sampled_from([IntBlock(bits, 16, rounding) for bits in BITS for rounding in ROUNDINGS]),
)
def test_int_block_stays_within_its_bound_on_any_floats(elements: list[float], kind: IntBlock) -> None:
    checks.check_error_bound(kind, np.array(elements, np.float32))


@pytest.mark.parametrize("kind", SHORT, ids=str)
def test_int_block_never_clips_its_largest_element(kind: IntBlock) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(200 * kind.block) * 2.0 ** rng.integers(-90, 120)).astype(np.float32)

    scales = scales_of(kind, checks.encoded(kind, x), x.size).astype(np.float64)

    largest = np.abs(x).reshape(-1, kind.block).max(axis=1).astype(np.float64)
    assert (scales * kind.qmax >= largest).all()
    assert (scales * kind.qmax <= largest * (1 + 2.0**-6)).all()  # and wastes at most one bfloat16 step, or two


@pytest.mark.parametrize("kind", SHORT, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int_block_turns_a_block_with_a_bad_element_into_nan_and_no_other(kind: IntBlock, bad: float) -> None:
    checks.check_bad_block(kind, bad)


@pytest.mark.parametrize("kind", SHORT, ids=str)
def test_int_block_sends_blocks_under_two_to_the_minus_96_as_zeros(kind: IntBlock) -> None:
    limit = np.float32(2.0**-96)
    x = np.zeros(2 * kind.block, np.float32)
    x[0], x[1], x[kind.block] = limit, -limit, np.nextafter(limit, np.float32(0))

    y = checks.decoded(kind, checks.encoded(kind, x), x.size)

    assert y[0] == -y[1] == pytest.approx(limit, rel=2.0**-6)
    assert not y[kind.block :].any()


@pytest.mark.parametrize("kind", SHORT, ids=str)
def test_int_block_decodes_the_largest_floats_to_finite_ones(kind: IntBlock) -> None:
    x = np.full(kind.block, np.finfo(np.float32).max, np.float32)
    x[1::2] *= -1

    y = checks.decoded(kind, checks.encoded(kind, x), x.size)

    assert np.isfinite(y).all()
    assert y == pytest.approx(x, rel=2.0**-6)


def test_int_block_packs_every_code_where_the_picture_says() -> None:
    # Scale 1: amax is qmax. The pictures are those of docs/wire-format.md for a block of 8.
    four = checks.encoded(IntBlock(4, 8), np.array([1, 2, 3, 4, -1, -2, -7, 7], np.float32))
    six = checks.encoded(IntBlock(6, 8), np.array([31, -31, 1, 2, 3, 4, 5, -6], np.float32))

    assert four[16:20].tolist() == [0xF1, 0xE2, 0x93, 0x74]
    # high two bits . low four: 31 = 01.1111, -31 = 10.0001, 1 = 00.0001, ..., 5 = 00.0101, -6 = 11.1010
    assert six[16:22].tolist() == [0x3F, 0x41, 0x51, 0xA2, 0b00_00_00_01, 0b11_00_00_10]


@pytest.mark.parametrize("kind", BY_CHANCE, ids=str)
def test_stochastic_codes_keep_what_needs_no_rounding(kind: IntBlock) -> None:
    x = np.resize(np.arange(-kind.qmax, kind.qmax + 1), kind.block).astype(np.float32)  # the scale is 1

    for call in range(50):
        assert (checks.decoded(kind, checks.encoded(kind, x, Draw(0, call, 5)), x.size) == x).all()


@pytest.mark.parametrize("kind", SHIFTED, ids=str)
def test_a_shift_is_one_for_a_block_and_taken_off_again(kind: IntBlock) -> None:
    x = np.resize(np.arange(-kind.qmax, kind.qmax + 1), 3 * kind.block).astype(np.float32)  # the scale is 1
    draw = Draw(1, 2, 3)
    u = half_words(draw, x.size)[:: kind.block]

    wire = checks.encoded(kind, x, draw)

    assert wire[:12].view(np.uint16).tolist() == [0x3F80, u[0], 0x3F80, u[1], 0x3F80, u[2]]
    error = (checks.decoded(kind, wire, x.size) - x).reshape(3, -1)
    assert (error == 0.5 - u[:, None] / 65536).all()  # integers are where codes are: all of a block move alike


def test_a_shift_makes_no_more_noise_than_rounding_to_nearest() -> None:
    x = np.random.default_rng(8).standard_normal(256 * 400).astype(np.float32)

    def rms(rounding: str) -> float:
        kind = IntBlock(4, 256, rounding)
        return float(np.sqrt(np.mean((checks.decoded(kind, checks.encoded(kind, x), x.size) - x) ** 2)))

    assert rms("shift") == pytest.approx(rms("nearest"), rel=0.03)
    assert rms("stochastic") == pytest.approx(np.sqrt(2) * rms("nearest"), rel=0.03)


@pytest.mark.parametrize("kind", SHIFTED, ids=str)
def test_shifted_blocks_of_zeros_and_bad_ones_carry_no_shift(kind: IntBlock) -> None:
    x = np.zeros(2 * kind.block, np.float32)
    x[kind.block] = np.nan

    wire = checks.encoded(kind, x)

    assert wire[:8].view(np.uint16).tolist() == [0, 0, 0x7FC0, 0]
    y = checks.decoded(kind, wire, x.size)
    assert not y[: kind.block].any()
    assert np.isnan(y[kind.block :]).all()


@pytest.mark.parametrize("rounding", ["up", "", None, 1])
def test_int_block_refuses_other_roundings_and_names_its_own(rounding: object) -> None:
    with pytest.raises(CodecError, match="rounds to nearest or stochastic or shift"):
        IntBlock(4, 128, rounding)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 9, 0, -8, "8", None, True, 8.0])
def test_int_block_refuses_other_widths_and_names_its_own(bits: object) -> None:
    with pytest.raises(CodecError, match="2 to 8 bits"):
        IntBlock(bits, 128)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [0, -1, 3, 12, 2**40, 65544, "128", None, True, 128.0])
def test_int_block_refuses_other_blocks_and_names_its_own(block: object) -> None:
    with pytest.raises(CodecError, match=r"multiple of 8 from 8 to 65536.*use 128"):
        IntBlock(4, block)  # type: ignore[arg-type]
