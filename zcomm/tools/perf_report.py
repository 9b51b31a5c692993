"""What `zcomm perf` prints and writes: facts of the run after #, nccl-tests' columns and zcomm's, verdicts in words."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcomm.collectives.choice import ONE_EXCHANGE_DIVISOR
from zcomm.plan import Plan
from zcomm.tools.about import about, cpu_model, engine
from zcomm.tools.perf_measure import WARM_UP_CALLS
from zcomm.tools.perf_options import Options
from zcomm.tools.perf_row import Row, Verdict, break_even_words, redop
from zcomm.tools.perf_world import Launcher, World
from zcomm.topology import Topology
from zcomm.version import __version__

# title, unit, width
COLUMNS = (
    ("size", "(B total)", 11),
    ("count", "(elements)", 11),
    ("type", "", 6),
    ("redop", "", 6),
    ("by", "", 6),
    ("codec", "", 8),
    ("hops", "", 5),
    ("time", "(us)", 10),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
    ("intra", "(wire B)", 11),
    ("inter", "(wire B)", 11),
    ("ratio", "raw/wire", 9),
    ("max error", "", 10),
    ("of bound", "", 9),
    ("codec", "% time", 7),
    ("speed-up", "x best", 9),
    ("break-even", "(Gbit/s)", 11),
)
WHOLE_TENSOR = "all_reduce's tensor, all_gather's output, reduce_scatter's input"


@dataclass(frozen=True)
class About:
    """What ran, where."""

    launcher: Launcher
    versions: str
    topology: Topology
    options: Options
    library: str
    own_dtypes: tuple[str, ...]
    on_cluster: bool

    @classmethod
    def of(cls, launcher: Launcher, world: World, topology: Topology, options: Options, on_cluster: bool) -> About:
        """The facts of a run."""
        return cls(launcher, world.versions, topology, options, world.library, world.own_dtypes, on_cluster)

    def as_json(self) -> dict[str, Any]:
        """The facts as named values."""
        link = self.options.link
        return about(
            "zcomm",
            launcher=self.launcher.name,
            versions=self.versions,
            engine=engine(self.options.device),
            world_size=self.topology.size,
            nodes=self.topology.nodes,
            node_of_rank=self.topology.node_of_rank,
            link=None if link is None else str(link),
            emulated_cluster=self.on_cluster,
            device=self.options.device,
            calls=self.options.calls,
            budget_s=self.options.budget_s,
            sizes=f"bytes of the whole float32 tensor on one rank: {WHOLE_TENSOR}",
        )

    def lines(self) -> list[str]:
        """The header, without the columns."""
        topology, options = self.topology, self.options
        n, most = topology.size, Plan().one_shot_bytes
        placed = " + ".join(str(len(ranks)) for ranks in topology.ranks_of_node)
        where = "a rank's link (all share one node)" if topology.nodes == 1 else "a node's link"
        found = [
            f"zcomm perf {__version__}, python {platform.python_version()}, numpy {np.__version__}, {self.versions}, "
            f"{engine(options.device)}",
            f"{n} ranks, by node {placed}, started by {self.launcher.name}; {cpu_model()}, {os.cpu_count()} cores",
            self._link(),
            f"size: bytes of the whole float32 tensor on one rank: {WHOLE_TENSOR}",
            "count: elements of an all_reduce's tensor, else of one rank's shard, as in nccl-tests",
            f"time: median of {options.calls} calls (as many as fit {options.budget_s:g} s), each on its slowest rank; "
            f"forms take turns, after {WARM_UP_CALLS} calls that are not counted",
            f"algbw = size / time; busbw = algbw x (n-1)/n, of all_reduce x 2(n-1)/n; n = {n}",
            "#wrong: elements off by more than their bound; of bound: the largest error / bound of any element",
            "intra, inter: payload that one rank sends to its node and to others; ratio: those bytes in float32 / on "
            "the wire",
            "speed-up: over the fastest uncompressed form of this run and size, marked *",
            f"calls of zcomm's that send at most {most} B (all_reduce), {most // ONE_EXCHANGE_DIVISOR} B (others) are "
            "one exchange, whatever the hops",
            f"break-even: speed of {where} below which a codec beats bf16 in as many hops, by bytes and coding time",
        ]
        if not topology.has_two_levels:
            found.append("two hops need several nodes, one of them with several ranks: only one hop is measured")
        if not self.own_dtypes:
            found.append(
                f"the link is paced in user space, which does not slow {self.library}'s own collectives: left out"
            )
        return ["# " + line for line in found]

    def _link(self) -> str:
        link = self.options.link
        how = "emulated by zcomm cluster" if self.on_cluster else "as it is"
        if link is None:
            return f"link: {how}; its rate was not told (--link)"
        return f"link: {link} each way per node, as told; {how}"


def header(collective: str) -> str:
    """The columns' names and units."""
    titles = "".join(f"{title:>{width}}" for title, _, width in COLUMNS)
    units = "".join(f"{unit:>{width}}" for _, unit, width in COLUMNS)
    return f"#\n# {collective}\n#{titles}\n#{units}"


