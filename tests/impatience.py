"""Timeouts that a test wants to run out, short only where nothing is awaited that will come.

On a busy machine any rank may be late by seconds. So communicators are made, and good calls done, with as much time
as they need; then the one call that waits in vain gets a short timeout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

AMPLE_S = 200.0  # for what must come; a test that waits this long has found a hang


def shorten(comm: Any, timeout_s: float) -> None:
    """Give the further calls of a Communicator, or of a zcomm.mpi.Comm, another timeout on this rank."""
    conductor = getattr(comm, "communicator", comm)._conductor
    conductor.plan = replace(conductor.plan, timeout_s=timeout_s)
