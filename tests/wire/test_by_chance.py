"""Codecs that round by chance: unbiased, the same for the same seed, and wherever a shard is cut."""

import checks
import numpy as np
import pytest

from zcomm.errors import CodecError
from zcomm.wire.codec import Codec
from zcomm.wire.draw import Draw
from zcomm.wire.registry import codec

SPECS = ["int8:stochastic", "int4:64:stochastic", "int2:stochastic", "int8:shift", "int4:64:shift", "int2:24:shift"]
SPECS += ["int8:asym:stochastic", "int4:64:asym:stochastic", "int2:24:asym:stochastic"]
SPECS += ["fp8_e4m3:stochastic", "fp8_e5m2:64:stochastic", "mxfp8:stochastic", "mxfp4:stochastic", "nvfp4:stochastic"]
SPECS += ["hadamard:int4:shift", "hadamard:mxfp4:stochastic", "hadamard:fp8_e4m3:stochastic"]
KINDS = [codec(spec) for spec in SPECS]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_elements_are_the_mean_of_what_is_decoded(kind: Codec) -> None:
    rng = np.random.default_rng(6)
    x = rng.uniform(-1, 1, 401).astype(np.float32)
    x[::50] *= np.float32(2.0**-7)  # where small floats are subnormal
    x[3] = 1

    checks.check_unbiased(kind, x)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cut_between_blocks_changes_nothing(kind: Codec) -> None:
    checks.check_cuts(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes_follow_from_seed_call_and_element(kind: Codec) -> None:
    x = np.random.default_rng(8).standard_normal(900).astype(np.float32)
    draw = Draw(9, 8, 7)

    wire = checks.encoded(kind, x, draw).tobytes()

    assert checks.encoded(kind, x, draw).tobytes() == wire
    for other in (draw._replace(seed=10), draw._replace(call=9), draw._replace(first=8)):
        assert checks.encoded(kind, x, other).tobytes() != wire


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_without_random_bits_it_is_refused(kind: Codec) -> None:
    x, wire = np.zeros(9, np.float32), np.empty(kind.nbytes(9), np.uint8)

    assert kind.by_chance
    with pytest.raises(CodecError, match="rounds by random bits and got none; pass draw=Draw"):
        kind.encode(x, wire)
    with pytest.raises(CodecError, match=r"from 0 to 2\^64 - 1"):
        kind.encode(x, wire, Draw(-1, 0, 0))


@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4"])
def test_scales_by_chance_leave_no_element_beyond_the_largest_code(spec: str) -> None:
    # To nearest these formats cut off the largest elements of a block; what is cut off has no mean to keep.
    x = np.random.default_rng(9).standard_normal(64 * 64).astype(np.float32)
    nearest, by_chance = codec(spec), codec(f"{spec}:stochastic")

    def overshoot(kind: Codec) -> float:
        rows = np.abs(x).reshape(-1, 32).argmax(axis=1) + 32 * np.arange(x.size // 32)
        errors = [checks.decoded(kind, checks.encoded(kind, x, Draw(1, call, 0)), x.size)[rows] for call in range(60)]
        return float(np.mean((np.abs(errors) - np.abs(x[rows])) / np.abs(x[rows])))

    assert overshoot(nearest) < -0.005
    assert abs(overshoot(by_chance)) < 0.002
