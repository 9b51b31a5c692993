"""`zcomm plan`: before a cluster is rented, what each recipe moves, holds and takes there, and which one to use.

Computed from formulas (zcomm/tools/cost.py); nothing is run. Times are what bytes need on the links: latency is left
out, and coding appears as the speed from which it pays.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zcomm.errors import ClusterError
from zcomm.tools.about import about
from zcomm.tools.cost import BASELINES, RECIPES, Moved, Nodes, Recipe, coded_bytes, memory_bytes, step, wire_s
from zcomm.tools.link import read_rate
from zcomm.tools.output_file import why_not_writable, write_json

PAYS_FROM = 1.05  # times as fast
MOST_PARAMS = 1e15
MOST_NODES = MOST_GPUS = 1_000_000
MOST_LAYERS = 100_000  # each is reckoned by itself


@dataclass(frozen=True)
class Row:
    """One recipe on one cluster."""

    recipe: str
    inter_node_bytes: int  # out of a node, per step
    intra_node_bytes: int  # of a rank to its node, per step
    memory_bytes: int  # of a rank
    wire_s: float
    slowest_step_s: float | None  # nothing overlaps; None: compute time is not known
    fastest_step_s: float | None  # all overlaps
    coding_gb_s: float | None  # float32 bytes per second from which coding pays; infinite: never; None: nothing coded

    def as_json(self) -> dict[str, Any]:
        """Everything, units in the keys. JSON has no infinity."""
        return asdict(self) | {"coding_never_pays": self.coding_gb_s == math.inf}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `zcomm plan`."""
    parser.description = "Predict bytes, memory and time of an FSDP step by recipe, from formulas; nothing is run."
    parser.add_argument("--params", required=True, metavar="N", help="parameters of the model: 7e9")
    parser.add_argument("--nodes", required=True, metavar="K", help="nodes")
    parser.add_argument("--gpus-per-node", required=True, metavar="L", help="ranks on each")
    parser.add_argument("--link", required=True, metavar="RATE", help="of each node to the others, each way: 100gbit")
    parser.add_argument(
        "--node-link", default="none", metavar="RATE", help="of each rank inside its node (default: none, not limited)"
    )
    parser.add_argument("--layers", default="32", metavar="N", help="units wrapped one by one (default: %(default)s)")
    parser.add_argument("--compute", metavar="S", help="seconds a step takes without a network, to predict whole steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns the exit status."""
    n_params = int(read_number("--params", args.params, MOST_PARAMS))
    shape = Nodes(
        read_count("--nodes", args.nodes, MOST_NODES), read_count("--gpus-per-node", args.gpus_per_node, MOST_GPUS)
    )
    n_layers = read_count("--layers", args.layers, MOST_LAYERS)
    if n_layers > n_params:
        raise ClusterError(f"--layers {n_layers} are more than --params {n_params}")
    compute_s = None if args.compute is None else read_number("--compute", args.compute, 1e9)
    if problem := why_not_writable("--json", args.json):
        raise ClusterError(problem)
    link, node_link = read_rate(args.link), read_rate(args.node_link)
    units = [n_params // n_layers + (i < n_params % n_layers) for i in range(n_layers)]
    rows = plan(units, shape, link, node_link, compute_s)
    print("\n".join(table(rows)))
    print(verdict(rows, args.link))
    if args.json is not None:
        write_json(args.json, {"about": about("zcomm"), "rows": [row.as_json() for row in rows]})
    return 0


def plan(
    units: list[int],
    shape: Nodes,
    link_bytes_s: float,
    node_link_bytes_s: float,
    compute_s: float | None,
) -> list[Row]:
    """A row for each recipe."""
    moved = {recipe.name: step(units, shape, recipe) for recipe in RECIPES}
    took = {name: wire_s(each, shape, link_bytes_s, node_link_bytes_s) for name, each in moved.items()}
    best_s = min(took[name] for name in BASELINES)
    return [
        row_of(recipe, units, shape, moved[recipe.name], took[recipe.name], best_s, compute_s) for recipe in RECIPES
    ]


def row_of(
    recipe: Recipe,
    units: list[int],
    shape: Nodes,
    moved: Moved,
    took_s: float,
    best_s: float,  # wire time of the best uncompressed recipe
    compute_s: float | None,
) -> Row:
    """One recipe's row."""
    coded = coded_bytes(units, shape, recipe)
    coding = None
    if coded:
        coding = coded / (best_s - took_s) / 1e9 if best_s > took_s else math.inf
    return Row(
        recipe=recipe.name,
        inter_node_bytes=moved.inter * shape.ranks_per_node,
        intra_node_bytes=moved.intra,
        memory_bytes=memory_bytes(units, shape, recipe),
        wire_s=took_s,
        slowest_step_s=None if compute_s is None else compute_s + took_s,
        fastest_step_s=None if compute_s is None else max(compute_s, took_s),
        coding_gb_s=coding,
    )


def table(rows: list[Row]) -> list[str]:
    """The rows as people read them."""
    titles = ("recipe", "out of node", "inside it", "memory", "wire", "step", "pays if coding")
    units = ("", "GB a step", "GB a rank", "GB a rank", "s", "s", "exceeds GB/s")
    lines = ["{:<14}{:>13}{:>11}{:>10}{:>9}{:>16}{:>16}".format(*head) for head in (titles, units)]
    for row in rows:
        steps = "-"
        if row.slowest_step_s is not None and row.fastest_step_s is not None:
            steps = f"{row.fastest_step_s:.3g} to {row.slowest_step_s:.3g}"
        coding = (
            "-" if row.coding_gb_s is None else "never" if math.isinf(row.coding_gb_s) else f"{row.coding_gb_s:.3g}"
        )
        lines.append(
            f"{row.recipe:<14}{row.inter_node_bytes / 1e9:>13.4g}{row.intra_node_bytes / 1e9:>11.4g}"
            f"{row.memory_bytes / 1e9:>10.4g}{row.wire_s:>9.3g}{steps:>16}{coding:>16}"
        )
    return lines


def verdict(rows: list[Row], link: str) -> str:
    """What to use, in a sentence or two."""
    plain = min((row for row in rows if row.recipe in BASELINES), key=lambda row: row.wire_s)
    best = min((row for row in rows if row.recipe not in BASELINES), key=lambda row: row.wire_s)
    if plain.wire_s == 0:
        return "Nothing is limited here: compression cannot pay."
    if best.wire_s * PAYS_FROM > plain.wire_s:
        return f"Compression saves no time at {link}: use {plain.recipe}."
    saved = (
        f"{best.recipe} needs the links for {best.wire_s:.3g} s a step, "
        f"{plain.recipe}, uncompressed, for {plain.wire_s:.3g} s"
    )
    if best.slowest_step_s is None or plain.slowest_step_s is None:
        return f"{saved}. Whether that shows depends on compute: give --compute."
    assert best.fastest_step_s is not None
    assert plain.fastest_step_s is not None
    low = plain.fastest_step_s / best.fastest_step_s
    high = plain.slowest_step_s / best.slowest_step_s
    low, high = min(low, high), max(low, high)
    if high < PAYS_FROM:
        return f"{saved}, but compute is nearly all of the step: compression hardly matters; use {plain.recipe}."
    return (
        f"{saved}: {low:.2f} to {high:.2f} times as fast, by how much overlaps. "
        f"Use {best.recipe}, if memory suffices and coding is fast enough (zcomm perf measures it)."
    )


def read_count(option: str, text: str, most: int) -> int:
    """A whole number of at least 1."""
    digits = text.lstrip("0")
    if not text.isdecimal() or not digits:
        raise ClusterError(f"{option} {text!r} is not a whole number of at least 1")
    if len(digits) > len(str(most)) or int(digits) > most:
        raise ClusterError(f"{option} is {text}; expected {most:,} at most")
    return int(digits)


def read_number(option: str, text: str, most: float) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        raise ClusterError(f"{option} {text!r} is not a number; write it like 7e9 or 0.5") from None
    if not 0 < value <= most or (option == "--params" and value < 1):
        raise ClusterError(f"{option} is {text}; expected a positive number up to {most:g}")
    return value
