"""Timeouts that a test wants to run out, short only where nothing is awaited that will come.

On a busy machine any rank may be late by seconds. So communicators are made, and good calls done, with as much time
as they need; then the one call that waits in vain gets a short timeout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

AMPLE_S = 200.0  # for what must come; a test that waits this long has found a hang


def shorten(comm: Any, timeout_s: float) -> None:
    """Give the further calls of a Communicator, or of a zcomm.mpi.Comm, another timeout on this rank."""
    conductor = getattr(comm, "communicator", comm)._conductor
    conductor.plan = replace(conductor.plan, timeout_s=timeout_s)


@contextmanager
def waiting_in_vain(
    comm: Any,  # a Communicator, or a zcomm.mpi.Comm
    silent: Collection[int],  # ranks that will not come
    timeout_s: float,
) -> Iterator[None]:
    """Inside, this rank's calls have another timeout for what comes from the silent ranks. What comes from others may
    take as long as it does: however late one is, it is not taken for the silent one."""
    transport = getattr(comm, "communicator", comm)._transport
    opened = transport.open

    def patient(outgoing: Any, incoming: Any, tag: int, timeout_of_plan_s: float | None) -> _InParts:
        parts = []
        for is_vain, longest_s in ((False, AMPLE_S), (True, timeout_s)):
            parcels = [[each for each in way if (each[0] in silent) is is_vain] for way in (outgoing, incoming)]
            parts.append(opened(*parcels, tag, longest_s))
        return _InParts(parts)

    transport.open = patient
    try:
        yield
    finally:
        del transport.open


class _InParts:
    """An exchange in several parts, each with a timeout of its own."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def start(self) -> None:
        for part in self._parts:
            part.start()

    def wait(self) -> None:
        for part in self._parts:
            part.wait()

    def close(self) -> None:
        for part in self._parts:
            part.close()
