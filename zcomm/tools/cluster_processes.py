"""The processes of a cluster: how one is started in its node, with which variables; all that descend from one."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from collections.abc import Callable

from zcomm.tools import cluster_kernel, cluster_network
from zcomm.tools.cluster_task import Task
from zcomm.transports import pace

_MASTER_PORT = 29500  # free for certain where the node is new
_LOW_PORTS = range(20_000, 30_000)  # which Linux hands to nobody by itself


def master_port(task: Task) -> int:
    """Where rank 0 may listen: on loopback one that nobody else is likely to take."""
    if task.emulated:
        return _MASTER_PORT
    for port in random.sample(_LOW_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    return _MASTER_PORT


def rank_environment(
    task: Task,
    node: int,
    local_rank: int,
    port: int,  # master_port(task)
    pace_file: str,  # path of the file that ranks share where links are paced in user space
) -> dict[str, str]:
    """The user's variables, torchrun's and ours."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | task.environment
    for name in (pace.RATE_VARIABLE, pace.FILE_VARIABLE):
        environment.pop(name, None)  # of a cluster this one was started in
    environment |= {
        "RANK": str(node * task.ranks_per_node + local_rank),
        "WORLD_SIZE": str(task.n_nodes * task.ranks_per_node),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(task.ranks_per_node),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "GROUP_WORLD_SIZE": str(task.n_nodes),
        "MASTER_ADDR": cluster_network.address_of(0) if task.emulated else "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": cluster_network.INTERFACE if task.emulated else "lo",
        "ZCOMM_CLUSTER": "1",
    }
    if not task.emulated:
        environment[pace.RATE_VARIABLE] = str(task.bits_s or "none")
        environment[pace.FILE_VARIABLE] = pace_file
    return environment


def start_in_node(
    command: list[str],
    environment: dict[str, str],
    node: cluster_network.Node | None,  # None: on this machine as it is
) -> subprocess.Popen[bytes]:
    """Start a process in a node, leader of a session, its output in pipes. Call while single-threaded.

    Raises OSError or subprocess.SubprocessError if the system refuses.
    """
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_entrance(node),  # safe: this process has one thread
    )


def _entrance(node: cluster_network.Node | None) -> Callable[[], None]:
    """What a rank's process does between fork and exec: die with its parent, join its node."""
    parent = os.getpid()

    def enter() -> None:
        cluster_kernel.die_with_parent(parent)
        if node is not None:
            _enter(node.keeper_pid, "net", cluster_kernel.CLONE_NEWNET)
            if node.host_name is not None:
                _enter(node.keeper_pid, "uts", cluster_kernel.CLONE_NEWUTS)

    return enter


def _enter(pid: int, kind: str, flag: int) -> None:
    fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        cluster_kernel.enter_namespace(fd, flag)
    finally:
        os.close(fd)


def descendants(pid: int) -> list[int]:
    """All processes below pid, by the parents /proc names."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
