"""From measurements to the demo's table, JSON and verdict. Pure functions: numbers in, numbers and text out.

Definitions (docs/numbers.md):
    step          median over the counted steps, each as long as on the slowest rank
    speed-up      step of the baseline / step of the recipe, at the same link
    possible      (compute + wire of the baseline's bytes) / (compute + wire of the recipe's bytes), where compute is
                  the same step with its collectives replaced by local copies, and wire is measured bytes / link rate
    reached       speed-up / possible
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from zcomm.tools.cost import BASELINES
from zcomm.tools.demo_plan import NO_NETWORK, Measured, Shape
from zcomm.tools.link import Link

PACED = "paced in user space"
PAYS_FROM = 1.05  # speed-up below which the verdict does not call it one: the noise of a shared machine


@dataclass(frozen=True)
class Row:
    """One recipe's line of the table and of the JSON. None: not measured, or its baseline was not."""

    name: str
    meaning: str
    step_s: float
    steps_counted: int
    tokens_per_s: float
    inter_node_bytes_per_step: float
    resent_segments_per_step: float  # TCP segments that one node sent again, at most
    bytes_over_bf16_two_hop: float | None
    stats_bytes_per_step: float | None
    stats_over_counters_pct: float | None  # stats() minus counters, in % of the counters
    val_loss: float | None
    val_loss_over_fp32_pct: float | None
    speedup_over_bf16: float | None
    speedup_over_bf16_two_hop: float | None
    speedup_possible_over_bf16_two_hop: float | None
    reached_of_possible: float | None
    unlimited_step_s: float  # the same step on a link without limit
    codec_s_per_step: float | None
    wait_s_per_step: float | None
    losses: list[float]  # of each training step, mean over ranks


@dataclass(frozen=True)
class Report:
    """Everything the demo found out."""

    link: str
    nodes: int
    ranks_per_node: int
    shaping: str  # how the link was limited: "tbf", "none" or "paced in user space"
    compute_s: float  # the step with its collectives replaced by local copies
    loss_steps: int
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """The layout of demo.json; the rows are called recipes there."""
        fields = asdict(self)
        fields["recipes"] = fields.pop("rows")
        return fields


def step_s(measured: Measured) -> float:
    """The step time that counts."""
    return statistics.median(measured.step_s)


def possible_speedup(
    compute_s: float,
    baseline_bytes: float,  # leaving a node per step
    recipe_bytes: float,
    bytes_s: float,  # the link's rate; infinite: not limited
) -> float:
    """The speed-up that bytes and compute allow when nothing overlaps and coding is free."""
    return (compute_s + baseline_bytes / bytes_s) / (compute_s + recipe_bytes / bytes_s)


