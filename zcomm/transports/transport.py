"""The protocol of a transport: how bytes travel between the ranks of one group.

A transport moves bytes between pairs of ranks and knows nothing of what they mean. Everything else, hops, order of
sums, hierarchy, is made of `Exchange`s by collectives/. To add one: implement these two classes (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from zcomm.transports.tags import TagRanges


class Parcel(NamedTuple):
    """Bytes for, or from, one peer."""

    peer: int  # rank in the transport's group
    payload: Any  # a slice of what `Transport.empty` returned
    mark: int = 0  # sender and receiver know it; as far as tags allow, a message is never taken for one of another mark


class Exchange(Protocol):
    """One step of communication: some parcels out, some in. Opened, started and waited for once each, then closed.

    Over a GPU's memory all three are points in the order of the caller's current stream: what was queued before start
    is sent; what is queued after wait finds the parcels filled; what is queued after close may overwrite them.
    """

    def start(self) -> None:
        """Send: the outgoing parcels hold their bytes now."""
        ...

    def wait(self) -> None:
        """Return when every incoming parcel is filled. Raises TransportError, or PeerTimeout, naming the peer."""
        ...

    def close(self) -> None:
        """Return when the outgoing parcels may be overwritten."""
        ...


@runtime_checkable
class Transport(Protocol):
    """The ranks of one group and the bytes between them."""

    name: str
    rank: int
    size: int
    device: str  # where parcels live: "cpu", "cuda:0"
    group_name: str  # for errors
    wire_bytes_sent: int  # payload bytes handed over so far, to check stats() against
    tags: TagRanges  # of the group, shared by all transports over it
    why_synchronous: str | None  # why calls cannot go on in a thread of their own; None: they can
    queued: bool  # whether exchanges only queue work on the current stream; then all ranks must start them in one order

    @property
    def group(self) -> Any:
        """What a call keeps until it is done, None where nobody can destroy it. Raises GroupError once
        destroyed, TransportError where nothing would be sent."""
        ...

    @property
    def host(self) -> Transport:
        """A transport of the same ranks that moves bytes between hosts; this one where there is no other."""
        ...

    def empty(self, nbytes: int) -> Any:
        """Memory for parcels, uint8, sliceable as memory[start:stop]."""
        ...

    def address(self, memory: Any) -> int:
        """Where memory starts."""
        ...

    def write(
        self,
        memory: Any,  # a slice of what empty() returned
        data: bytes,  # as many
    ) -> None:
        """Put bytes of the host there."""
        ...

    def read(
        self,
        memory: Any,
        timeout_s: float | None,
    ) -> bytes:
        """The bytes that are there when all is done that was queued before. Raises PeerTimeout if that never comes."""
        ...

    def open(
        self,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        tag: int,  # of this step: equal on all ranks that take part, unlike that of any other step under way
        timeout_s: float | None,  # None: the transport's own
    ) -> Exchange:
        """Prepare an exchange. May post the receives at once, so that later sends never wait for them."""
        ...

    def close(self) -> None:
        """Free what the transport made itself; the user's group or communicator stays as it is."""
        ...