def line(row: Row) -> str:
    """One row of the table."""
    measured, counted = row.measured, row.measured.counted
    best = "*" if measured is row.best else " "
    cells = [
        str(measured.size_bytes_total),
        str(row.count),
        "float",
        redop(measured.collective),
        measured.form.by,
        measured.form.codec,
        _cell(measured.form.hops, "d"),
        f"{measured.time_s * 1e6:.0f}",
        f"{row.algbw_gb_s:.3f}",
        f"{row.busbw_gb_s:.3f}",
        str(measured.check.wrong_elems) if measured.replicas_equal is not False else "DIFFER",
        _cell(counted.wire_bytes_intra if counted else None, "d"),
        _cell(counted.wire_bytes_inter if counted else None, "d"),
        _cell(row.compression_ratio, ".2f"),
        f"{measured.check.max_error:.1e}",
        f"{measured.check.error_over_bound:.2f}",
        _cell(None if row.codec_share is None else 100 * row.codec_share, ".0f"),
        f"{row.speedup:.2f}{best}",
        (break_even_words(row.break_even_gbit_s) or "-").removesuffix(" Gbit/s"),
    ]
    return " " + "".join(f"{cell:>{width}}" for cell, (_, _, width) in zip(cells, COLUMNS, strict=True))


def verdicts(
    collective: str,
    rows: Sequence[Row],  # of one collective, all sizes
) -> list[str]:
    """One line per codec and number of hops, and one for each form that is wrong."""
    lines = []
    for form in dict.fromkeys(row.measured.form for row in rows):
        own = [row for row in rows if row.measured.form == form]
        parts = []
        for verdict in (Verdict.FASTER, Verdict.EQUAL, Verdict.SLOWER, Verdict.WRONG):
            at = [row for row in own if row.verdict is verdict]
            if not at:
                continue
            every = " at every size" if len(at) == len(own) > 1 else ""
            if verdict is Verdict.WRONG:
                told = ", ".join(f"{size_words(row.measured.size_bytes_total)} ({_fault(row)})" for row in at)
            else:
                told = ", ".join(
                    f"{size_words(row.measured.size_bytes_total)} ({row.speedup:.2f} x {row.best.form.name})"
                    for row in at
                )
            parts.append(f"{verdict.value}{every}: {told}")
        if parts:
            lines.append(f"# {collective}, {form.name}: {'; '.join(parts)}")
    return lines


def size_words(nbytes: int) -> str:
    """A size as people write it: 64 KiB, 16 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def _fault(row: Row) -> str:
    if row.measured.replicas_equal is False:
        return "replicas differ between ranks"
    return f"elements off by more than their bound: {row.measured.check.wrong_elems}"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
