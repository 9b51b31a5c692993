"""The table `zcomm cluster` ends with: what crossed each node's link."""

from __future__ import annotations

import sys

from zcomm.tools.cluster import ClusterResult


def print_table(result: ClusterResult) -> None:
    """Print the table to stderr; plain lines where rich is not installed."""
    shaping = result.shaping
    how = shaping.rate if shaping.burst_bytes is None else f"{shaping.rate}, burst {shaping.burst_bytes // 1024} KiB"
    title = (
        f"{result.spec.nodes} nodes x {result.spec.ranks_per_node} ranks, "
        f"link {result.spec.link} each way ({how}), latency {shaping.latency}; "
        f"{result.seconds:.2f} s, exit status {result.exit_status}"
    )
    rows = [
        (
            str(counters.node),
            f"{counters.tx_bytes:,}",
            f"{counters.rx_bytes:,}",
            f"{counters.tx_bytes * 8e-6 / result.seconds:.1f}",
            f"{counters.rx_bytes * 8e-6 / result.seconds:.1f}",
        )
        for counters in result.per_node
    ]
    header = ("node", "tx bytes", "rx bytes", "mean tx Mbit/s", "mean rx Mbit/s")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title, *("  ".join(row) for row in (header, *rows)), sep="\n", file=sys.stderr)
        return
    table = Table()
    for column in header:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    print(title, file=sys.stderr)
    Console(stderr=True).print(table)
