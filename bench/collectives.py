"""Collectives on the emulated cluster, link by link: `zcomm perf` run once per link, its rows in one file.

    python bench/collectives.py --links 100mbit,1gbit,none --json bench/results/collectives.json

Each row is one form of a collective at one size and link: zcomm's codecs in one and two hops beside every uncompressed
form, in the same run; bytes that left the busiest node by its interface's counters; the time the wire alone needs for
them; the largest error. docs/benchmark.md says what the columns mean. Times are comparable within one link's run only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from zcomm.errors import ZcommError
from zcomm.tools import cluster
from zcomm.tools.demo import KEEP_MEMORY
from zcomm.tools.link import Link
from zcomm.tools.output_file import why_not_writable, write_json
from zcomm.tools.perf_formulas import COLLECTIVES


def main() -> None:
    """One cluster per link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="100mbit,1gbit,none", help="rates as zcomm cluster takes them")
    parser.add_argument("--sizes", default="16M", help="as zcomm perf takes them (default: %(default)s)")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--codec", default="int8,int4", help="as zcomm perf takes them (default: %(default)s)")
    parser.add_argument("--calls", default="100", help="as zcomm perf takes it (default: %(default)s)")
    parser.add_argument("--seconds", default="2", help="as zcomm perf takes it (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if problem := why_not_writable("--json", args.json):
        parser.error(problem)
    try:
        specs = [
            cluster.ClusterSpec(args.nodes, args.ranks_per_node, Link.parse(link)) for link in args.links.split(",")
        ]
    except ZcommError as problem:
        parser.error(str(problem))
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for spec in specs:
        found = run(args, spec)
        about = found["about"]
        rows += found["rows"]
    if args.json:
        about |= {"command": " ".join(["python", "bench/collectives.py", *sys.argv[1:]]), "link": args.links}
        write_json(args.json, {"about": about, "rows": rows})


def run(args: argparse.Namespace, spec: cluster.ClusterSpec) -> dict[str, Any]:
    """zcomm perf on a fresh cluster; what it wrote. Ends the program where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "rows.json"
        options = ["--codec", args.codec, "--sizes", args.sizes, "--calls", args.calls, "--seconds", args.seconds]
        options += ["--link", str(spec.link), "--json", str(written)]
        command = [sys.executable, "-m", "zcomm", "perf", *args.collectives.split(","), *options]
        result = cluster.run(command, spec, environment=KEEP_MEMORY | dict(os.environ))
        if result.exit_status:
            sys.exit(result.exit_status)
        found: dict[str, Any] = json.loads(written.read_text())
    return found


if __name__ == "__main__":
    main()
