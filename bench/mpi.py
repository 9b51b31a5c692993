"""Allreduce over MPI on the emulated cluster, link by link: the library's own beside zcomm.mpi.Comm's, in one run.

    python bench/mpi.py --links 100mbit,1gbit,none --json bench/results/mpi.json

Each row is the median over calls of the slowest rank's time, with the bytes that left node 0 by its interface's
counters, the error against the exact sum, and the time the wire alone needs for the bytes sent. Forms alternate call by
call, so that all see the same machine. Times are comparable within one run only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FORMS = ("MPI fp32", "raw", "bf16", "int8", "int4", "int8 auto")
WARM_UP_CALLS = 2
FEWEST_CALLS = 7  # of each form at each size; up to --calls, as long as all forms together take less than SIZE_BUDGET_S
SIZE_BUDGET_S = 5.0


def main() -> None:
    """Drive the cluster once per link, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="100mbit,1gbit,none", help="rates as zcomm cluster takes them")
    parser.add_argument("--sizes", default="16777216", help="bytes of the float32 array, comma-separated (16 MiB)")
    parser.add_argument("--forms", default=",".join(FORMS), help="comma-separated; auto: under Plan(auto=True)")
    parser.add_argument("--calls", type=int, default=100, help="most timed calls per row (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_output:
        run_rank(args)
        return
    from zcomm.errors import ZcommError
    from zcomm.tools.cluster import ClusterSpec
    from zcomm.tools.link import Link
    from zcomm.tools.output_file import why_not_writable

    if problem := why_not_writable("--json", args.json):
        parser.error(problem)
    try:
        links = args.links.split(",")
        specs = {link: ClusterSpec(args.nodes, args.ranks_per_node, Link.parse(link)) for link in links}
    except ZcommError as error:
        parser.error(str(error))
    drive(args, specs)


def drive(
    args: argparse.Namespace,
    specs: dict[str, Any],  # ClusterSpecs by link
) -> None:
    """One cluster per link; print and write all rows."""
    from rich.console import Console
    from rich.table import Table

    from zcomm.tools import cluster
    from zcomm.tools.about import about
    from zcomm.tools.output_file import write_json

    rows: list[dict[str, Any]] = []
    library = ""
    for link, spec in specs.items():
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rank-output", str(output)]
            result = cluster.run(command, spec, mpi=True)
            if result.exit_status:
                sys.exit(result.exit_status)
            found = json.loads(output.read_text())
        library = found["library"]
        rate = spec.link.bits_s
        for row in found["rows"]:
            wire_ms = row["node_tx_bytes"] * 8 / rate * 1e3 if rate else None
            rows.append({"link": link, **row, "wire_alone_ms": wire_ms})
    shape = f"{args.nodes} nodes x {args.ranks_per_node} ranks"
    table = Table(title=f"Allreduce of float32, {shape}, {library}, medians of {FEWEST_CALLS} to {args.calls}")
    for column in ("link", "size KiB", "form"):
        table.add_column(column)
    for column in ("ms", "wire alone ms", "MiB out of node 0", "max error", "x MPI fp32"):
        table.add_column(column, justify="right")
    for row in rows:
        own = next(
            (other["time_ms"] for other in rows if other["form"] == FORMS[0] and _case(other) == _case(row)), None
        )
        row["speedup_over_mpi"] = own / row["time_ms"] if own else None
        table.add_row(
            row["link"],
            f"{row['nbytes'] / 1024:g}",
            row["form"],
            f"{row['time_ms']:.2f}",
            _text(row["wire_alone_ms"], ".1f"),
            f"{row['node_tx_bytes'] / 2**20:.2f}",
            f"{row['max_error']:.1e}",
            _text(row["speedup_over_mpi"], ".2f"),
        )
    Console(width=130).print(table)
    if args.json:
        ran = about("python bench/mpi.py", library=library, nodes=args.nodes, ranks_per_node=args.ranks_per_node)
        write_json(args.json, {"about": ran, "rows": rows})


def run_rank(args: argparse.Namespace) -> None:
    """Measure every form at every size; rank 0 writes the rows."""
    import numpy as np
    from mpi4py import MPI

    from zcomm.tools.cluster_counters import node_counters

    world = MPI.COMM_WORLD
    forms: dict[str, Any] = {
        form: world if form == FORMS[0] else compressed(world, *form.split(" ")) for form in args.forms.split(",")
    }
    rows = []
    for nbytes in map(int, args.sizes.split(",")):
        x = np.random.default_rng(world.rank).standard_normal(nbytes // 4).astype(np.float32)
        exact = np.empty(x.size, np.float64)
        world.Allreduce(x.astype(np.float64), exact)
        out = np.zeros_like(x)
        times: dict[str, list[float]] = {form: [] for form in forms}
        sent: dict[str, list[int]] = {form: [] for form in forms}
        errors: dict[str, float] = {}
        begun = time.monotonic()
        for number in range(WARM_UP_CALLS + args.calls):
            enough = number >= WARM_UP_CALLS + FEWEST_CALLS and time.monotonic() - begun > SIZE_BUDGET_S
            if world.bcast(enough):
                break
            for form, comm in forms.items():
                world.Barrier()
                before = node_counters().tx_bytes
                world.Barrier()
                started = time.perf_counter()
                comm.Allreduce(x, out)
                seconds = time.perf_counter() - started
                world.Barrier()
                tx_bytes = node_counters().tx_bytes - before
                if number >= WARM_UP_CALLS:
                    times[form].append(world.allreduce(seconds, MPI.MAX) * 1e3)
                    sent[form].append(tx_bytes)
                else:
                    errors[form] = world.allreduce(float(np.abs(out - exact).max()), MPI.MAX)
        rows += [
            {
                "nbytes": nbytes,
                "form": form,
                "calls": len(times[form]),
                "time_ms": statistics.median(times[form]),
                "time_min_ms": min(times[form]),
                "time_max_ms": max(times[form]),
                "node_tx_bytes": statistics.median(sent[form]),
                "max_error": errors[form],
            }
            for form in forms
        ]
    if world.rank == 0:
        library = MPI.Get_library_version().splitlines()[0].replace("\t", " ").strip("\0 ")
        args.rank_output.write_text(json.dumps({"library": " ".join(library.split()), "rows": rows}))
    for form, comm in forms.items():
        if form != FORMS[0]:
            comm.close()


def compressed(world: Any, codec: str, auto: str = "") -> Any:
    """zcomm's communicator."""
    from dataclasses import replace

    import zcomm
    from zcomm.plugs.mpi import PLAN

    return zcomm.mpi.Comm(world, codec, plan=replace(PLAN, auto=auto == "auto"))


def _case(row: dict[str, Any]) -> tuple[str, int]:
    return row["link"], row["nbytes"]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
