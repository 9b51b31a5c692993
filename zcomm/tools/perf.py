"""`zcomm perf`: collectives by codec, size and hops beside every uncompressed form, in nccl-tests' columns.

    zcomm cluster --link 1gbit -- zcomm perf all_reduce --codec int8,int4 --sizes 1M:64M

Every rank runs this program; rank 0 prints. What the columns mean: docs/benchmark.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from zcomm.errors import ZcommError
from zcomm.tools import perf_options, perf_plot, perf_report
from zcomm.tools.output_file import write_json, writing
from zcomm.tools.perf_measure import Bench
from zcomm.tools.perf_options import Options
from zcomm.tools.perf_row import Row, judge
from zcomm.tools.perf_world import Launcher, World, find_launcher, join

WRONG = 1  # exit status where a result is wrong
USAGE_ERROR = 2
FIRST_SPEAKS_S = 2.0  # rank 0 says what is wrong; a launcher ends all ranks when one ends

add_arguments = perf_options.add_arguments


def run(args: argparse.Namespace) -> int:
    """Run `zcomm perf` on this rank; returns the exit status: 0, 1 if any result is wrong, 2 for a bad request."""
    launcher = None
    try:
        options = perf_options.read_options(args)
        launcher = find_launcher()
        world = join(launcher, options.device)
    except ZcommError:
        rank = os.environ.get("RANK", "")
        if int(rank) if rank.isdecimal() else launcher is not None and launcher.rank:
            time.sleep(FIRST_SPEAKS_S)
            return USAGE_ERROR
        raise
    return measure(options, launcher, world)


def measure(options: Options, launcher: Launcher, world: World) -> int:
    """The sweep, from the header to the files, and farewell. An error leaves at once: peers then do not wait."""
    first = world.rank == 0
    problem = world.gather(perf_options.check_files(options) if first else None)[0]
    on_cluster = "ZCOMM_CLUSTER" in os.environ
    bench = None if problem else Bench(world, options, on_cluster)
    if bench is not None and options.hops == (2,) and not bench.topology.has_two_levels:
        problem = "--hops 2 needs several nodes, one of them with several ranks; these ranks have one level: --hops 1"
    if bench is None or problem:
        if first:
            print(f"zcomm: {problem}", file=sys.stderr, flush=True)
        world.close()
        return USAGE_ERROR
    about = perf_report.About.of(launcher, world, bench.topology, options, on_cluster)
    say(first, *about.lines())
    rows: list[Row] = []
    for collective in options.collectives:
        say(first, perf_report.header(collective))
        for size_bytes in options.sizes_bytes:
            found = judge(bench.measure(collective, size_bytes))
            say(first, *(perf_report.line(row) for row in found))
            rows += found
        own = [row for row in rows if row.measured.collective == collective]
        say(first, "#", *perf_report.verdicts(collective, own))
    bench.close()
    world.close()
    if first:
        write(options, about, rows)
    return 0 if all(row.measured.right for row in rows) else WRONG


def write(options: Options, about: perf_report.About, rows: list[Row]) -> None:
    """The files asked for."""
    if options.json is not None:
        named = {"about": about.as_json(), "rows": [row.as_json(options.link) for row in rows]}
        write_json(options.json, named)
    if options.plot is not None:
        topology = about.topology
        link = "" if options.link is None else f", link {options.link}"
        title = f"{topology.size} ranks on {topology.nodes} node{'s' * (topology.nodes > 1)}{link}, {about.versions}"
        with writing("--plot", options.plot):
            perf_plot.draw(title, rows, options.plot)


def say(first: bool, *lines: str) -> None:
    """Print on rank 0, at once: a sweep takes a while."""
    if first:
        print(*lines, sep="\n", flush=True)
