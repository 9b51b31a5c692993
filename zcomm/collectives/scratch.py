"""Scratch memory of a communicator: a few slabs, reused from call to call, bounded, freed with it.

A slab belongs to one call at a time. There are never more slabs than calls that were in flight at once, so memory does
not grow with the number of calls nor with the variety of their sizes. Nor with the calls in flight: those for which
there is no room begin when others have ended (conductor.py).
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from zcomm.transports.transport import Transport

_KEPT_VIEWS = 64  # schedules whose parcels a slab remembers


class Slab:
    """Memory for one call, and the slices of it that earlier calls of the same shape used."""

    __slots__ = ("__weakref__", "_views", "address", "memory", "nbytes")

    def __init__(self, transport: Transport, nbytes: int) -> None:
        self.memory = transport.empty(nbytes)
        self.address = transport.address(self.memory)
        self.nbytes = nbytes
        self._views: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()

    def views(
        self,
        key: Hashable,
        slice_memory: Callable[[Any], Any],  # memory -> slices of it
    ) -> Any:
        """The slices remembered under key, or new ones."""
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = slice_memory(self.memory)
            if len(self._views) > _KEPT_VIEWS:
                self._views.popitem(last=False)
        return views


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
        self._used: weakref.WeakSet[Slab] = weakref.WeakSet()  # those of failed calls are never given back
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes of slabs that wait to be used again."""
        return sum(slab.nbytes for slab in self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of slabs that calls have."""
        return sum(slab.nbytes for slab in self._used)

    def has_room(self, nbytes: int) -> bool:
        """Whether a slab of nbytes may be taken beside those in use; always, if none is."""
        with self._lock:
            return not self._used or self.used_bytes + nbytes <= self._cap_bytes

    def take(self, nbytes: int) -> Slab:
        """A slab of at least nbytes: the smallest free one that fits, else a new one in place of the largest."""
        with self._lock:
            fitting = [slab for slab in self._free if slab.nbytes >= nbytes]
            if fitting:
                chosen = min(fitting, key=lambda slab: slab.nbytes)
                self._free.remove(chosen)
                self._used.add(chosen)
                return chosen
            if self._free:
                self._free.remove(max(self._free, key=lambda slab: slab.nbytes))
        slab = Slab(self._transport, nbytes)
        with self._lock:
            self._used.add(slab)
            self._shrink()
        return slab

    def give_back(self, slab: Slab) -> None:
        """Return a slab that nothing reads or writes any more."""
        with self._lock:
            self._used.discard(slab)
            self._free.append(slab)
            self._shrink()

    def _shrink(self) -> None:
        """Free the longest unused slabs above the cap."""
        while self._free and self.free_bytes + self.used_bytes > self._cap_bytes:
            self._free.pop(0)

    def clear(self) -> None:
        """Free every slab that is not in use."""
        with self._lock:
            self._free.clear()
