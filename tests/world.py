"""What the worlds of processes share: functions go to every rank through pipes, what they return comes back.

    world.run(check, 3)    # calls check(3) in every process; a list of what they return, by rank

A function must be importable by name. torch_world.py and mpi_world.py start the processes.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

REPLY_TIMEOUT_S = 300.0  # ends a hang; never the pace of a slow machine


class World:
    """Ranks at the other ends of pipes."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.size = len(pipes)
        self._pipes = pipes  # by rank
        self._hung = False

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call function(*args) on every rank; results by rank. Fails with every failing rank's traceback."""
        assert not self._hung, "an earlier test hung on these ranks"
        give_up_at = time.monotonic() + REPLY_TIMEOUT_S
        for pipe in self._pipes:
            pipe.send((function, args))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, give_up_at - time.monotonic())):
                self._hung = True
                failures.append(f"rank {rank}: no answer within {REPLY_TIMEOUT_S} s")
                continue
            good, value = pipe.recv()
            results.append(value)
            if not good:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise AssertionError("\n".join(failures))
        return results


def serve(pipe: Connection) -> None:
    """Do what World.run asks of this rank, until its end of the pipe is closed."""
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
