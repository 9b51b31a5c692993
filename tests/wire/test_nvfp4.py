"""nvfp4: 16 elements to an e4m3 scale, 1024 to an fp32 one."""

import checks
import numpy as np
import pytest

from zcomm.errors import CodecError
from zcomm.wire.minifloat import E4M3, from_mini
from zcomm.wire.nvfp4 import NvFp4
from zcomm.wire.registry import codec

GOLDEN = ["nvfp4", "nvfp4:stochastic"]
KINDS = [NvFp4(), NvFp4("stochastic")]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nvfp4_is_a_value(kind: NvFp4) -> None:
    checks.check_identity(kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_nvfp4_golden_bytes(name: str) -> None:
    checks.check_golden(name)


def test_nvfp4_sizes_are_those_of_the_table_in_the_docs() -> None:
    checks.check_nbytes(NvFp4(), {0: 0, 1: 48, 16: 48, 1024: 16 + 64 + 512, 1025: 16 + 80 + 528, 8192: 32 + 512 + 4096})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nvfp4_stays_within_its_bound(kind: NvFp4) -> None:
    checks.check_elements_of_all_sorts(kind)
    checks.check_largest_stay_finite(kind)


def test_nvfp4_takes_the_largest_of_a_region_to_448_times_6() -> None:
    x = np.zeros(2048, np.float32)
    x[5], x[100] = 2688, 13.5  # the other block's scale: 13.5 / 6 = 2.25
    x[1024] = 2688 * 3

    wire = checks.encoded(NvFp4(), x)

    assert wire[:8].view(np.float32).tolist() == [1, 3]
    assert wire[16:144].nonzero()[0].tolist() == [0, 6, 64]
    assert wire[[16, 22, 80]].tolist() == [0x7E, 0b0_1000_001, 0x7E]
    assert checks.decoded(NvFp4(), wire, x.size).tobytes() == x.tobytes()


def test_nvfp4_rounds_scales_up_where_codes_are_rounded_by_chance() -> None:
    rng = np.random.default_rng(2)
    x = np.repeat(2.0 ** rng.integers(-25, 25, 400), 16).astype(np.float32) * rng.standard_normal(6400, np.float32)
    largest = np.abs(x).reshape(-1, 16).max(axis=1)

    def reach(kind: NvFp4) -> np.ndarray:
        wire = checks.encoded(kind, x)
        n_regions, n_blocks = -(-x.size // 1024), x.size // 16
        regions = np.repeat(wire[: 4 * n_regions].view(np.float32), 64)[:n_blocks].astype(np.float64)
        start = -(-4 * n_regions // 16) * 16
        return 6 * from_mini(wire[start : start + n_blocks], E4M3) * regions

    assert (reach(NvFp4("stochastic")) >= largest * (1 - 2.0**-21)).all()
    assert (reach(NvFp4()) < largest * (1 - 2.0**-21)).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nvfp4_turns_16_elements_with_a_bad_one_into_nan_and_no_other(kind: NvFp4, bad: float) -> None:
    checks.check_bad_block(kind, bad, block=16)


def test_nvfp4_takes_no_options() -> None:
    with pytest.raises(CodecError, match="takes one option, stochastic"):
        codec("nvfp4:32")
