"""`zcomm cluster`: a slow cluster on one Linux machine, and a program run on it as torchrun would.

The command line of cluster.py: what was asked for, whose output is shown and how, and the report.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zcomm.errors import ClusterError
from zcomm.tools import cluster
from zcomm.tools.cluster import (
    MOST_NODES,
    MOST_RANKS_PER_NODE,
    ClusterSpec,
    Output,
    UseNamespaces,
    check_command,
    print_note,
    write_through,
)
from zcomm.tools.cluster_report import print_table
from zcomm.tools.link import Link, parse_latency
from zcomm.tools.output_file import why_not_writable, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `zcomm cluster`."""
    parser.description = __doc__.splitlines()[0] if __doc__ else None
    parser.add_argument("--nodes", default="2", metavar="N", help=f"1 to {MOST_NODES} (default 2)")
    parser.add_argument("--ranks-per-node", default="2", metavar="N", help=f"1 to {MOST_RANKS_PER_NODE} (default 2)")
    parser.add_argument(
        "--link",
        default="none",
        metavar="RATE",
        help="each node's link, both ways: 200mbit, 1gbit, none (default)",
    )
    parser.add_argument(
        "--latency",
        default="0",
        metavar="TIME",
        help="one way, node to node: 1ms, 250us; needs netem in the kernel",
    )
    parser.add_argument(
        "--mpi", action="store_true", help="the ranks are those of an MPI program: its mpiexec starts them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counters, exit status and shaping here")
    parser.add_argument(
        "--quiet", action="store_true", help="no table; only what went wrong or was not applied is said"
    )
    parser.add_argument("--timeout", metavar="S", help="end the program after this many seconds, with status 124")
    parser.add_argument("--prefix", action="store_true", help="begin each line of output with its [rank]")
    parser.add_argument("--rank0-output", action="store_true", help="show what rank 0 writes only")
    parser.add_argument(
        "--namespaces",
        choices=[choice.value for choice in UseNamespaces],
        default=UseNamespaces.AUTO.value,
        help="auto (default): real nodes where allowed, else paced in user space; require; off",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what each rank runs")


def run(args: argparse.Namespace) -> int:
    """Run `zcomm cluster`; returns the exit status to end with."""
    spec = ClusterSpec(
        nodes=_read_count("--nodes", args.nodes),
        ranks_per_node=_read_count("--ranks-per-node", args.ranks_per_node),
        link=Link.parse(args.link),
        latency_s=parse_latency(args.latency),
        namespaces=UseNamespaces(args.namespaces),
    )
    timeout_s = None if args.timeout is None else _read_timeout(args.timeout)
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if problem := why_not_writable("--json", args.json):
        raise ClusterError(problem)

    def show(output: Output) -> None:
        if args.rank0_output and output.rank != 0:
            return
        write_through(output._replace(text=_prefixed(output)) if args.prefix else output)

    check_command(program, os.environ)
    if "OMP_NUM_THREADS" not in os.environ and not args.quiet:
        print_note("OMP_NUM_THREADS is not set; each rank gets OMP_NUM_THREADS=1")
    result = cluster.run(program, spec, timeout_s=timeout_s, mpi=args.mpi, on_output=show)
    if not args.quiet:
        print_table(result)
    if args.json is not None:
        write_json(args.json, result.as_json())
    return result.exit_status


def _prefixed(output: Output) -> bytes:
    mark = f"[{output.rank}] ".encode()
    return b"".join(mark + line for line in output.text.splitlines(keepends=True))


def _read_count(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{option} {text!r} is not a whole number") from None


def _read_timeout(text: str) -> float:
    try:
        timeout_s = float(text)
    except ValueError:
        raise ClusterError(f"--timeout {text!r} is not a number of seconds") from None
    if not 0 < timeout_s < 1e9:
        raise ClusterError(f"--timeout is {text}; expected a positive number of seconds")
    return timeout_s
