"""NaN, Inf, overflow, zeros and denormals: what is not finite is seen by every rank, what is finite stays so."""

from __future__ import annotations

import forms
import ml_dtypes
import numpy as np
import pytest

import zcomm
from zcomm.buffers import DType

POISONS = (np.nan, np.inf, -np.inf)
TO_THE_ELEMENT = ("raw", "bf16", "fp16")  # codecs without blocks


def reach(codec: str) -> int:
    """How many elements one bad element takes with it: those of its scale, of the lower one where there are two."""
    return 16 if codec == "nvfp4" else getattr(zcomm.codec(codec), "block", 1)


@pytest.mark.parametrize("placement", ["2", "3", "2+1", "2x2", "2x4"])
@pytest.mark.parametrize("codec", forms.CODECS)
def test_one_bad_value_on_one_rank_is_bad_on_all_and_spoils_its_block_only(placement, codec):
    size = forms.PLACEMENTS[placement].size
    block, shard = reach(codec), 1536  # elements; blocks begin anew with each rank's shard
    n = shard * size
    at = n // 2 + 5
    same_shard = np.arange(n) // shard == at // shard
    spoilt = same_shard & (np.arange(n) % shard // block == at % shard // block)

    def program(comm):
        results = []
        for poison in POISONS:
            for culprit in {0, size - 1}:
                x = ((np.arange(n) % 7 + 1) * (comm.rank + 1) / 8).astype(np.float32)
                if comm.rank == culprit:
                    x[at] = poison
                comm.all_reduce(x, "avg", codec)
                results.append(x)
        return results

    by_rank = forms.run(placement, program, one_shot_bytes=0, check="never")

    assert spoilt[at]
    for results in zip(*by_rank, strict=True):
        assert len({result.tobytes() for result in results}) == 1  # all ranks agree, whoever had it
        assert not np.isfinite(results[0][spoilt]).any()
        assert np.isfinite(results[0][~spoilt]).all()


@pytest.mark.parametrize("placement", ["3", "2x2"])
@pytest.mark.parametrize("codec", ["raw", "fp16", "int8", "int4", "mxfp4", "nvfp4", "hadamard:int4", "fp8_e4m3"])
def test_no_form_loses_a_nan(placement, codec):
    """The whole input is NaN on the last rank: wherever its values go, nothing finite comes out."""
    size = forms.PLACEMENTS[placement].size

    def program(comm):
        for name in forms.FORMS:
            x = np.full(40 * size, np.nan if comm.rank == size - 1 else 1.5, np.float32)
            inputs = [np.full(40 * size, np.nan if rank == size - 1 else 1.5) for rank in range(size)]
            got = forms.carry_out(forms.FORMS[name](comm, x, "sum", np.copy), codec=codec)
            bad = np.isnan(forms.exact(name, inputs, comm.rank))
            assert np.isnan(got[bad]).all(), name
            if name.startswith("reduce") or "reduce" not in name:
                assert np.isfinite(got[~bad]).all() or codec not in TO_THE_ELEMENT, name

    forms.run(placement, program, check="never")


def test_opposite_infinities_are_nan_not_zero():
    def program(comm):
        x = np.ones(600, np.float32)
        x[300] = np.inf if comm.rank == 0 else -np.inf
        results = {}
        for codec in ("raw", "bf16", "int8", "mxfp8"):
            y = x.copy()
            comm.all_reduce(y, "sum", codec)
            results[codec] = y
        return results

    for results in forms.run("2", program, check="never"):
        for codec, y in results.items():
            assert np.isnan(y[300]), codec
            assert np.isfinite(y[:256]).all()


def test_an_infinity_stays_one_where_codecs_keep_elements():
    def program(comm):
        x = np.ones(100, np.float32)
        if comm.rank == 1:
            x[7], x[8] = np.inf, -np.inf
        for codec in TO_THE_ELEMENT:
            y = x.copy()
            comm.all_reduce(y, "avg", codec)
            assert y[7] == np.inf
            assert y[8] == -np.inf
            assert (np.delete(y, [7, 8]) == 1).all()

    forms.run("3", program, check="never")


@pytest.mark.parametrize("placement", ["2", "2x2", "8"])
def test_zeros_denormals_and_negative_zero_decode_to_zero(placement):
    size = forms.PLACEMENTS[placement].size

    def program(comm):
        for codec in forms.CODECS:
            block = reach(codec)
            for value in (0.0, -0.0, 1e-45, -1e-40):
                x = np.full(5 * 256 * size, value, np.float32)
                comm.all_reduce(x, "sum", codec)
                keeps = codec in ("raw", "bf16") and value  # floats of float32's own range keep denormals
                assert np.isfinite(x).all(), (codec, value)
                assert keeps or not x.any(), (codec, value)
            one = np.zeros(5 * 256 * size, np.float32)
            one[3 * 256 + 17] = 4.0  # a power of two, in every codec's table; alone in its block
            comm.all_reduce(one, "avg", codec)
            away = np.arange(one.size) // block != (3 * 256 + 17) // block
            assert np.isfinite(one).all(), codec
            assert not one[away].any(), codec
            if "stochastic" not in codec and "hadamard" not in codec:
                assert one[3 * 256 + 17] == pytest.approx(4.0, rel=0.01), codec

    forms.run(placement, program, one_shot_bytes=0, check="never")


def test_one_and_ten_to_the_30_in_bfloat16():
    """Scales have float32's range: neither overflows, and one costs the other only inside its block."""

    def program(comm):
        results = {}
        for codec in ("raw", "bf16", "int8", "int4", "fp8_e4m3", "hadamard:int8"):
            x = np.ones(1024, ml_dtypes.bfloat16)
            x[5] = 1e30
            x[900] = 1e-30
            comm.all_reduce(x, "avg", codec)
            results[codec] = x.astype(np.float64)
        return results

    for placement in ("4", "2x2"):
        for results in forms.run(placement, program, check="never"):
            for codec, x in results.items():
                assert x[5] == pytest.approx(1e30, rel=0.1), codec
                assert np.isfinite(x).all(), codec
                assert np.allclose(x[256:768], 1, rtol=0.02), codec  # blocks without the large one
                if codec in ("raw", "bf16"):
                    assert x[6] == 1
                    assert x[900] == pytest.approx(1e-30, rel=0.01)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-28, 1e-20, 1e30, 3e38])
