"""hadamard: a codec behind a rotation of 32 elements."""

import checks
import numpy as np
import pytest

from zcomm.errors import CodecError
from zcomm.wire.hadamard import Hadamard, rotated, rotated_back
from zcomm.wire.int_block import IntBlock
from zcomm.wire.registry import codec

GOLDEN = ["hadamard:int4", "hadamard:int6:16", "hadamard:int8:stochastic", "hadamard:int4:shift"]
KINDS = [
    codec(name)
    for name in (
        *GOLDEN,
        "hadamard:int8",
        "hadamard:int4:64",
        "hadamard:int2",
        "hadamard:int4:asym",
        "hadamard:nvfp4:stochastic",
    )
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_hadamard_is_a_value(kind: Hadamard) -> None:
    checks.check_identity(kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_hadamard_golden_bytes(name: str) -> None:
    checks.check_golden(name)


def test_hadamard_takes_the_inner_codecs_bytes_for_whole_groups_of_32() -> None:
    inner = IntBlock(4, 128)

    checks.check_nbytes(Hadamard(inner), {0: 0, **{n: inner.nbytes(-(-n // 32) * 32) for n in (1, 31, 32, 33, 4097)}})
    assert Hadamard(inner).block == 128
    assert Hadamard(IntBlock(4, 8)).block == 32


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("n_elems", [1, 31, 32, 2_050])
def test_hadamard_stays_within_its_bound(kind: Hadamard, n_elems: int) -> None:
    normal = np.random.default_rng(n_elems).standard_normal(n_elems).astype(np.float32)
    large = (normal * np.float32(2.0**120)).astype(np.float32)

    checks.check_elements_of_all_sorts(kind, n_elems)
    checks.check_error_bound(kind, large)
    assert np.isfinite(kind.error_bound(normal)).all()


def test_the_rotation_is_the_walsh_hadamard_matrix_over_32_and_undoes_itself() -> None:
    matrix = np.array([[1.0]])
    for _ in range(5):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(0).integers(-1000, 1000, 96).astype(np.float32)  # exact in every sum

    y = rotated(x)

    assert (y == (x.reshape(-1, 32) @ matrix / 32).reshape(-1)).all()
    assert (rotated_back(y) == x).all()


def test_an_outlier_is_spread_over_its_neighbours() -> None:
    x = np.random.default_rng(1).standard_normal(128 * 100).astype(np.float32)
    x[::128] = 40

    def rms(name: str) -> float:
        kind = codec(name)
        error = checks.decoded(kind, checks.encoded(kind, x), x.size) - x
        return float(np.sqrt(np.mean(error**2)))

    assert rms("hadamard:int4") < rms("int4") / 1.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [codec("hadamard:int4"), codec("hadamard:int8:8")], ids=str)
def test_a_bad_element_turns_its_block_into_nan_and_no_other(kind: Hadamard, bad: float) -> None:
    checks.check_bad_block(kind, bad)


def test_the_largest_floats_come_back_finite_where_they_are_alike() -> None:
    kind, x = codec("hadamard:int8"), np.full(64, np.finfo(np.float32).max, np.float32)

    y = checks.decoded(kind, checks.encoded(kind, x), x.size)

    assert np.isfinite(y).all()
    assert y == pytest.approx(x, rel=2.0**-7)


@pytest.mark.parametrize("inner", ["raw", "bf16", "hadamard:int4"])
def test_hadamard_refuses_codecs_without_blocks_and_says_what_to_write(inner: str) -> None:
    with pytest.raises(CodecError, match=f"wraps a codec with blocks, got {inner}; use hadamard:int4"):
        codec(f"hadamard:{inner}")


@pytest.mark.parametrize("spec", ["hadamard:int4:24", "hadamard:int4:40"])
def test_hadamard_refuses_blocks_that_cut_its_groups(spec: str) -> None:
    with pytest.raises(CodecError, match="divides 32 or is a multiple of it"):
        codec(spec)


@pytest.mark.parametrize("spec", ["hadamard", "hadamard:", "hadamard:int9"])
def test_hadamard_of_nothing_known_is_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(CodecError, match="no codec is spelled"):
        codec(spec)
