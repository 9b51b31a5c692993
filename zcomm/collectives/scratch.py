"""Scratch memory of a communicator: a few slabs, reused from call to call, bounded, freed with it.

A slab belongs to one call at a time. There are never more slabs than calls that were in flight at once, so memory does
not grow with the number of calls nor with the variety of their sizes. Nor with the calls in flight: those for which
there is no room begin when others have ended (conductor.py).
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any

from zcomm.collectives.schedule import Schedule
from zcomm.transports.transport import Transport

_KEPT_VIEWS = 64  # schedules whose parcels a slab remembers


class Slab:
    """Memory for one call, and the slices of it that earlier calls of the same shape used."""

    __slots__ = ("__weakref__", "_views", "address", "memory", "nbytes", "when_lost")
    when_lost: weakref.finalize[[int], Slab]

    def __init__(self, transport: Transport, nbytes: int) -> None:
        self.memory = transport.empty(nbytes)
        self.address = transport.address(self.memory)
        self.nbytes = nbytes
        self._views: collections.OrderedDict[int, tuple[Any, Schedule]] = collections.OrderedDict()

    def views(
        self,
        schedule: Schedule,
        slice_memory: Callable[[Schedule, Any], Any],  # (schedule, memory) -> slices of it
    ) -> Any:
        """The slices that were made for this schedule, or new ones."""
        kept = self._views.get(id(schedule))
        if kept is None:
            kept = self._views[id(schedule)] = (slice_memory(schedule, self.memory), schedule)  # whose id stays its own
            if len(self._views) > _KEPT_VIEWS:
                self._views.popitem(last=False)
        return kept[0]


class ScratchPool:
    """Hands out slabs. Safe to use from several threads."""

    def __init__(
        self,
        transport: Transport,
        cap_bytes: int,  # of all slabs, unless a single call needs more
    ) -> None:
        self._transport = transport
        self._cap_bytes = cap_bytes
        self._free: list[Slab] = []  # longest unused first
        self._total_bytes = 0  # of all slabs, free or used
        self._lost: collections.deque[int] = collections.deque()  # bytes of slabs never given back, to be taken off
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes of slabs that wait to be used again."""
        return sum(slab.nbytes for slab in self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of slabs that calls have. A failed call's is never given back: it counts as long as it is there."""
        with self._lock:
            return self._total() - self.free_bytes

    def has_room(self, nbytes: int) -> bool:
        """Whether a slab of nbytes may be taken beside those in use; always, if none is."""
        with self._lock:
            if self._total() + nbytes <= self._cap_bytes:
                return True
            used_bytes = self._total() - self.free_bytes
            return not used_bytes or used_bytes + nbytes <= self._cap_bytes

    def take(self, nbytes: int) -> Slab:
        """A slab of at least nbytes: the smallest free one that fits, else a new one in place of the largest."""
        with self._lock:
            chosen: Slab | None = None
            for slab in self._free:
                if slab.nbytes >= nbytes and (chosen is None or slab.nbytes < chosen.nbytes):
                    chosen = slab
            if chosen is not None:
                self._free.remove(chosen)
                return chosen
            if self._free:
                self._drop(max(self._free, key=_size))
        slab = Slab(self._transport, nbytes)
        slab.when_lost = weakref.finalize(slab, self._lost.append, slab.nbytes)
        slab.when_lost.atexit = False
        with self._lock:
            self._total_bytes += slab.nbytes
            self._shrink()
        return slab

    def give_back(self, slab: Slab) -> None:
        """Return a slab that nothing reads or writes any more."""
        with self._lock:
            self._free.append(slab)
            self._shrink()

    def clear(self) -> None:
        """Free every slab that is not in use."""
        with self._lock:
            while self._free:
                self._drop(self._free[0])

    def _shrink(self) -> None:
        """Free the longest unused slabs above the cap."""
        while self._free and self._total() > self._cap_bytes:
            self._drop(self._free[0])

    def _drop(self, slab: Slab) -> None:
        """Free a slab that is not in use."""
        self._free.remove(slab)
        slab.when_lost.detach()
        self._total_bytes -= slab.nbytes

    def _total(self) -> int:
        """Bytes of all slabs."""
        while self._lost:
            self._total_bytes -= self._lost.popleft()
        return self._total_bytes


def _size(slab: Slab) -> int:
    return slab.nbytes
