"""One row of `zcomm perf`: a form of a collective at one size, what was measured, and how it compares in its run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zcomm.tools.link import Link
from zcomm.tools.perf_formulas import algorithm_bandwidth_gb_s, break_even_gbit_s, bus_bandwidth_gb_s
from zcomm.tools.perf_truth import Check

UNCOMPRESSED = ("raw", "bf16")  # of zcomm's codecs
ABOUT_EQUAL = 0.05  # of times; nearer than that is noise


class Verdict(Enum):
    """A codec against the fastest uncompressed form of the same run and size."""

    FASTER = "faster"
    EQUAL = "about equal"
    SLOWER = "slower"
    WRONG = "wrong"
    BASELINE = "uncompressed"


@dataclass(frozen=True)
class Form:
    """One way to do a collective."""

    by: str  # "zcomm", or the library whose own collective it is
    codec: str  # zcomm's spelling; of a library "fp32" or "bf16"
    hops: int | None = None  # 1 or 2; None: the library's affair

    @property
    def name(self) -> str:
        """As tables and baselines are called: "two hops int8", "gloo bf16"."""
        where = self.by if self.hops is None else ("flat", "two hops")[self.hops - 1]
        return f"{where} {self.codec}"

    @property
    def compressed(self) -> bool:
        """Whether this is not one of the baselines."""
        return self.by == "zcomm" and self.codec not in UNCOMPRESSED


@dataclass(frozen=True)
class Counted:
    """What zcomm's own stats() say of one call."""

    wire_bytes_intra: int  # sent by one rank inside its node; the busiest rank
    wire_bytes_inter: int  # sent by one rank to other nodes; the busiest rank
    raw_bytes: int  # what that rank would have sent in float32
    link_bytes: int  # leaving the busiest node; on one node, leaving the busiest rank
    codec_s: float | None  # median over calls of the slowest rank; None: on a GPU it cannot be told apart


@dataclass(frozen=True)
class Measured:
    """What one form did."""

    collective: str
    form: Form
    n_ranks: int
    size_bytes_total: int
    times_s: tuple[float, ...]  # of the counted calls, each on its slowest rank
    check: Check  # over all ranks
    replicas_equal: bool | None  # None: results differ by their meaning
    counted: Counted | None  # None: a library's own form
    node_tx_bytes: float | None  # by the busiest node's interface, headers included; None: not an emulated cluster

    @property
    def time_s(self) -> float:
        """The median."""
        return statistics.median(self.times_s)

    @property
    def right(self) -> bool:
        """Whether every element is in its bound and replicas are equal."""
        return self.check.wrong_elems == 0 and self.replicas_equal is not False


