"""Collectives on the emulated cluster, link by link: zcomm's forms beside the uncompressed ones, in one run.

    python bench/collectives.py --links 100mbit,1gbit,none --json bench/results/collectives.json

Each row is the median over calls of the slowest rank's time, with the bytes that left node 0 by its interface's
counters, the error against the exact sum, and the time the wire alone needs for the bytes sent. gloo's forms are what
torch users have; "two hops bf16" is the strongest uncompressed form (docs/numbers.md). Times are comparable within one
run only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
ZCOMM_FORMS = ("two hops bf16", "flat int8", "flat int4", "two hops int8", "two hops int4")
FORMS = ("gloo fp32", "gloo bf16", *ZCOMM_FORMS)


def main() -> None:
    """Drive the cluster once per link, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="100mbit,1gbit,none", help="rates as zcomm cluster takes them")
    parser.add_argument(
        "--nbytes", type=int, default=16 << 20, help="bytes of the whole float32 tensor (default 16 MiB)"
    )
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--calls", type=int, default=7, help="timed calls per row (default 7)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_output:
        run_rank(args)
    else:
        drive(args)


def drive(args: argparse.Namespace) -> None:
    """One cluster per link; print and write all rows."""
    from rich.console import Console
    from rich.table import Table

    import zcomm
    from zcomm.tools import cluster
    from zcomm.tools.link import Link

    rows: list[dict[str, Any]] = []
    for link in args.links.split(","):
        spec = cluster.ClusterSpec(args.nodes, args.ranks_per_node, Link.parse(link))
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            command = [
                sys.executable,
                str(Path(__file__).resolve()),
                *sys.argv[1:],
                "--rank-output",
                str(output),
            ]
            result = cluster.run(command, spec)
            if result.exit_status:
                sys.exit(result.exit_status)
            rate = spec.link.bits_s
            for row in json.loads(output.read_text()):
                wire_ms = row["node_tx_bytes"] * 8 / rate * 1e3 if rate else None
                rows.append({"link": link, **row, "wire_alone_ms": wire_ms})
    shape = f"{args.nodes} nodes x {args.ranks_per_node} ranks"
    table = Table(title=f"{args.nbytes / 2**20:g} MiB float32, {shape}, median of {args.calls}")
    for column in ("link", "collective", "form"):
        table.add_column(column)
    for column in ("ms", "wire alone ms", "MiB out of node 0", "max error", "x gloo bf16", "x two hops bf16"):
        table.add_column(column, justify="right")
    for row in rows:
        kin = [other for other in rows if all(other[key] == row[key] for key in ("link", "collective"))]
        same = {other["form"]: other["time_ms"] for other in kin}
        for name in ("gloo bf16", "two hops bf16"):
            row[f"speedup_over_{name.replace(' ', '_')}"] = same[name] / row["time_ms"] if name in same else None
        cells = [f"{row['time_ms']:.1f}", _text(row["wire_alone_ms"], ".1f")]
        cells += [f"{row['node_tx_bytes'] / 2**20:.2f}", f"{row['max_error']:.1e}"]
        cells += [_text(row[f"speedup_over_{name}"], ".2f") for name in ("gloo_bf16", "two_hops_bf16")]
        table.add_row(row["link"], row["collective"], row["form"], *cells)
    Console(width=150).print(table)
    if args.json:
        import torch

        about = {
            "command": " ".join(["python", "bench/collectives.py", *sys.argv[1:]]),
            "zcomm": zcomm.__version__,
            "torch": torch.__version__,
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "platform": platform.platform(),
        }
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def run_rank(args: argparse.Namespace) -> None:
    """Measure every form of every collective; rank 0 writes the rows."""
    import torch
    import torch.distributed as dist

    import zcomm
    from zcomm.tools.cluster_counters import node_counters

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    n_elems = args.nbytes // 4 // size * size
    part = n_elems // size
    full = torch.randn(n_elems, generator=torch.Generator().manual_seed(rank))
    communicators = {
        hops: zcomm.Communicator(plan=zcomm.Plan(hierarchical=hops == "two hops")) for hops in ("flat", "two hops")
    }
    total = full.double()
    dist.all_reduce(total)
    exact = {"all_reduce": total, "reduce_scatter": total[rank * part : (rank + 1) * part]}
    shards = [torch.empty(part) for _ in range(size)]
    dist.all_gather(shards, full[:part].contiguous())
    exact["all_gather"] = torch.cat(shards).double()

    rows = []
    for collective in args.collectives.split(","):
        calls = {form: _call(collective, form, full, part, communicators) for form in args.forms.split(",")}
        times: dict[str, list[float]] = {form: [] for form in calls}
        sent: dict[str, list[int]] = {form: [] for form in calls}
        for number in range(args.calls + 2):
            for form, (call, reset, _) in calls.items():  # forms alternate, so that all see the same machine
                reset()
                before = node_counters().tx_bytes
                dist.barrier()
                started = time.perf_counter()
                call()
                took = torch.tensor(time.perf_counter() - started)
                dist.barrier()
                sent[form].append(node_counters().tx_bytes - before)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if number >= 2:
                    times[form].append(took.item() * 1e3)
        for form, (_, _, result) in calls.items():
            error = (result().double() - exact[collective]).abs().max()
            dist.all_reduce(error, dist.ReduceOp.MAX)
            rows.append(
                {
                    "collective": collective,
                    "form": form,
                    "time_ms": statistics.median(times[form]),
                    "time_min_ms": min(times[form]),
                    "time_max_ms": max(times[form]),
                    "node_tx_bytes": statistics.median(sent[form]),
                    "max_error": error.item(),
                }
            )
    if rank == 0:
        args.rank_output.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _call(
    collective: str, form: str, full: Any, part: int, communicators: dict[str, Any]
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], Any]]:
    """The call to time, what to do before each, and where its result is."""
    import torch
    import torch.distributed as dist

    hops, codec = form.rsplit(" ", 1)
    dtype = torch.bfloat16 if form == "gloo bf16" else torch.float32
    data = full.to(dtype)
    x, own = data.clone(), data[:part].clone()
    gathered, scattered = torch.empty_like(data), torch.empty(part, dtype=dtype)
    if hops == "gloo":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        calls = {
            "all_reduce": (lambda: dist.all_reduce(x), lambda: x.copy_(data), lambda: x),
            "all_gather": (lambda: gather(gathered, own), lambda: None, lambda: gathered),
            "reduce_scatter": (lambda: scatter(scattered, data), lambda: None, lambda: scattered),
        }
    else:
        comm = communicators[hops]
        calls = {
            "all_reduce": (lambda: comm.all_reduce(x, "sum", codec), lambda: x.copy_(data), lambda: x),
            "all_gather": (
                lambda: comm.all_gather_single(gathered, own, codec),
                lambda: None,
                lambda: gathered,
            ),
            "reduce_scatter": (
                lambda: comm.reduce_scatter_single(scattered, data, "sum", codec),
                lambda: None,
                lambda: scattered,
            ),
        }
    return calls[collective]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


if __name__ == "__main__":
    main()
