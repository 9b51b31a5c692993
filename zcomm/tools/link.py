"""Rates and latencies of a link, as people write them: "200mbit", "1.5gbit", "none"; "1ms", "250us".

tc's words and meanings: kbit = 1000 bit/s, mbit = 1000 kbit/s, gbit = 1000 mbit/s. A number without a unit is
refused, because 200 reads as bits to one person and as megabits to another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zcomm.errors import ClusterError

_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # bits per second
_LATENCY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # seconds
_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*([a-z/]*)\s*", re.IGNORECASE)

SLOWEST_BITS_S = 8_000  # tbf keeps its burst as a time in 32 bits; below this the smallest burst overflows it
FASTEST_BITS_S = 32 * 10**9  # tbf's rate is 32 bits of bytes per second
LONGEST_LATENCY_S = 10.0


@dataclass(frozen=True)
class Link:
    """One direction of a node's link: its rate, or no limit."""

    bits_s: int | None  # bits per second; None: not limited

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read "200mbit" or "none".

        Raises ClusterError if the unit is missing or unknown, or the rate is not one a link can have.
        """
        if text.strip().lower() == "none":
            return cls(None)
        number, unit = _split(text, "link", "200mbit, 1gbit or none")
        if number <= 0:
            raise ClusterError(f"link {text!r} carries nothing; expected a rate like 200mbit, or none for no limit")
        if not unit:
            raise ClusterError(
                f"link {text!r} has no unit; write {text.strip()}mbit, or another of {_names(_RATE_UNITS)}"
            )
        if unit not in _RATE_UNITS:
            raise ClusterError(f"link {text!r} has the unknown unit {unit!r}; expected one of {_names(_RATE_UNITS)}")
        bits_s = round(number * _RATE_UNITS[unit])
        if not SLOWEST_BITS_S <= bits_s <= FASTEST_BITS_S:
            raise ClusterError(
                f"link {text!r} is {bits_s} bit/s; expected {Link(SLOWEST_BITS_S)} to "
                f"{Link(FASTEST_BITS_S)}, or none for a link that is not limited"
            )
        return cls(bits_s)

    @property
    def bytes_s(self) -> float:
        """Bytes per second; infinite if not limited."""
        return float("inf") if self.bits_s is None else self.bits_s / 8

    def __str__(self) -> str:
        """The spelling parse reads back, in the largest unit that leaves a number of at least 1."""
        if self.bits_s is None:
            return "none"
        unit = max(
            (u for u in _RATE_UNITS if _RATE_UNITS[u] <= self.bits_s),
            key=_RATE_UNITS.__getitem__,
            default="bit",
        )
        return f"{self.bits_s / _RATE_UNITS[unit]:.12g}{unit}"


NO_LIMIT = Link(None)


def read_rate(text: str) -> float:
    """Bytes per second of a link that is only reckoned with, so as fast as one likes; infinite for none.

    Raises ClusterError if the unit is missing or unknown.
    """
    if text.strip().lower() == "none":
        return float("inf")
    number, unit = _split(text, "link", "100gbit, 400gbit or none")
    if unit not in _RATE_UNITS:
        raise ClusterError(f"link {text!r} needs a unit, one of {_names(_RATE_UNITS)}")
    if number <= 0:
        raise ClusterError(f"link {text!r} carries nothing; expected a rate like 100gbit, or none for no limit")
    return number * _RATE_UNITS[unit] / 8


def parse_latency(
    text: str,  # "1ms", "250us", "0"
) -> float:
    """Read a one-way latency in seconds. Only 0 may come without a unit."""
    number, unit = _split(text, "latency", "1ms or 250us")
    if number == 0 and not unit:
        return 0.0
    if not unit:
        raise ClusterError(
            f"latency {text!r} has no unit; write {text.strip()}ms, or another of {_names(_LATENCY_UNITS)}"
        )
    if unit not in _LATENCY_UNITS:
        raise ClusterError(f"latency {text!r} has the unknown unit {unit!r}; expected one of {_names(_LATENCY_UNITS)}")
    latency_s = number * _LATENCY_UNITS[unit]
    if not 0 <= latency_s <= LONGEST_LATENCY_S:
        raise ClusterError(f"latency {text!r} is {latency_s:g} s; expected 0 to {LONGEST_LATENCY_S:g} s")
    return latency_s


def format_latency(latency_s: float) -> str:
    """The spelling parse_latency reads back."""
    if latency_s == 0:
        return "0"
    unit = max(
        (u for u in _LATENCY_UNITS if _LATENCY_UNITS[u] <= latency_s),
        key=_LATENCY_UNITS.__getitem__,
        default="us",
    )
    return f"{latency_s / _LATENCY_UNITS[unit]:.12g}{unit}"


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    found = _NUMBER_AND_UNIT.fullmatch(text)
    if found is None:
        raise ClusterError(f"{what} {text!r} is not a number with a unit; expected something like {example}")
    return float(found[1]), found[2].lower()


def _names(units: dict[str, int] | dict[str, float]) -> str:
    return ", ".join(units)
