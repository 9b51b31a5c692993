"""Processes that form a gloo world and run functions for tests: started once, as importing torch takes seconds.

    world.run(check, 3)    # calls check(3) in every process; a list of what they return, by rank

A function must be importable by name. Ranks say they sit two on a node, so that two hops are what is detected.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

REPLY_TIMEOUT_S = 300.0  # ends a hang; never the pace of a slow machine


class TorchWorld:
    """A world of gloo ranks."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._hung = False
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        port = self._pipes[0].recv()  # rank 0 holds the store, on whatever port is free
        for pipe in self._pipes[1:]:
            pipe.send(port)

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

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, rank: int, size: int, path: list[str]) -> None:
    sys.path[:] = path
    faulthandler.enable()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank % 2),
        GROUP_RANK=str(rank // 2),
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    port = 0 if rank == 0 else pipe.recv()
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
