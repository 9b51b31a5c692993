"""Who started `zcomm perf`, found in the environment, and the ranks it runs on as the launcher's library gives them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from zcomm.errors import GroupError
from zcomm.tools.perf_options import PerfError
from zcomm.transports import mpi_launcher

HOW_TO_START = (
    "zcomm perf measures between ranks, and no launcher started this process; use one of: "
    "zcomm cluster --nodes 2 --ranks-per-node 2 --link 1gbit -- zcomm perf all_reduce, "
    "torchrun --nproc-per-node 4 --no-python zcomm perf all_reduce, "
    "mpiexec -n 4 zcomm perf all_reduce"
)
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


class Launcher(NamedTuple):
    """What started this process."""

    name: str
    is_mpi: bool
    rank: int  # by the environment, before anything is joined


class World(Protocol):
    """The ranks, and the library whose own collectives are the uncompressed peers."""

    library: str  # how its forms are called: "gloo", "nccl", "mpi"
    versions: str  # of what is measured
    own_dtypes: tuple[str, ...]  # that the library's own collectives carry: "float32", "bfloat16"
    rank: int
    size: int
    group: Any  # what a Communicator is made over

    def array(
        self,
        values: np.ndarray,  # float32
        dtype: str,
    ) -> Any:
        """values in memory of their own where the library takes them."""
        ...

    def numpy(self, array: Any) -> np.ndarray:
        """float32 values of an array."""
        ...

    def own(
        self,
        collective: str,
        output: Any,  # of an all-reduce: the input too
        input: Any,
    ) -> None:
        """The library's own collective."""
        ...

    def synchronize(self) -> None:
        """Return when the device has finished."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have come."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Who started this process. Raises PerfError, saying how to start it, if nobody did.

    torchrun's own mark comes first: it may itself have been started by an MPI or Slurm launcher. RANK alone comes last:
    an emulated cluster sets it for MPI programs too.
    """
    inside = ", on an emulated cluster" if "ZCOMM_CLUSTER" in environment else ""
    rank = environment.get("RANK", "")
    if "TORCHELASTIC_RUN_ID" in environment:
        return Launcher(f"torchrun{inside}", False, torch_rank(environment))
    found = mpi_launcher.launcher(environment)
    if found is not None and (found[1] > 1 or not rank):
        return Launcher(f"{found[0]}{inside}", True, mpi_rank(environment, found[0]))
    if rank and environment.get("WORLD_SIZE"):
        name = "zcomm cluster" if inside else "a launcher that sets RANK and WORLD_SIZE"
        return Launcher(name, False, torch_rank(environment))
    raise PerfError(HOW_TO_START)


def torch_rank(environment: Mapping[str, str]) -> int:
    """By the variables that torch reads. Raises PerfError where it would wait for ranks that cannot exist."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise PerfError(f"RANK={rank} and WORLD_SIZE={size} do not fit: expected a rank from 0 to below the size")
    return int(rank)


def mpi_rank(environment: Mapping[str, str], launcher: str) -> int:
    """By the first of the variables that launchers of MPI set. Raises PerfError where none has it."""
    ranks = (environment.get(name, "") for name in RANK_VARIABLES)
    try:
        return next(int(rank) for rank in ranks if rank.isdecimal())
    except StopIteration:
        expected = " or ".join(RANK_VARIABLES)
        raise PerfError(f"{launcher} said no rank; expected a number in {expected}") from None


def join(launcher: Launcher, device: str) -> World:
    """Join the other ranks. Raises MissingExtra without the library, GroupError where there is nobody to join."""
    world: World
    if launcher.is_mpi:
        if device != "cpu":
            raise PerfError(f"--device {device} is measured over torch and NCCL; start it by torchrun")
        from zcomm.tools.perf_mpi import MpiWorld

        world = MpiWorld()
    else:
        from zcomm.tools.perf_torch import TorchWorld

        world = TorchWorld(device)
    if world.size < 2:
        world.close()
        raise GroupError(f"{launcher.name} started one rank, which sends nothing; start two or more")
    return world
