"""MPI programs on an emulated cluster: mpiexec runs in node 0, and reaches the other nodes by a script in ssh's place.

    supervisor --> mpiexec, in node 0 --> proxy --> rank 0, rank 1
                                     \\-> script --> nsenter --> proxy, in node 1 --> rank 2, rank 3

mpiexec brings the ranks together; all else is as for plain programs. Each rank is a few words of shell around the
program: they give it variables as torchrun's and output pipes of the supervisor's own, so that no output crosses a
link, and tell the supervisor its process and its exit status.

[Note: leaving together] A rank that has told its status stays, as a shell, until all have: mpiexec hears of no end
before the supervisor does. Otherwise it would kill the others at once where one fails; and where it is told not to
(-disable-auto-cleanup), it announces each end, also a good one, to the proxies of all other nodes, and dies of
SIGPIPE if one of them leaves at that moment.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zcomm.errors import ClusterError
from zcomm.tools import cluster_network

MPICH = "mpich"
OPEN_MPI = "openmpi"
_TRY_TIMEOUT_S = 60.0


class Launcher(NamedTuple):
    """An mpiexec."""

    path: str
    kind: str  # MPICH or OPEN_MPI


class Event(NamedTuple):
    """What a rank's shell told."""

    rank: int
    pid: int  # leads the rank's process group
    status: int | None  # None: the program begins


