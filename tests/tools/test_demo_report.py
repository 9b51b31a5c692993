"""The demo's numbers: what is divided by what, and what the verdict says, from measurements made up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zcomm.tools import demo_report
from zcomm.tools.demo_plan import NO_NETWORK, Event, Launch, Measured, Model, Shape
from zcomm.tools.link import Link

LINK = Link.parse("80mbit")  # 10 MB/s
SHAPE = Shape(nodes=2, ranks_per_node=2, shaping="tbf")


def measured(name, steps_ms, sent_mb=0.0, val_loss=None, stats_mb=None):
    return Measured(
        name=name,
        meaning="",
        step_s=[ms / 1e3 for ms in steps_ms],
        losses=[2.0, 1.0],
        inter_node_bytes_per_step=sent_mb * 1e6,
        tokens_per_step=1000,
        stats_bytes_per_step=None if stats_mb is None else stats_mb * 1e6,
        val_loss=val_loss,
    )


def report(two_hop_ms=1200, zeropp_ms=800, link=LINK):
    limited = [
        measured("fp32", [9000, 4000], sent_mb=40),
        measured("bf16", [2000, 2000, 2000], sent_mb=20),
        measured("bf16_two_hop", [two_hop_ms] * 3, sent_mb=10, stats_mb=9.9),
        measured("zeropp", [zeropp_ms, zeropp_ms, 9999], sent_mb=2.5, stats_mb=2.475),
        measured(NO_NETWORK, [500, 500, 700]),
    ]
    unlimited = [
        measured("fp32", [600], val_loss=2.0),
        measured("bf16", [550], val_loss=2.0),
        measured("bf16_two_hop", [540], val_loss=2.0),
        measured("zeropp", [530], val_loss=2.01),
    ]
    return demo_report.build(link, SHAPE, limited, unlimited)


@pytest.mark.parametrize(
    ("compute_s", "baseline_bytes", "recipe_bytes", "bytes_s", "expected"),
    [
        (1.0, 10e6, 10e6, 10e6, 1.0),
        (0.0, 10e6, 5e6, 10e6, 2.0),  # all wire: the ratio of bytes
        (0.5, 10e6, 2.5e6, 10e6, 2.0),  # (0.5 + 1) / (0.5 + 0.25)
        (0.5, 10e6, 2.5e6, float("inf"), 1.0),  # no limit: bytes cost nothing
    ],
)
def test_possible_speedup_is_compute_and_wire_over_compute_and_wire(
    compute_s, baseline_bytes, recipe_bytes, bytes_s, expected
):
    assert demo_report.possible_speedup(compute_s, baseline_bytes, recipe_bytes, bytes_s) == pytest.approx(expected)


def test_a_row_divides_medians_at_the_link():
    row = report().rows[3]

    assert row.name == "zeropp"
    assert row.step_s == 0.8
    assert row.tokens_per_s == pytest.approx(1250)
    assert row.bytes_over_bf16_two_hop == pytest.approx(0.25)
    assert row.stats_over_counters_pct == pytest.approx(-1.0)
    assert row.val_loss_over_fp32_pct == pytest.approx(0.5)
    assert row.speedup_over_bf16 == pytest.approx(2.5)
    assert row.speedup_over_bf16_two_hop == pytest.approx(1.5)
    assert row.speedup_possible_over_bf16_two_hop == pytest.approx(2.0)
    assert row.reached_of_possible == pytest.approx(0.75)
    assert row.unlimited_step_s == 0.53


def test_without_a_baseline_its_columns_are_empty():
    limited = [measured("int8", [800], sent_mb=5), measured(NO_NETWORK, [500])]

    found = demo_report.build(LINK, SHAPE, limited, [measured("int8", [600], val_loss=2.0)])
    row = found.rows[0]

    assert row.speedup_over_bf16 is row.speedup_over_bf16_two_hop is row.speedup_possible_over_bf16_two_hop is None
    assert row.val_loss_over_fp32_pct is None
    assert "-" in demo_report.cells(row)
    assert demo_report.verdict(found).startswith("No verdict")


@pytest.mark.parametrize(
    ("two_hop_ms", "zeropp_ms", "says"),
    [
        (1200, 800, "Compression pays at 80mbit: zeropp is 1.50 times as fast as bf16_two_hop"),
        (1200, 1190, "Compression hardly matters at 80mbit"),
        (
            1200,
            1500,
            "Compression does not pay at 80mbit: bf16_two_hop, uncompressed, takes 1200 ms a step, zeropp 1500",
        ),
    ],
)
def test_the_verdict_says_whether_compression_pays(two_hop_ms, zeropp_ms, says):
    assert demo_report.verdict(report(two_hop_ms, zeropp_ms)).startswith(says)


def test_the_verdict_compares_with_the_fastest_uncompressed_form():
    assert "bf16, the fastest uncompressed form" in demo_report.verdict(report(two_hop_ms=2100, zeropp_ms=800))


@pytest.mark.parametrize(
    ("zeropp_ms", "says"),
    [
        (300, "it is faster too: bf16_two_hop needs"),
        (550, "within the noise"),
        (900, "would not be the one to take: bf16_two_hop"),
    ],
)
def test_the_verdict_tells_what_happens_without_a_limit(zeropp_ms, says):
    found = report()
    rows = [replace(row, unlimited_step_s=zeropp_ms / 1e3) if row.name == "zeropp" else row for row in found.rows]

    assert says in demo_report.verdict(replace(found, rows=rows))


def test_a_busy_machine_is_noticed():
    busy = replace(report(), compute_s=99.0)

    assert "machine was busy" in demo_report.verdict(busy)
    assert "machine was busy" not in demo_report.verdict(report())


def test_the_footnotes_say_that_losses_do_not_depend_on_the_link():
    notes = " ".join(demo_report.footnotes(report()))

    assert "losses do not depend on the link" in notes
    assert "stats() agree within 1.0 %" in notes


def test_a_paced_network_is_named_as_such():
    paced = demo_report.build(
        LINK,
        Shape(2, 2, demo_report.PACED),
        [measured("int8", [800]), measured(NO_NETWORK, [500])],
        [measured("int8", [600])],
    )

    assert "paced in user space" in " ".join(demo_report.footnotes(paced))


def test_slow_recipes_take_fewer_steps_but_one():
    launch = Launch("train_gpt.py", 2, ("fp32",), Model(), warmup_steps=2, steps=7, budget_s=9.0)

    assert [launch.steps_of(step_s) for step_s in (0.1, 2.0, 4.4, 60.0)] == [7, 4, 2, 1]


def test_launches_and_events_survive_the_way_to_a_rank():
    launch = Launch("train_gpt.py", 2, ("fp32", NO_NETWORK), Model(width=8), warmup_steps=2, steps=7)
    event = Event("step", {"recipe": "int8"})

    assert Launch.from_json(launch.to_json()) == launch
    assert Event.parse(event.line()) == event
    assert Event.parse("zcomm: 3 FSDP modules over 4 ranks") is None
