"""The demo's picture: loss against time at the link on the left, bytes and time per step on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zcomm.tools.cost import BASELINES
from zcomm.tools.demo_report import Report, Row

# Okabe and Ito's colours, which people with any colour vision can tell apart; lines differ in dashes too.
COLOURS = ("#7F7F7F", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
DASHES = ((4, 2), (1, 1.2), (6, 1.5, 1, 1.5), (), (), (3, 1), (5, 1))
SMOOTHED_STEPS = 5
INK, FAINT = "#222222", "#D9D9D9"


def draw(report: Report, path: Path) -> None:
    """Write the picture; the suffix of path says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    look = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "text.color": INK,
        "axes.labelcolor": INK,
    }
    with pyplot.rc_context(look):
        figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(12.5, 5), width_ratios=(1.35, 1), layout="constrained")
        link = "a link without limit" if report.link == "none" else f"{report.link} between nodes"
        figure.suptitle(
            f"FSDP2 training of a small GPT, {report.nodes} nodes x {report.ranks_per_node} ranks, {link}",
            fontsize=13,
            fontweight="bold",
        )
        draw_losses(curves, report)
        draw_bytes(bars, report)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def draw_losses(axes: Any, report: Report) -> None:
    """One curve per recipe: the same steps, stretched by the recipe's step time."""
    for place, row in enumerate(report.rows):
        times = [row.step_s * (n + 1) for n in range(len(row.losses))]
        losses = smooth(row.losses)
        colour, dashes = style(place)
        width = 1.8 if row.name in BASELINES else 2.6
        label = f"{row.name}: {times[-1]:.0f} s"
        (line,) = axes.plot(times, losses, color=colour, linewidth=width, label=label)
        if dashes:
            line.set_dashes(dashes)
        axes.plot(times[-1], losses[-1], marker="o", markersize=6, color=colour)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training at this link")
    axes.set_ylabel(f"training loss, nats per byte (mean of {SMOOTHED_STEPS} steps)")
    axes.set_title(f"The same {report.loss_steps} steps, sooner", loc="left", fontsize=11)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, handlelength=3.6, title="recipe: time for all steps", alignment="left")


def smooth(losses: list[float]) -> list[float]:
    """Each loss as the mean of it and those just before: one batch is easier than the next, for all recipes alike."""
    windows = [losses[max(0, n + 1 - SMOOTHED_STEPS) : n + 1] for n in range(len(losses))]
    return [sum(window) / len(window) for window in windows]


def draw_bytes(axes: Any, report: Report) -> None:
    """One bar per recipe: megabytes out of a node per step, with its step time beside it."""
    sent = [row.inter_node_bytes_per_step / 1e6 for row in report.rows]
    axes.barh(range(len(sent)), sent, color=[style(place)[0] for place in range(len(sent))], height=0.62)
    for place, row in enumerate(report.rows):
        axes.text(sent[place] + 0.015 * max(sent), place, describe(row), va="center", fontsize=9)
    axes.set_yticks(range(len(sent)), [row.name for row in report.rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(sent))
    axes.set_xlabel("megabytes leaving a node per step (interface counter)")
    axes.set_title("What crosses the link, and what a step takes", loc="left", fontsize=11)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def describe(row: Row) -> str:
    """The words beside a bar."""
    words = f"{row.inter_node_bytes_per_step / 1e6:.1f} MB, {1e3 * row.step_s:.0f} ms"
    if row.speedup_over_bf16_two_hop is not None and row.name not in BASELINES:
        words += f"\n{row.speedup_over_bf16_two_hop:.2f} x bf16_two_hop"
    return words


def style(place: int) -> tuple[str, tuple[float, ...]]:
    """Colour and dashes of the recipe at this place."""
    return COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
