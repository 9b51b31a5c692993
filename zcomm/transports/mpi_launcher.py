"""MPI programs whose launcher is not their library's: each process believes to be alone. Found by what launchers leave
in the environment, and explained. Needs no MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

from zcomm.errors import GroupError

# variable with the number of processes started -> who sets it
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "a PMI launcher (MPICH's or Intel MPI's mpiexec, srun --mpi=pmi2)",
    "SLURM_STEP_NUM_TASKS": "Slurm's srun",
}


def launcher(environment: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Who started this process, and how many there are at least; None where no launcher of MPI did."""
    for variable, name in LAUNCHERS.items():
        count = environment.get(variable, "")
        if count.isdecimal():
            return f"{name} ({variable}={count})", int(count)
    rank = environment.get("PMIX_RANK", "")
    if rank.isdecimal():  # PMIx tells the rank only
        return f"a PMIx launcher (PMIX_RANK={rank})", int(rank) + 1
    return None


def check_launcher(
    world_size: int,  # of MPI.COMM_WORLD
    library: str,  # "MPICH 5.0.2"
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise GroupError if this process is alone although a launcher started several."""
    found = launcher(environment)
    if world_size == 1 and found is not None and found[1] > 1:
        raise GroupError(
            f"MPI.COMM_WORLD has 1 rank, but {found[0]} started several processes: that launcher does not fit the "
            f"library, {library}. Start with the mpiexec that came with the library (zcomm info --probe names both)"
        )
