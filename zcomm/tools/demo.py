"""`zcomm demo`: what compression does to FSDP2 training between two slow-linked nodes, in one table and one picture.

1. On an emulated cluster with the link asked for, every recipe takes a few steps: step times, bytes.
2. On the same cluster without a limit, every recipe trains for longer: losses, and step times there.
3. The table, the verdict, --json and --plot.

The model and its loop are examples/train_gpt.py; this file starts them, shows progress and reports.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcomm.errors import MissingExtra, ZcommError
from zcomm.tools import cluster, demo_plot, demo_report
from zcomm.tools.about import about
from zcomm.tools.demo_plan import NO_NETWORK, Event, Launch, Measured, Model, Shape
from zcomm.tools.link import Link
from zcomm.tools.output_file import why_not_writable, write_json, writing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

RECIPES = ("fp32", "bf16", "bf16_two_hop", "int8", "zeropp")
STEP_BUDGET_S = 9.0  # of counted steps per recipe at the link; the slow ones take fewer steps
LOG_LINES = 30  # of what the ranks wrote, shown when one fails
RANK = cluster.OWN_MODULES_ONLY + (  # Ctrl-C ends a rank at once, also while it still imports torch
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); from zcomm.tools import demo_rank; demo_rank.main()"
)

# glibc gives each buffer of some MiB back to the kernel and faults it in again, which costs every recipe more than
# coding does (bench/README.md).
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}


@dataclass(frozen=True)
class Size:
    """What is run unless the user says otherwise."""

    steps: int  # counted, at the link
    loss_steps: int
    model: Model


FULL = Size(steps=7, loss_steps=25, model=Model())
QUICK = Size(steps=3, loss_steps=6, model=Model(width=192, layers=2, batch=2, validation_batches=2))


class DemoError(ZcommError, RuntimeError):
    """The demo cannot run as asked, or a part of it failed."""


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked."""

    spec: cluster.ClusterSpec
    recipes: tuple[str, ...]
    steps: int
    loss_steps: int
    model: Model
    example: Path
    json: Path | None
    plot: Path | None


