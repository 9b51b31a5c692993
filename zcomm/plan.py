"""How collectives are done: which codec at which level, flat or in two hops, in which chunks. A value; no state."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass

from zcomm.errors import PlanError
from zcomm.keywords import known_keywords
from zcomm.wire.codec import Codec
from zcomm.wire.registry import codec as parse_codec

MEBI = 1 << 20
LEAST_TIMEOUT_S = 0.001  # transports count in milliseconds
MOST_TIMEOUT_S = 1e7
AUTO_RAW_BYTES = 1 << 16  # what auto sends raw: so little that coding it may take longer than it saves


class Check(enum.Enum):
    """Which calls ranks compare before they are done. A Plan also takes the spelling, and prints it."""

    FIRST = "first"  # the first call of each kind
    ALWAYS = "always"
    NEVER = "never"

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return self.value


@known_keywords
@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a communicator; all ranks must give equal ones. Codecs may be given by their spelling."""

    codec: Codec | str = "int8"  # between nodes, and wherever nothing else is said
    intra_codec: Codec | str | None = None  # of a two-hop reduction's first hop, inside a node; None: as codec
    hierarchical: bool = True  # two hops wherever the topology has two levels; False: always one
    min_elems: int = 0  # smaller tensors travel raw, counted in stats() under its reason
    auto: bool = False  # calls travel raw where their codec cannot pay (collectives/choice.py), counted like that
    one_shot_bytes: int = 1 << 15  # calls that send little take fewer steps (choice.way_of in collectives)
    chunk_elems: int = 1 << 21  # source elements per pipeline step; the results are the same for any value
    seed: int = 0  # of the random bits of codecs that round by chance; 0 to 2^32 - 1
    check: Check | str = Check.FIRST  # compare calls between ranks before they are done: "first", "always", "never"
    timeout_s: float | None = None  # None: as long as the transport's own timeout
    scratch_bytes: int = 256 * MEBI  # scratch kept and in use: calls in flight beyond it wait; one may need more

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", parse_codec(self.codec))
        if self.intra_codec is not None:
            object.__setattr__(self, "intra_codec", parse_codec(self.intra_codec))
        for name in ("hierarchical", "auto"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be True or False, got {getattr(self, name)!r}")
        try:
            object.__setattr__(self, "check", Check(self.check))
        except ValueError:
            known = ", ".join(check.value for check in Check)
            raise PlanError(f"check must be one of {known}, got {self.check!r}") from None
        for name, least in (("min_elems", 0), ("one_shot_bytes", 0), ("chunk_elems", 1), ("scratch_bytes", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PlanError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**32:
            raise PlanError(f"seed must be a whole number from 0 to 2^32 - 1, got {self.seed!r}")
        if self.timeout_s is not None:
            is_number = isinstance(self.timeout_s, numbers.Real) and not isinstance(self.timeout_s, bool)
            if not is_number or not LEAST_TIMEOUT_S <= self.timeout_s <= MOST_TIMEOUT_S:
                raise PlanError(
                    f"timeout_s must be {LEAST_TIMEOUT_S} to {MOST_TIMEOUT_S:.0f} seconds or None, "
                    f"got {self.timeout_s!r}"
                )
            object.__setattr__(self, "timeout_s", float(self.timeout_s))


def plan_of(setting: Plan | Codec | str) -> Plan:
    """A Plan as it is; a codec or its spelling as the Plan with that codec."""
    return setting if isinstance(setting, Plan) else Plan(codec=setting)