def build(
    link: Link,
    shape: Shape,
    limited: list[Measured],  # on the link; NO_NETWORK among them
    unlimited: list[Measured],  # on a link without limit, with losses
) -> Report:
    """Join both launches."""
    at_link = {m.name: m for m in limited}
    at_none = {m.name: m for m in unlimited}
    compute_s = step_s(at_link.pop(NO_NETWORK))
    two_hop, bf16, fp32 = (at_link.get(name) for name in ("bf16_two_hop", "bf16", "fp32"))
    fp32_loss = at_none["fp32"].val_loss if fp32 else None

    rows = []
    for name, m in at_link.items():
        took_s, sent = step_s(m), m.inter_node_bytes_per_step
        loss = at_none[name].val_loss
        speedup = step_s(two_hop) / took_s if two_hop else None
        possible = None
        if two_hop:
            possible = possible_speedup(compute_s, two_hop.inter_node_bytes_per_step, sent, link.bytes_s)
        rows.append(
            Row(
                name=name,
                meaning=m.meaning,
                step_s=took_s,
                steps_counted=len(m.step_s),
                tokens_per_s=m.tokens_per_step / took_s,
                inter_node_bytes_per_step=sent,
                resent_segments_per_step=m.resent_segments_per_step,
                bytes_over_bf16_two_hop=ratio(sent, two_hop.inter_node_bytes_per_step if two_hop else None),
                stats_bytes_per_step=m.stats_bytes_per_step,
                stats_over_counters_pct=excess_pct(m.stats_bytes_per_step, sent),
                val_loss=loss,
                val_loss_over_fp32_pct=excess_pct(loss, fp32_loss),
                speedup_over_bf16=step_s(bf16) / took_s if bf16 else None,
                speedup_over_bf16_two_hop=speedup,
                speedup_possible_over_bf16_two_hop=possible,
                reached_of_possible=ratio(speedup, possible),
                unlimited_step_s=step_s(at_none[name]),
                codec_s_per_step=m.codec_s_per_step,
                wait_s_per_step=m.wait_s_per_step,
                losses=at_none[name].losses,
            )
        )
    loss_steps = max(len(row.losses) for row in rows)
    return Report(str(link), **asdict(shape), compute_s=compute_s, loss_steps=loss_steps, rows=rows)


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole where both are known and whole is not zero."""
    return part / whole if part is not None and whole else None


def excess_pct(value: float | None, reference: float | None) -> float | None:
    """How far value lies above reference, in % of it, where both are known and reference is not zero."""
    return 100 * (value - reference) / reference if value is not None and reference else None


def verdict(report: Report) -> str:
    """Whether compression pays at this link, in a few sentences, also when it does not."""
    compressed = [row for row in report.rows if row.name not in BASELINES]
    plain = [row for row in report.rows if row.name in BASELINES]
    if not compressed or not plain:
        return "No verdict: it takes at least one baseline and one compressed recipe to compare."
    best, best_plain = (min(rows, key=lambda row: row.step_s) for rows in (compressed, plain))
    speedup = best_plain.step_s / best.step_s
    where = "on this unlimited link" if report.link == "none" else f"at {report.link}"

    said = []
    if speedup >= PAYS_FROM:
        said.append(
            f"Compression pays {where}: {best.name} is {speedup:.2f} times as fast as {best_plain.name}, "
            "the fastest uncompressed form"
        )
        if best.reached_of_possible is not None and best_plain.name == "bf16_two_hop":
            said[-1] += f" ({best.reached_of_possible:.0%} of what its bytes allow)"
        if best.speedup_over_bf16 is not None and best_plain.name != "bf16":
            said[-1] += f", and {best.speedup_over_bf16:.2f} times as fast as bf16 through torch's own collectives"
        said[-1] += "."
    elif speedup > 1 / PAYS_FROM:
        said.append(
            f"Compression hardly matters {where}: {best.name} is {speedup:.2f} times as fast as "
            f"{best_plain.name}, the fastest uncompressed form, which is within this machine's noise."
        )
    else:
        said.append(
            f"Compression does not pay {where}: {best_plain.name}, uncompressed, takes "
            f"{1e3 * best_plain.step_s:.0f} ms a step, {best.name} {1e3 * best.step_s:.0f} ms."
        )
    if best.val_loss_over_fp32_pct is not None:
        said.append(
            f"Its validation loss differs from fp32's by {best.val_loss_over_fp32_pct:+.2f} % "
            f"after {report.loss_steps} steps."
        )
    if report.link != "none":
        said.append(verdict_without_limit(report, best))
    if any(report.compute_s > row.step_s for row in report.rows):
        said.append(
            "The machine was busy with other work: computing alone took longer than a whole step did elsewhere in this "
            "run, so 'possible' and 'reached' say little. Run it again when the machine is idle."
        )
    return " ".join(said)


def verdict_without_limit(report: Report, best: Row) -> str:
    """What the same recipes do where the network is no bottleneck."""
    fastest = min((row for row in report.rows if row.name in BASELINES), key=lambda row: row.unlimited_step_s)
    times = f"{1e3 * best.unlimited_step_s:.0f} ms"
    against = f"{fastest.name} needs {1e3 * fastest.unlimited_step_s:.0f} ms a step there, {best.name} {times}"
    if best.unlimited_step_s * PAYS_FROM < fastest.unlimited_step_s:
        return f"Without a limit on the link it is faster too: {against}."
    if best.unlimited_step_s < PAYS_FROM * fastest.unlimited_step_s:
        return f"Without a limit on the link nothing is gained or lost by it: {against}, which is within the noise."
    return f"Without a limit on the link it would not be the one to take: {against}."


COLUMNS = (
    "recipe",
    "step\nms",
    "tokens\n/s",
    "MB out\na node",
    "valid.\nloss",
    "against\nfp32",
    "times\nbf16",
    "times\n2-hop",
    "pos-\nsible",
    "rea-\nched",
    "free\nms",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, as text, in the order of COLUMNS."""
    return (
        row.name,
        f"{1e3 * row.step_s:.0f}",
        f"{row.tokens_per_s:.0f}",
        f"{row.inter_node_bytes_per_step / 1e6:.2f}",
        text(row.val_loss, "{:.4f}"),
        text(row.val_loss_over_fp32_pct, "{:+.2f} %"),
        text(row.speedup_over_bf16, "{:.2f}"),
        text(row.speedup_over_bf16_two_hop, "{:.2f}"),
        text(row.speedup_possible_over_bf16_two_hop, "{:.2f}"),
        text(row.reached_of_possible, "{:.0%}"),
        f"{1e3 * row.unlimited_step_s:.0f}",
    )


def text(value: float | None, form: str) -> str:
    """value in its form, or a dash."""
    return "-" if value is None else form.format(value)


def footnotes(report: Report) -> list[str]:
    """What one must know to read the table."""
    counted = [abs(row.stats_over_counters_pct) for row in report.rows if row.stats_over_counters_pct is not None]
    steps = ", ".join(f"{row.name} {row.steps_counted}" for row in report.rows)
    paced = report.shaping == PACED
    counter = "as charged to the pacer, without TCP's headers" if paced else "by the network interface's own counter"
    notes = [
        f"step: median of the counted steps ({steps}) at the link, each as long as on the slowest rank. "
        f"Compute alone: {1e3 * report.compute_s:.0f} ms.",
        f"MB out of a node: per step, {counter}"
        + (f"; zcomm's stats() agree within {max(counted):.1f} %." if counted else "."),
        f"loss: losses do not depend on the link, so they are of {report.loss_steps} steps on a link without limit, "
        "with the same seeds and batches; 'free' is the step time there.",
        "2-hop: bf16_two_hop, the strongest uncompressed form. possible: the speed-up over it that bytes and compute "
        "time allow, (compute + its wire) / (compute + this wire). reached: of that; it passes 100 % where transfers "
        "hide behind compute.",
    ]
    if paced:
        notes.append(f"network: {PACED}, as namespaces are not allowed here.")
    return notes
