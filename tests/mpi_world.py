"""MPI ranks that run functions for tests: one mpiexec, started once, as each start takes a second.

Ranks say they sit two on a node, so that two hops are what is detected.
Run as a program, this file is one of the ranks.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing.connection import Client, Listener
from pathlib import Path

from world import World, serve

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 300.0  # ends a hang; never the pace of a slow machine
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


class MpiWorld(World):
    """Ranks under one mpiexec."""

    def __init__(self, size: int) -> None:
        with Listener() as listener:
            self._process = subprocess.Popen(
                launch(size, sys.executable, __file__, str(listener.address)),
                env=environment(),
                stdin=subprocess.DEVNULL,
            )
            listener._listener._socket.settimeout(START_TIMEOUT_S)
            pipes = [listener.accept() for _ in range(size)]
        by_rank = {pipe.recv(): pipe for pipe in pipes}
        super().__init__([by_rank[rank] for rank in range(size)])

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
        serve(pipe)


if __name__ == "__main__":
    _serve(sys.argv[1])
