"""What `zcomm cluster` asks of the supervisor inside the cluster: a record that crosses the channel as JSON."""

from __future__ import annotations

from dataclasses import dataclass

GRACE_S = 5.0  # between the polite signal and SIGKILL


@dataclass(frozen=True)
class Task:
    """What to build and run."""

    command: list[str]
    environment: dict[str, str]  # the user's own; the ranks' variables are added to it
    n_nodes: int
    ranks_per_node: int
    bits_s: int | None
    latency_s: float
    emulated: bool  # False: loopback, paced in user space
    own_pids: bool  # the supervisor is process 1 of a PID namespace and has /proc and mounts of its own
    timeout_s: float | None
    mpiexec: tuple[str, str] | None = None  # path and kind (cluster_mpi.Launcher): it starts the ranks
    grace_s: float = GRACE_S