def test_blocks_of_any_magnitude_keep_their_relative_error_down_to_where_they_are_zeros(magnitude):
    def program(comm):
        for codec, least in (
            *((codec, 2.0**-96) for codec in ("int8", "int4", "fp8_e4m3", "hadamard:int8")),
            ("fp8_e5m2:64", 2.0**-80),  # docs/wire-format.md
        ):
            signs = np.where(np.arange(1000) % 3, 1, -1)
            x = ((1 + np.arange(1000) % 5) / 5 * signs * magnitude).astype(np.float32)
            out = np.empty(2000, np.float32)
            comm.all_gather_single(out, x, codec)
            if magnitude < least / 32:  # a rotation of 32 may gather what 32 elements hold
                assert not out.any(), codec
            elif magnitude > least:
                error = np.abs(out.reshape(2, -1).astype(np.float64) - x)
                assert np.isfinite(out).all(), codec
                assert (error <= magnitude / 7).all(), codec  # int4, the coarsest: half a step is 1/14 of the largest
                assert (error <= zcomm.codec(codec).error_bound(x)).all(), codec

    forms.run("2", program, check="never")


def test_sixty_thousand_in_fp16_averages_to_itself():
    def program(comm):
        results = []
        for codec in ("raw", "fp16", "bf16", "int8"):
            x = np.full(100, 60_000, np.float16)
            x[comm.rank] = -60_000
            comm.all_reduce(x, "avg", codec)
            results.append(x.astype(np.float32))
        return results

    for placement in ("4", "2x2", "2x2 round robin"):
        for results in forms.run(placement, program, one_shot_bytes=0):
            for x in results:
                assert np.allclose(x[4:], 60_000, rtol=0.01)
                assert np.allclose(x[:4], 30_000, rtol=0.02)


def test_a_sum_too_large_for_its_dtype_is_inf_not_a_wrapped_number():
    def program(comm):
        sums = {}
        for codec in ("raw", "int8", "bf16"):
            x = np.full(300, 60_000, np.float16)
            comm.all_reduce(x, "sum", codec)
            sums[codec] = x
        return sums

    for placement in ("2", "2x2"):
        for sums in forms.run(placement, program, check="never"):
            for codec, x in sums.items():
                assert not np.isfinite(x).any(), codec


@pytest.mark.parametrize("placement", ["2", "4", "2x2"])
def test_float64_beyond_float32_is_never_a_finite_number(placement):
    """float64 goes through float32 in every codec but raw, which keeps it."""

    def program(comm):
        for codec in ("raw", "int8", "bf16", "fp8_e4m3"):
            x = np.full(300, 1.0, np.float64)
            x[10] = 1e300
            comm.all_reduce(x, "avg", codec)
            if codec == "raw":
                assert x[10] == pytest.approx(1e300)
            else:
                assert not np.isfinite(x[10]), codec
            assert np.isfinite(x[256:]).all(), codec

    forms.run(placement, program, check="never")


@pytest.mark.parametrize(
    ("codec", "kept"),
    [
        ("fp8_e4m3", (0.0, 448.0)),
        ("fp8_e5m2:64", (0.0, 57344.0)),
    ],
)
def test_small_floats_saturate_nothing_and_hide_no_infinity(codec, kept):
    """A block's scale takes its largest value into range: 1000 stays 1000, Inf and NaN stay visible."""

    def program(comm):
        for value in (*kept, 464.0, 465.0, 1000.0, 2.0**-9, 2.0**-16):
            x = np.full(64, value, np.float32)
            comm.all_reduce(x, "avg", codec)
            assert np.allclose(x, value, rtol=0.07), value
        for value in POISONS:
            x = np.full(64, value, np.float32)
            comm.all_reduce(x, "avg", codec)
            assert not np.isfinite(x).any(), value

    forms.run("2", program, check="never")


def test_every_dtype_carries_a_nan_through():
    def program(comm):
        for dtype in DType:
            for codec in ("raw", "bf16", "int8", "int4"):
                x = np.ones(300, dtype.numpy)
                x[5] = np.nan if comm.rank == 1 else 1.0
                comm.all_reduce(x, "sum", codec)
                assert np.isnan(x[5].astype(np.float64)), (dtype, codec)
                assert np.isfinite(x[256:].astype(np.float64)).all(), (dtype, codec)

    forms.run("3", program, check="never")
