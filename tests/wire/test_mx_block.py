"""mx_block: mxfp8 and mxfp4 of the OCP microscaling formats."""

import checks
import numpy as np
import pytest

from zcomm.errors import CodecError
from zcomm.wire.mx_block import MxBlock
from zcomm.wire.registry import codec

GOLDEN = ["mxfp8", "mxfp4", "mxfp8:stochastic", "mxfp4:stochastic"]
KINDS = [codec(name) for name in GOLDEN]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mx_block_is_a_value(kind: MxBlock) -> None:
    checks.check_identity(kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_mx_block_golden_bytes(name: str) -> None:
    checks.check_golden(name)


def test_mx_block_sizes_are_those_of_the_table_in_the_docs() -> None:
    checks.check_nbytes(MxBlock("mxfp8"), {0: 0, 1: 32, 9: 32, 32: 48, 513: 32 + 528, 4096: 128 + 4096})
    checks.check_nbytes(MxBlock("mxfp4"), {0: 0, 1: 32, 9: 32, 32: 32, 513: 32 + 272, 4096: 128 + 2048})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mx_block_stays_within_its_bound(kind: MxBlock) -> None:
    checks.check_elements_of_all_sorts(kind)
    checks.check_largest_stay_finite(kind)


def test_mx_scales_are_powers_of_two_by_the_specification() -> None:
    # The largest element's power of two over the format's: 2^8 for e4m3, 2^2 for e2m1 (OCP MX 1.0, section 6.3).
    x = np.zeros((5, 32), np.float32)
    x[:, 0] = [1, 1.99, 448, 2.0**-20, -(2.0**127)]
    for kind, largest in ((MxBlock("mxfp8"), 8), (MxBlock("mxfp4"), 2)):
        wire = checks.encoded(kind, x.reshape(-1))

        assert wire[:5].tolist() == [127 + e - largest for e in (0, 0, 8, -20, 127)]


def test_mx_elements_beyond_the_largest_code_become_it() -> None:
    x = np.zeros(32, np.float32)
    x[:3] = 500, 460, 31  # over 2^8: beyond 448, that is; 31 is a tie

    y = checks.decoded(MxBlock("mxfp8"), checks.encoded(MxBlock("mxfp8"), x), 32)

    assert y[:3].tolist() == [448, 448, 32]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_mx_block_turns_a_block_with_a_bad_element_into_nan_and_no_other(kind: MxBlock, bad: float) -> None:
    checks.check_bad_block(kind, bad)
    assert checks.encoded(kind, np.full(32, bad, np.float32))[0] == 0xFF


def test_mx_block_refuses_what_it_is_not_and_says_what_it_is() -> None:
    with pytest.raises(CodecError, match="mxfp4 or mxfp8"):
        MxBlock("mxfp6")
