"""zcomm perf's arithmetic: nccl-tests' bandwidths from fake times, break-even, verdicts in words."""

from __future__ import annotations

import math

import pytest

from zcomm.tools.link import Link
from zcomm.tools.perf_formulas import algorithm_bandwidth_gb_s, break_even_gbit_s, bus_bandwidth_gb_s
from zcomm.tools.perf_report import line, verdicts
from zcomm.tools.perf_row import Counted, Form, Measured, Row, Verdict, break_even_words, judge
from zcomm.tools.perf_truth import Check

MIB = 1 << 20
RIGHT = Check(0, 1e-3, 0.5)


def measured(
    form: Form, time_s: float, link_bytes: int | None = None, codec_s: float = 0.0, check: Check = RIGHT, **changes
) -> Measured:
    """An all-reduce of 1 MiB on four ranks."""
    counted = None if link_bytes is None else Counted(link_bytes, link_bytes // 2, 4 * link_bytes, link_bytes, codec_s)
    fields = {"collective": "all_reduce", "n_ranks": 4, "size_bytes_total": MIB, "times_s": (time_s,)}
    fields |= {"replicas_equal": True, "node_tx_bytes": None} | changes
    return Measured(form=form, check=check, counted=counted, **fields)


GLOO = measured(Form("gloo", "bf16"), 0.010)
RAW = measured(Form("zcomm", "raw", 2), 0.016, 2_000_000, 0.0005)
BF16 = measured(Form("zcomm", "bf16", 2), 0.008, 1_000_000, 0.001)


def judged(*found: Measured) -> dict[str, Row]:
    return {row.measured.form.name: row for row in judge([GLOO, RAW, BF16, *found])}


def test_bandwidths_are_nccl_tests_for_one_second_and_four_ranks():
    size = 8_000_000_000  # bytes in all, 2 GB on each of four ranks

    assert algorithm_bandwidth_gb_s(size, 1.0) == 8.0
    assert bus_bandwidth_gb_s("all_reduce", size, 4, 1.0) == 8.0 * 2 * 3 / 4
    assert bus_bandwidth_gb_s("all_gather", size, 4, 1.0) == 8.0 * 3 / 4
    assert bus_bandwidth_gb_s("reduce_scatter", size, 4, 1.0) == 8.0 * 3 / 4
    assert bus_bandwidth_gb_s("all_gather", size, 4, 2.0) == 3.0


def test_a_megabyte_saved_for_a_millisecond_of_coding_pays_below_eight_gigabit():
    assert break_even_gbit_s(1_000_000, 0.001) == pytest.approx(8.0)
    assert break_even_gbit_s(0, 0.001) == 0.0  # never
    assert break_even_gbit_s(1_000_000, 0.0) == math.inf  # always


def test_break_even_is_said_in_words():
    assert [break_even_words(speed) for speed in (0.0, 0.1234, 12.34, 1234.5, math.inf, None)] == [
        *("never", "0.123 Gbit/s", "12.3 Gbit/s", "1234 Gbit/s", "any", None)
    ]


def test_a_codec_is_compared_with_the_fastest_uncompressed_form_and_its_break_even_with_bf16_in_as_many_hops():
    row = judged(measured(Form("zcomm", "int4", 2), 0.004, 250_000, 0.003))["two hops int4"]

    assert row.best is BF16
    assert row.speedup == pytest.approx(2.0)
    assert row.break_even_gbit_s == pytest.approx(8 * 750_000 / 0.002 / 1e9)
    assert row.codec_share == pytest.approx(0.75)
    found = row.as_json(Link.parse("100mbit"))
    assert found["speedup_over_two_hops_bf16"] == pytest.approx(2.0)
    assert found["speedup_over_gloo_bf16"] == pytest.approx(2.5)
    assert found["wire_alone_ms"] == pytest.approx(250_000 * 8 / 100e6 * 1e3)


def test_a_library_s_own_form_may_be_the_best():
    rows = judged(measured(Form("mpi", "fp32"), 0.001))

    assert all(row.best.form == Form("mpi", "fp32") for row in rows.values())
    assert "1.00*" in line(rows["mpi fp32"])


@pytest.mark.parametrize(
    ("time_s", "verdict"),
    [(0.004, Verdict.FASTER), (0.0079, Verdict.EQUAL), (0.0082, Verdict.EQUAL), (0.016, Verdict.SLOWER)],
)
def test_slower_is_said_plainly(time_s: float, verdict: Verdict):
    row = judged(measured(Form("zcomm", "int4", 2), time_s, 250_000))["two hops int4"]

    assert row.verdict is verdict
    (said,) = verdicts("all_reduce", [row])
    assert said == f"# all_reduce, two hops int4: {verdict.value}: 1 MiB ({row.speedup:.2f} x two hops bf16)"


def test_uncompressed_forms_get_no_verdict_and_no_break_even():
    for row in judged().values():
        assert row.verdict is Verdict.BASELINE
        assert row.break_even_gbit_s is None
    assert verdicts("all_reduce", list(judged().values())) == []


def test_a_wrong_form_is_no_baseline_and_is_named():
    wrong = measured(Form("gloo", "fp32"), 0.001, check=Check(3, 9.0, 40.0))
    torn = measured(Form("zcomm", "int8", 2), 0.004, 500_000, replicas_equal=False)
    rows = judged(wrong, torn)

    assert rows["two hops int8"].best is BF16
    assert rows["gloo fp32"].verdict is rows["two hops int8"].verdict is Verdict.WRONG
    assert "wrong: 1 MiB (elements off by more than their bound: 3)" in verdicts("all_reduce", [rows["gloo fp32"]])[0]
    assert "replicas differ between ranks" in verdicts("all_reduce", [rows["two hops int8"]])[0]
    assert "DIFFER" in line(rows["two hops int8"])


def test_sizes_are_said_in_all_and_per_rank():
    gathered = judge([measured(Form("gloo", "fp32"), 0.01, collective="all_gather")])[0].as_json(None)
    reduced = judge([measured(Form("gloo", "fp32"), 0.01)])[0].as_json(None)

    assert (gathered["size_bytes_total"], gathered["size_bytes_per_rank"], gathered["count_elems"]) == (
        MIB,
        MIB // 4,
        MIB // 16,
    )
    assert (reduced["size_bytes_total"], reduced["size_bytes_per_rank"], reduced["count_elems"]) == (MIB, MIB, MIB // 4)
    assert (gathered["redop"], reduced["redop"]) == ("none", "sum")
