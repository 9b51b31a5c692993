"""What collectives have sent and how long it took: `Communicator.stats()`.

Bytes are counted when a call starts and are exact: payload as handed to the transport, without TCP headers.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CollectiveStats:
    """Sums over the calls of one collective on this rank."""

    calls: int = 0
    raw_bytes: int = 0  # what the same messages would have held uncompressed
    wire_bytes_intra: int = 0  # sent to ranks of the own node
    wire_bytes_inter: int = 0  # sent to other nodes
    codec_s: float = 0.0  # encoding, decoding and adding
    wait_s: float = 0.0  # waiting for peers and wires
    uncompressed: dict[str, int] = field(default_factory=dict)  # reason -> calls that sent raw bytes because of it

    @property
    def wire_bytes(self) -> int:
        """Bytes sent in all."""
        return self.wire_bytes_intra + self.wire_bytes_inter

    @property
    def compression_ratio(self) -> float:
        """Raw bytes / wire bytes, scales and padding included; 1.0 where nothing was sent."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def __add__(self, other: CollectiveStats) -> CollectiveStats:
        reasons = dict(self.uncompressed)
        for reason, calls in other.uncompressed.items():
            reasons[reason] = reasons.get(reason, 0) + calls
        return CollectiveStats(
            self.calls + other.calls,
            self.raw_bytes + other.raw_bytes,
            self.wire_bytes_intra + other.wire_bytes_intra,
            self.wire_bytes_inter + other.wire_bytes_inter,
            self.codec_s + other.codec_s,
            self.wait_s + other.wait_s,
            reasons,
        )


Stats = dict[str, CollectiveStats]  # by the collective's name


def total(stats: Stats) -> CollectiveStats:
    """All collectives together."""
    return sum(stats.values(), CollectiveStats())
