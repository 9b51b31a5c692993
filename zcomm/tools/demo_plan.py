"""What the demo does and what its ranks report: the values that travel between `zcomm demo` and each rank.

The parent gives each rank a Launch as JSON; rank 0 answers with events, one line of its output each. Two launches make
a demo: one on the limited link for step times and bytes, one on an unlimited link for losses.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

NO_NETWORK = "no_network"  # the step of fp32 with each collective replaced by a copy of the same size
SHORT_STEP_S = 1.5


@dataclass(frozen=True)
class Model:
    """Settings of the example that the demo sets; the rest stays as the example has it."""

    width: int = 384
    layers: int = 4
    batch: int = 4  # sequences per rank and step
    validation_batches: int = 8


@dataclass(frozen=True)
class Launch:
    """One start of the cluster: which recipes take how many steps."""

    example: str  # path of train_gpt.py
    ranks_per_node: int
    recipes: tuple[str, ...]  # NO_NETWORK may be among them
    model: Model
    # Of each recipe, not counted. One is enough where it takes over SHORT_STEP_S, except where losses are compared:
    # those must be of as many steps for every recipe.
    warmup_steps: int
    steps: int  # at most, of each recipe
    budget_s: float = float("inf")  # no recipe takes more counted steps than fit in here, except one
    validate: bool = False  # compute the validation loss after the last step

    def steps_of(
        self,
        step_s: float,  # about what a step of the recipe takes
    ) -> int:
        """How many steps are counted."""
        return self.steps if step_s <= 0 else round(min(self.steps, max(1.0, self.budget_s / step_s)))

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Launch:
        """What to_json wrote."""
        fields = json.loads(text)
        return cls(**fields | {"recipes": tuple(fields["recipes"]), "model": Model(**fields["model"])})


@dataclass
class Measured:
    """What one launch found out about one recipe."""

    name: str
    meaning: str
    step_s: list[float]  # of each counted step, the slowest rank's
    losses: list[float]  # of every step, warm-up too: the mean over ranks
    inter_node_bytes_per_step: float  # out of the node that sends most, by its interface's counter; the mean
    tokens_per_step: int  # over all ranks
    resent_segments_per_step: float = 0.0  # TCP segments that one node sent again, at most
    stats_bytes_per_step: float | None = None  # the same by zcomm's stats(); None: torch's own collectives
    codec_s_per_step: float | None = None  # by stats(), mean over ranks
    wait_s_per_step: float | None = None  # by stats(), mean over ranks
    val_loss: float | None = None


@dataclass(frozen=True)
class Event:
    """Something rank 0 says: "planned" (steps), "step" (recipe) or "measured" (the fields of a Measured)."""

    kind: str
    fields: dict[str, Any]

    _MARK = "@demo "  # what else a rank writes does not begin so

    def line(self) -> str:
        """As a line of output."""
        return self._MARK + json.dumps({"kind": self.kind, "fields": self.fields})

    @classmethod
    def parse(cls, line: str) -> Event | None:
        """Read a line; None if it is not an event."""
        return cls(**json.loads(line.removeprefix(cls._MARK))) if line.startswith(cls._MARK) else None


@dataclass(frozen=True)
class Shape:
    """The cluster the demo ran on."""

    nodes: int
    ranks_per_node: int
    shaping: str  # how links were limited: "tbf", "none", or "paced in user space"
