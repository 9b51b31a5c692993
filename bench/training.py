"""Training steps on the emulated cluster, link by link and recipe by recipe: what `zcomm demo` does, for more links.

    python bench/training.py --links 100mbit,200mbit,1gbit,none --json bench/results/training.json

Each row is the median step of one recipe at one link, each step as long as on the slowest rank; recipes and the step
without a network alternate within a link, so times are comparable there. Bytes are the interface counters'. Losses do
not depend on the link: they come from one longer run without a limit (--loss-steps), the same in every row.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from zcomm.errors import ZcommError
from zcomm.tools import demo, demo_report
from zcomm.tools.link import Link
from zcomm.tools.output_file import write_json


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="100mbit,200mbit,1gbit,none", help="rates as zcomm cluster takes them")
    demo.add_arguments(parser, link=False)
    args = parser.parse_args()
    try:
        links = [Link.parse(link) for link in args.links.split(",")]
        args.link = str(links[0])
        options = demo.check(args)
    except ZcommError as problem:
        parser.error(str(problem))

    console = Console(width=150)
    with demo.progress_bars(console) as bars:
        losses = demo.measure_losses(options, bars)
        by_link = [(link, demo.measure_at_link(options, link, bars)) for link in links]
    reports = [demo.report_on(options, link, found, losses) for link, found in by_link]

    rows = [row_of(report, row) for report in reports for row in report.rows]
    console.print(table_of(rows))
    if args.json:
        about = demo.about_run(options, "python bench/training.py")
        write_json(args.json, {"about": about, "rows": rows})


def row_of(report: demo_report.Report, row: demo_report.Row) -> dict[str, Any]:
    """One line of the results, units in the keys."""
    rate = Link.parse(report.link).bytes_s
    return {
        "link": report.link,
        "shaping": report.shaping,
        "recipe": row.name,
        "step_ms": 1e3 * row.step_s,
        "steps_counted": row.steps_counted,
        "compute_ms": 1e3 * report.compute_s,
        "wire_alone_ms": 1e3 * row.inter_node_bytes_per_step / rate,
        "codec_ms": None if row.codec_s_per_step is None else 1e3 * row.codec_s_per_step,
        "wait_ms": None if row.wait_s_per_step is None else 1e3 * row.wait_s_per_step,
        "node_tx_bytes_per_step": row.inter_node_bytes_per_step,
        "stats_bytes_per_step": row.stats_bytes_per_step,
        "tokens_per_s": row.tokens_per_s,
        "speedup_over_bf16": row.speedup_over_bf16,
        "speedup_over_bf16_two_hop": row.speedup_over_bf16_two_hop,
        "speedup_possible_over_bf16_two_hop": row.speedup_possible_over_bf16_two_hop,
        "reached_of_possible": row.reached_of_possible,
        "val_loss": row.val_loss,
        "val_loss_over_fp32_pct": row.val_loss_over_fp32_pct,
        "loss_steps": report.loss_steps,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The columns people ask for."""
    columns = {
        "link": ("link", "{}"),
        "recipe": ("recipe", "{}"),
        "step_ms": ("step ms", "{:.0f}"),
        "compute_ms": ("compute ms", "{:.0f}"),
        "wire_alone_ms": ("wire alone ms", "{:.0f}"),
        "node_tx_bytes_per_step": ("bytes out of a node", "{:,.0f}"),
        "speedup_over_bf16": ("x bf16", "{:.2f}"),
        "speedup_over_bf16_two_hop": ("x two hops", "{:.2f}"),
        "speedup_possible_over_bf16_two_hop": ("possible", "{:.2f}"),
        "reached_of_possible": ("reached", "{:.0%}"),
        "val_loss_over_fp32_pct": ("loss over fp32 %", "{:+.2f}"),
    }
    table = Table()
    for key, (header, _) in columns.items():
        table.add_column(header, justify="left" if key in ("link", "recipe") else "right")
    for row in rows:
        table.add_row(*("-" if row[key] is None else form.format(row[key]) for key, (_, form) in columns.items()))
    return table


if __name__ == "__main__":
    main()
