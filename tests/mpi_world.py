"""MPI ranks that run functions for tests: one mpiexec, started once, as each start takes a second.

    world.run(check, 3)    # calls check(3) on every rank; a list of what they return, by rank

A function must be importable by name. Ranks say they sit two on a node, so that two hops are what is detected.
Run as a program, this file is one of the ranks.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REPLY_TIMEOUT_S = 300.0  # ends a hang; never the pace of a slow machine
START_TIMEOUT_S = 300.0
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpiexec() -> str | None:
    """The launcher beside this interpreter, else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def why_not() -> str | None:
    """What is missing to run MPI tests here."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if mpiexec() is None:
        return "there is no mpiexec"
    return None


def launch(n_ranks: int, *words: str) -> list[str]:
    """The command that starts words on n_ranks ranks."""
    launcher = mpiexec()
    assert launcher is not None
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    return [launcher, *(["--oversubscribe"] if "Open MPI" in said else []), "-n", str(n_ranks), *words]


def environment(**more: str) -> dict[str, str]:
    """This process's variables, with the package and the tests on the path."""
    path = [str(ROOT), *(str(path) for path in sys.path if path)]
    return os.environ | AS_ROOT | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"} | more


class MpiWorld:
    """Ranks under one mpiexec."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._hung = False
        with Listener() as listener:
            self._process = subprocess.Popen(
                launch(size, sys.executable, __file__, str(listener.address)),
                env=environment(),
                stdin=subprocess.DEVNULL,
            )
            listener._listener._socket.settimeout(START_TIMEOUT_S)
            pipes = [listener.accept() for _ in range(size)]
        by_rank = {pipe.recv(): pipe for pipe in pipes}
        self._pipes: list[Connection] = [by_rank[rank] for rank in range(size)]

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
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(10)


def _serve(address: str) -> None:
    faulthandler.enable()
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    os.environ.update(GROUP_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2))
    with Client(address) as pipe:
        pipe.send(rank)
        while True:
            try:
                function, args = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((True, function(*args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    _serve(sys.argv[1])