@dataclass(frozen=True)
class Row:
    """A form beside those it competes with."""

    measured: Measured
    best: Measured  # the fastest uncompressed form
    two_hops_bf16: Measured | None
    own: Measured | None  # the library's own, in the fewest bits it carries
    same_hops_bf16: Measured | None

    @property
    def speedup(self) -> float:
        """Over the best uncompressed form."""
        return self.best.time_s / self.measured.time_s

    @property
    def break_even_gbit_s(self) -> float | None:
        """Where bf16 in as many hops takes as long; None for what is no codec, or cannot be told."""
        mine, other = self.measured.counted, self.same_hops_bf16 and self.same_hops_bf16.counted
        if not self.measured.form.compressed or not mine or not other or mine.codec_s is None or other.codec_s is None:
            return None
        return break_even_gbit_s(other.link_bytes - mine.link_bytes, mine.codec_s - other.codec_s)

    @property
    def codec_share(self) -> float | None:
        """Part of the time that coding takes; it may overlap with sending."""
        counted = self.measured.counted
        return None if counted is None or counted.codec_s is None else counted.codec_s / self.measured.time_s

    @property
    def compression_ratio(self) -> float | None:
        """Raw bytes / wire bytes of one rank."""
        counted = self.measured.counted
        return None if counted is None else counted.raw_bytes / (counted.wire_bytes_intra + counted.wire_bytes_inter)

    @property
    def verdict(self) -> Verdict:
        """In a word."""
        if not self.measured.right:
            return Verdict.WRONG
        if not self.measured.form.compressed:
            return Verdict.BASELINE
        if abs(self.speedup - 1) <= ABOUT_EQUAL:
            return Verdict.EQUAL
        return Verdict.FASTER if self.speedup > 1 else Verdict.SLOWER

    @property
    def count(self) -> int:
        """nccl-tests' count: elements of an all-reduce's tensor, otherwise of one rank's shard."""
        return self.size_bytes_per_rank // 4

    @property
    def size_bytes_per_rank(self) -> int:
        """Bytes of an all-reduce's tensor, otherwise of one rank's shard."""
        measured = self.measured
        return measured.size_bytes_total // (1 if measured.collective == "all_reduce" else measured.n_ranks)

    @property
    def algbw_gb_s(self) -> float:
        """nccl-tests' algorithm bandwidth."""
        return algorithm_bandwidth_gb_s(self.measured.size_bytes_total, self.measured.time_s)

    @property
    def busbw_gb_s(self) -> float:
        """nccl-tests' bus bandwidth."""
        measured = self.measured
        return bus_bandwidth_gb_s(measured.collective, measured.size_bytes_total, measured.n_ranks, measured.time_s)

    def wire_alone_ms(self, link: Link | None) -> float | None:
        """What a node's link needs for the bytes alone; None where either is not known."""
        measured = self.measured
        nbytes = measured.node_tx_bytes
        if nbytes is None and measured.counted is not None:
            nbytes = measured.counted.link_bytes
        if nbytes is None or link is None or link.bits_s is None:
            return None
        return nbytes / link.bytes_s * 1e3

    def as_json(self, link: Link | None) -> dict[str, Any]:
        """Everything, units in the keys."""
        measured, counted = self.measured, self.measured.counted
        break_even = self.break_even_gbit_s
        found: dict[str, Any] = {
            "collective": measured.collective,
            "form": measured.form.name,
            "link": None if link is None else str(link),
            "by": measured.form.by,
            "codec": measured.form.codec,
            "hops": measured.form.hops,
            "type": "float32",
            "redop": redop(measured.collective),
            "size_bytes_total": measured.size_bytes_total,
            "size_bytes_per_rank": self.size_bytes_per_rank,
            "count_elems": self.count,
            "calls": len(measured.times_s),
            "time_ms": measured.time_s * 1e3,
            "time_min_ms": min(measured.times_s) * 1e3,
            "time_max_ms": max(measured.times_s) * 1e3,
            "algbw_gb_s": self.algbw_gb_s,
            "busbw_gb_s": self.busbw_gb_s,
            "wire_bandwidth_gb_s": None,
            "wrong_elems": measured.check.wrong_elems,
            "replicas_equal": measured.replicas_equal,
            "max_error": finite(measured.check.max_error),
            "max_error_over_bound": finite(measured.check.error_over_bound),
            "wire_bytes_intra": None,
            "wire_bytes_inter": None,
            "raw_bytes": None,
            "link_bytes": None,
            "compression_ratio": self.compression_ratio,
            "codec_ms": None,
            "codec_share": self.codec_share,
            "node_tx_bytes": measured.node_tx_bytes,
            "wire_alone_ms": self.wire_alone_ms(link),
            "best_uncompressed": self.best.form.name,
            "speedup_over_best_uncompressed": self.speedup,
            "speedup_over_two_hops_bf16": speedup_over(self.two_hops_bf16, measured),
            "break_even_gbit_s": finite(break_even),
            "break_even": break_even_words(break_even),
            "verdict": self.verdict.value,
        }
        if self.own is not None:
            found[f"speedup_over_{self.own.form.name.replace(' ', '_')}"] = speedup_over(self.own, measured)
        if counted is not None:
            found |= {
                "wire_bytes_intra": counted.wire_bytes_intra,
                "wire_bytes_inter": counted.wire_bytes_inter,
                "raw_bytes": counted.raw_bytes,
                "link_bytes": counted.link_bytes,
                "wire_bandwidth_gb_s": algorithm_bandwidth_gb_s(
                    counted.wire_bytes_intra + counted.wire_bytes_inter, measured.time_s
                ),
                "codec_ms": None if counted.codec_s is None else counted.codec_s * 1e3,
            }
        return found


def judge(
    found: Sequence[Measured],  # all forms of one collective at one size, from one run
) -> list[Row]:
    """Set each form beside those it competes with."""
    uncompressed = [one for one in found if not one.form.compressed and one.right]
    best = min(uncompressed or found, key=lambda one: one.time_s)
    own = [one for one in found if one.form.hops is None]
    by_form = {one.form: one for one in found}
    bf16 = {hops: by_form.get(Form("zcomm", "bf16", hops)) for hops in (1, 2)}
    return [Row(one, best, bf16[2], own[-1] if own else None, bf16.get(one.form.hops or 0)) for one in found]


def speedup_over(baseline: Measured | None, measured: Measured) -> float | None:
    """Time of the baseline / time of this."""
    return None if baseline is None else baseline.time_s / measured.time_s


def finite(value: float | None) -> float | None:
    """JSON has no infinity: None in its place, and in that of None."""
    return value if value is not None and math.isfinite(value) else None


def redop(collective: str) -> str:
    """nccl-tests' column: the operator, or none."""
    return "none" if collective == "all_gather" else "sum"


def break_even_words(gbit_s: float | None) -> str | None:
    """The break-even bandwidth as people read it."""
    if gbit_s is None:
        return None
    if math.isinf(gbit_s):
        return "any"
    if gbit_s == 0:
        return "never"
    return f"{gbit_s:.0f} Gbit/s" if gbit_s >= 100 else f"{gbit_s:.3g} Gbit/s"
