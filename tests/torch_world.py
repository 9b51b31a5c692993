"""Processes that form a gloo world and run functions for tests: started once, as importing torch takes seconds.

Ranks say they sit two on a node, so that two hops are what is detected.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

from world import World, serve


class TorchWorld(World):
    """A world of gloo ranks."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            self._processes.append(process)
        port = pipes[0].recv()  # rank 0 holds the store, on whatever port is free
        for pipe in pipes[1:]:
            pipe.send(port)
        super().__init__(pipes)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
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
    serve(pipe)
    dist.destroy_process_group()
