"""The picture of `zcomm perf`: for each collective, time by size on the left, speed-up over the best uncompressed form
on the right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zcomm.tools.demo_plot import COLOURS, DASHES, FAINT, INK
from zcomm.tools.perf_report import size_words
from zcomm.tools.perf_row import Row

GREYS = ("#555555", "#7F7F7F", "#A0A0A0", "#BBBBBB")  # of uncompressed forms, which differ in dashes
FLAT = (2, 1.2)  # dashes of a codec's flat form; its two hops are solid
FEW_FORMS = 12  # more make the legend's letters smaller


def draw(
    title: str,
    rows: Sequence[Row],
    path: Path,  # its suffix says in which format
) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    look = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "text.color": INK,
        "axes.labelcolor": INK,
    }
    collectives = list(dict.fromkeys(row.measured.collective for row in rows))
    with pyplot.rc_context(look):
        figure, axes = pyplot.subplots(
            len(collectives), 2, figsize=(12.5, 4.6 * len(collectives)), layout="constrained", squeeze=False
        )
        figure.suptitle(title, fontsize=12, fontweight="bold")
        for (times, speedups), collective in zip(axes, collectives, strict=True):
            own = [row for row in rows if row.measured.collective == collective]
            draw_curves(times, own, lambda row: row.measured.time_s * 1e3, uncompressed=True)
            times.set_yscale("log")
            times.yaxis.set_major_formatter("{x:g}")
            times.yaxis.set_minor_formatter(ticker.LogFormatter())  # plain, and none over several decades
            times.set_ylabel("milliseconds per call (median, slowest rank)")
            times.set_title(f"{collective}: time", loc="left", fontsize=11)
            forms = len({row.measured.form for row in own})
            times.legend(frameon=False, loc="best", handlelength=3, fontsize=9 if forms <= FEW_FORMS else 7)
            speedups.axhline(1, color=INK, linewidth=1)
            draw_curves(speedups, own, lambda row: row.speedup, uncompressed=False)
            speedups.set_ylim(bottom=0)
            speedups.set_ylabel("times as fast as the best uncompressed form")
            speedups.set_title(f"{collective}: above the line a codec pays", loc="left", fontsize=11)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def draw_curves(axes: Any, rows: Sequence[Row], height: Callable[[Row], float], uncompressed: bool) -> None:
    """One curve per form over sizes; a codec has its colour in both panels, uncompressed forms are grey."""
    forms = list(dict.fromkeys(row.measured.form for row in rows))
    codecs = list(dict.fromkeys(form.codec for form in forms if form.compressed))
    greys = [form for form in forms if not form.compressed]
    for form in forms:
        own = [row for row in rows if row.measured.form == form]
        sizes, heights = [row.measured.size_bytes_total for row in own], [height(row) for row in own]
        if form.compressed:
            colour = COLOURS[1 + codecs.index(form.codec) % (len(COLOURS) - 1)]  # the first is grey
            dashes: tuple[float, ...] = FLAT if form.hops == 1 else ()
        elif uncompressed:
            place = greys.index(form)
            colour, dashes = GREYS[place % len(GREYS)], DASHES[place % len(DASHES)]
        else:
            continue
        width = 2.4 if form.compressed else 1.3
        (curve,) = axes.plot(sizes, heights, color=colour, linewidth=width, marker="o", markersize=4, label=form.name)
        if dashes:
            curve.set_dashes(dashes)
    ticks = sorted({row.measured.size_bytes_total for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size_words(size) for size in ticks], rotation=30 if len(ticks) > 6 else 0)
    axes.minorticks_off()
    axes.set_xlabel("size of the whole float32 tensor")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
