"""One call of a collective, as all ranks make it: what is asked for, and how it is to be done."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from zcomm.buffers import Span
from zcomm.collectives.feedback import Residual
from zcomm.reduce_op import ReduceOp
from zcomm.wire.codec import Codec


class Pattern(enum.Enum):
    """How elements go between ranks. Several collectives may share one: a broadcast gathers the shard of one rank."""

    ALL_GATHER = enum.auto()
    REDUCE_SCATTER = enum.auto()
    ALL_REDUCE = enum.auto()
    ALL_TO_ALL = enum.auto()
    DIRECT = enum.auto()  # all-to-all with one rank at one end, which two hops would not make shorter


class Request(NamedTuple):
    """A call of a collective."""

    name: str  # how people call it; its stats are kept under this name
    pattern: Pattern  # the same for all calls of this name
    source: Span
    target: Span
    deliver: Callable[[], None] | None  # from target to the caller's arrays, where they are not the same memory
    codec: Codec
    intra_codec: Codec
    counts: tuple[int, ...]  # elements of each rank's shard; all_reduce: of the whole array; else sent to each rank
    counts_in: tuple[int, ...] = ()  # ALL_TO_ALL, DIRECT: elements that come from each rank
    operator: ReduceOp | None = None
    feedback: Residual | None = None
    root: int | None = None  # reduce, DIRECT: the rank at one end

    @property
    def counts_differ(self) -> bool:
        """Whether counts are this rank's own; otherwise they are the same on all ranks."""
        return self.pattern in (Pattern.ALL_TO_ALL, Pattern.DIRECT)

    @property
    def shared(self) -> tuple[int, ...]:
        """Numbers that this call has on every rank: they belong to what ranks compare."""
        if self.counts_differ:
            return () if self.root is None else (self.root,)
        return self.counts