def add_arguments(parser: argparse.ArgumentParser, link: bool = True) -> None:
    """The command line of `zcomm demo`; link: with --link, which bench/training.py replaces by a list."""
    if link:
        parser.description = (
            "Train a small GPT over a slow link, plain and compressed: under three minutes on two cores."
        )
        parser.add_argument(
            "--link", default="200mbit", help="rate of each node's link, or none (default: %(default)s)"
        )
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes (default: %(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="ranks on each (default: %(default)s)")
    parser.add_argument(
        "--recipes", default=",".join(RECIPES), help="which to compare, with commas (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help=f"counted steps of each recipe at the link; slow ones take fewer (default: {FULL.steps})",
    )
    parser.add_argument(
        "--loss-steps", type=int, default=None, help=f"training steps for the losses (default: {FULL.loss_steps})"
    )
    parser.add_argument("--quick", action="store_true", help="a much smaller model and few steps: shows that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture here, e.g. demo.png")


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status. Bad arguments raise before anything starts."""
    options = check(args)
    from rich.console import Console

    console = Console()
    started = time.monotonic()
    try:
        report = measure(options, console)
    except KeyboardInterrupt:
        console.print("stopped: the cluster has ended, nothing was written")
        return 128 + signal.SIGINT
    show(report, console)
    if options.json:
        write_json(options.json, {"about": about_run(options), **report.as_json()})
    if options.plot:
        with writing("--plot", options.plot):
            demo_plot.draw(report, options.plot)
    written = [str(path) for path in (options.json, options.plot) if path]
    wrote = f"; wrote {' and '.join(written)}" if written else ""
    console.print(f"[dim]took {time.monotonic() - started:.0f} s{wrote}[/dim]")
    return 0


def about_run(options: Options, program: str = "zcomm") -> dict[str, Any]:
    """What ran."""
    shape = {"nodes": options.spec.nodes, "ranks_per_node": options.spec.ranks_per_node}
    return about(program, **shape, model=vars(options.model))


# ---- before anything runs --------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> Options:
    """Turn arguments into options. Raises one of zcomm's errors for the first that makes no sense."""
    for package, extra in (("torch", "torch"), ("rich", "tools"), ("pyroute2", "tools"), ("matplotlib", "tools")):
        needed = package != "matplotlib" or args.plot
        if needed and importlib.util.find_spec(package) is None:
            raise MissingExtra(f"zcomm demo needs {package}; run: pip install 'zcomm-collectives[{extra}]'")
    spec = cluster.ClusterSpec(args.nodes, args.ranks_per_node, Link.parse(args.link))
    size = QUICK if args.quick else FULL
    steps = size.steps if args.steps is None else args.steps
    loss_steps = size.loss_steps if args.loss_steps is None else args.loss_steps
    for name, value in (("--steps", steps), ("--loss-steps", loss_steps)):
        if value < 1:
            raise DemoError(f"{name} must be at least 1, got {value}")
    recipes = tuple(name.strip() for name in args.recipes.split(","))
    unknown = [name for name in recipes if name not in RECIPES]
    if unknown:
        raise DemoError(f"--recipes has the unknown {unknown[0]!r}; known are {', '.join(RECIPES)}")
    if len(set(recipes)) < len(recipes):
        raise DemoError(f"--recipes names one twice: {args.recipes}")
    for name, path in (("--json", args.json), ("--plot", args.plot)):
        if problem := why_not_writable(name, path):
            raise DemoError(problem)
    return Options(spec, recipes, steps, loss_steps, size.model, find_example(), args.json, args.plot)


def find_example() -> Path:
    """examples/train_gpt.py of a checkout, or its copy inside the installed package."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "examples", package / "examples"):
        if (folder / "train_gpt.py").is_file():
            return folder / "train_gpt.py"
    raise DemoError(
        f"train_gpt.py is neither in {package.parent / 'examples'} nor in {package / 'examples'}; reinstall zcomm"
    )


# ---- running ---------------------------------------------------------------------------------------------------------


def measure(options: Options, console: Console) -> demo_report.Report:
    """Both launches, with a progress bar."""
    with progress_bars(console) as bars:
        limited = measure_at_link(options, options.spec.link, bars)
        unlimited = measure_losses(options, bars)
    return report_on(options, options.spec.link, limited, unlimited)


def report_on(options: Options, link: Link, limited: Finding, unlimited: Finding) -> demo_report.Report:
    """Join what was found at a link with the losses."""
    shape = Shape(options.spec.nodes, options.spec.ranks_per_node, limited.shaping)
    return demo_report.build(link, shape, limited.recipes, unlimited.recipes)


def measure_at_link(options: Options, link: Link, bars: Progress) -> Finding:
    """Step times and bytes of every recipe at a link, and the time of compute alone."""
    launch = Launch(
        example=str(options.example),
        ranks_per_node=options.spec.ranks_per_node,
        recipes=(*options.recipes, NO_NETWORK),
        model=options.model,
        warmup_steps=2,
        steps=options.steps,
        budget_s=STEP_BUDGET_S,
    )
    return start(launch, options, link, f"steps at {link}", bars)


def measure_losses(options: Options, bars: Progress) -> Finding:
    """Losses and step times of every recipe on a link without limit."""
    launch = Launch(
        example=str(options.example),
        ranks_per_node=options.spec.ranks_per_node,
        recipes=options.recipes,
        model=options.model,
        warmup_steps=min(2, options.loss_steps - 1),
        steps=options.loss_steps - min(2, options.loss_steps - 1),
        validate=True,
    )
    return start(launch, options, Link(None), "losses, no limit", bars)


@dataclass(frozen=True)
class Finding:
    """What one launch reported."""

    recipes: list[Measured]
    shaping: str  # how the link was limited


def start(launch: Launch, options: Options, link: Link, title: str, bars: Progress) -> Finding:
    """Run one launch on a fresh cluster, moving its bar as rank 0 reports. Raises DemoError if a rank fails."""
    bar = bars.add_task(title, total=None)
    found: list[Measured] = []
    log: list[str] = []  # what the ranks wrote beside events

    def hear(output: cluster.Output) -> None:
        for line in output.text.decode(errors="replace").splitlines():
            event = Event.parse(line) if output.rank == 0 else None
            if event is None:
                log.append(f"[{output.rank}] {line}")
            elif event.kind == "planned":
                bars.update(bar, total=event.fields["steps"])
            elif event.kind == "step":
                bars.update(bar, advance=1, description=f"{title}: {event.fields['recipe']}")
            else:
                found.append(Measured(**event.fields))
                if not bars.console.is_terminal:  # bars do not move in a log file
                    bars.console.print(f"{title}: {found[-1].name} measured")

    result = cluster.run(
        [sys.executable, "-c", RANK, launch.to_json()],
        replace(options.spec, link=link),
        environment={"OMP_NUM_THREADS": "1"} | KEEP_MEMORY | dict(os.environ),
        on_output=hear,
        on_note=bars.console.print,
    )
    if result.signal is not None:
        raise KeyboardInterrupt
    if result.exit_status != 0:
        last = "\n".join(log[-LOG_LINES:])
        raise DemoError(
            f"the demo failed at {title!r} with status {result.exit_status}; the ranks' last lines:\n{last}"
        )
    bars.update(bar, description=title)
    return Finding(found, result.shaping.rate)


# ---- showing ---------------------------------------------------------------------------------------------------------


def progress_bars(console: Console) -> Progress:
    """One bar per launch."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def show(report: demo_report.Report, console: Console) -> None:
    """The table, what one must know to read it, and the verdict."""
    from rich.table import Table

    table = Table(
        title=f"FSDP2 training, {report.nodes} nodes x {report.ranks_per_node} ranks, link {report.link}",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in demo_report.COLUMNS:
        table.add_column(column, justify="left" if column == "recipe" else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*demo_report.cells(row))
    console.print()
    console.print(table)
    console.print()
    for note in demo_report.footnotes(report):
        console.print(note, style="dim", highlight=False)
    console.print()
    console.print(demo_report.verdict(report), style="bold", highlight=False)