def find_launcher(command: Sequence[str], environment: Mapping[str, str]) -> Launcher:
    """The mpiexec beside the program, as in a virtual environment; else the one on the PATH, or beside this Python."""
    path = environment.get("PATH")
    program = shutil.which(command[0], path=path) or command[0]
    beside, ours = (os.path.join(os.path.dirname(place), "mpiexec") for place in (program, sys.executable))
    on_path = shutil.which("mpiexec", path=path)
    found = next((place for place in (beside, on_path, ours) if place and os.access(place, os.X_OK)), None)
    if found is None:
        raise ClusterError(
            "--mpi needs an mpiexec, and there is none on the PATH; pip install 'zcomm-collectives[mpi]'"
        )
    try:
        asked = subprocess.run(
            [found, "--version"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ClusterError(f"{found} --version failed: {problem}") from problem
    if "HYDRA" in asked.stdout:
        return Launcher(found, MPICH)
    if "(Open MPI)" in asked.stdout and "(Open MPI) 4" not in asked.stdout:
        return Launcher(found, OPEN_MPI)
    said = (asked.stdout + asked.stderr).strip().splitlines()
    raise ClusterError(
        f"{found} is of an MPI that zcomm cluster cannot spread over nodes ({said[0] if said else 'it says nothing'}); "
        "expected MPICH (or another with Hydra) or Open MPI 5 or newer"
    )


class MpiRun:
    """One mpiexec: its words and variables, the pipes of its ranks, the script in ssh's place."""

    def __init__(
        self,
        launcher: Launcher,
        command: Sequence[str],
        nodes: Sequence[cluster_network.Node],  # empty: all ranks on this machine as it is
        n_nodes: int,
        ranks_per_node: int,
    ) -> None:
        self._launcher = launcher
        self._nodes = nodes
        self._ranks_per_node = ranks_per_node
        self._n_ranks = n_nodes * ranks_per_node
        self._writers: list[int] = []
        self.outputs = [(self._pipe(), self._pipe()) for _ in range(self._n_ranks)]  # by rank: stdout, stderr
        self.events = self._pipe()
        self._gate = os.pipe2(os.O_CLOEXEC)  # gives each rank the line it waits for, see [Note: leaving together]
        self._unread = b""
        self.words = [launcher.path, *self._options(), "sh", "-c", self._around(command)]

    def _pipe(self) -> int:
        """A pipe's reading end; the writing end is reached through /proc."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        self._writers.append(writer)
        return reader

    def environment(self) -> dict[str, str]:
        """Variables that keep the library's traffic on the emulated links; the user's own win."""
        if self._launcher.kind == OPEN_MPI:  # a rootless cluster too looks like root from inside
            return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if not self._nodes:
            return {}
        interface = cluster_network.INTERFACE
        return {
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": interface,
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": interface,
        }

    def read_events(self) -> list[Event]:
        """What ranks have told since."""
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self.events, 1 << 16)
        *lines, self._unread = self._unread.split(b"\n")
        told = [[int(word) for word in line.split()] for line in lines]
        return [Event(rank, pid, status[0] if status else None) for rank, pid, *status in told]

    def let_go(self) -> None:
        """All ranks have told how they ended, and may leave. Once."""
        os.write(self._gate[1], b"\n" * self._n_ranks)

    def ended(self) -> None:
        """mpiexec is gone: let the pipes end with their last writer."""
        for writer in self._writers:
            os.close(writer)
        self._writers.clear()

    def _options(self) -> list[str]:
        count = str(self._n_ranks)
        addresses = [node.address for node in self._nodes]
        if self._launcher.kind == MPICH:
            options = ["-n", count]
            if not addresses:
                return options
            return [
                *("-launcher", "ssh", "-launcher-exec", self._shell_of_nodes(), "-localhost", addresses[0]),
                *("-hosts", ",".join(addresses), "-ppn", str(self._ranks_per_node)),
                *options,
            ]
        options = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-n", count]
        if not addresses:
            return ["--oversubscribe", *options]
        interface = cluster_network.INTERFACE
        return [
            *("--prtemca", "plm_ssh_agent", self._shell_of_nodes()),
            *("--prtemca", "prte_if_include", interface),
            *("--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", interface),
            *("--host", ",".join(f"{address}:{self._ranks_per_node}" for address in addresses)),
            *options,
        ]

    def _shell_of_nodes(self) -> str:
        """Path of a program that takes ssh's place: options, an address, words for a shell on that node."""
        lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "case $1 in"]
        for node in self._nodes:
            spaces = f"--net=/proc/{node.keeper_pid}/ns/net"
            if node.host_name is not None:
                spaces += f" --uts=/proc/{node.keeper_pid}/ns/uts"
            lines.append(f'{node.address}|{node.host_name}) into="{spaces}";;')
        lines += ['*) echo "no node has the address $1" >&2; exit 1;;', "esac", "shift"]
        lines.append('exec nsenter $into sh -c "$*"')
        writable = os.memfd_create("zcomm-shell")
        os.write(writable, "\n".join(lines).encode() + b"\n")
        os.fchmod(writable, 0o700)
        readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(writable)  # a file that is open for writing cannot be run
        return f"/proc/{os.getpid()}/fd/{readable}"

    def _around(self, command: Sequence[str]) -> str:
        """The shell around each rank's program, which must outlive it to tell its status."""
        here = f"/proc/{os.getpid()}/fd"
        per_node = self._ranks_per_node
        cases = [
            f"{rank}) out={here}/{self._writers[2 * rank]} err={here}/{self._writers[2 * rank + 1]};;"
            for rank in range(self._n_ranks)
        ]
        return "\n".join(
            [
                "trap : HUP INT QUIT TERM USR1 USR2",
                "export RANK=${PMI_RANK:-$OMPI_COMM_WORLD_RANK}",
                f"export LOCAL_RANK=$((RANK % {per_node})) GROUP_RANK=$((RANK / {per_node}))",
                "export NODE_RANK=$GROUP_RANK",
                f"case $RANK in {' '.join(cases)} esac",
                f'told={here}/{self._writers[-1]}; exec >/dev/null 2>&1; echo "$RANK $$" >$told',
                f"(exec {shlex.join(command)}) </dev/null >$out 2>$err",
                f'status=$?; echo "$RANK $$ $status" >$told; read all_told <{here}/{self._gate[0]}; exit $status',
            ]
        )
