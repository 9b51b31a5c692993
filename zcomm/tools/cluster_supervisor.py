"""Runs inside the cluster: builds the network, starts the ranks, passes on their output, ends them, reads counters.

One thread, one loop. Started by zcomm.tools.cluster as the first process of the fresh namespaces; where it is
process 1 of a PID namespace, the kernel kills whatever it leaves. How a run ends:

1. all ranks end by themselves: their counters are read and reported;
2. a rank fails, the time is up, or a signal comes: the others get a signal, and the task's grace later SIGKILL;
3. the command's end of the channel closes (it was killed): everything gets SIGKILL at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from typing import IO

from zcomm.errors import ClusterError, MissingExtra
from zcomm.tools import cluster_kernel, cluster_mpi, cluster_network
from zcomm.tools.cluster_channel import Frame, Kind, Receiver, pack_json
from zcomm.tools.cluster_counters import NodeCounters, read_interface
from zcomm.tools.cluster_output import Outbox, Stream
from zcomm.tools.cluster_processes import descendants, master_port, rank_environment, start_in_node
from zcomm.tools.cluster_task import Task
from zcomm.tools.link import Link
from zcomm.transports import pace

TIMED_OUT = 124  # exit status when the time was up, as timeout(1) has it
CANNOT_START = 126  # exit status when the system refused to run the program, as shells have it
_LINGER_S = 0.3  # how long output of a rank's own children is waited for after the last rank ended
_KILL_TIMEOUT_S = 5.0  # for killed processes to be gone


def main() -> None:
    """Entry: argv[1] is the file descriptor of the channel."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # who starts programs may block signals, for all of theirs too
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    receiver = Receiver(connection)
    early: list[Frame] = []  # signals may come before the task, or with it
    while not any(frame.kind is Kind.TASK for frame in early):
        if receiver.ended:
            return
        early += receiver.receive()
    task = Task(**next(frame.json() for frame in early if frame.kind is Kind.TASK))
    supervisor = _Supervisor(task, connection, receiver, early)
    try:
        supervisor.build()
    except (ClusterError, MissingExtra, OSError) as problem:
        connection.sendall(pack_json(Kind.REFUSED, str(problem)))
        return
    supervisor.run()


class _Supervisor:
    def __init__(self, task: Task, connection: socket.socket, receiver: Receiver, early: list[Frame]) -> None:
        self._task = task
        self._early = early
        self._connection = connection
        self._receiver = receiver
        self._selector = selectors.DefaultSelector()
        self._outbox = Outbox(connection)
        self._streams: set[Stream] = set()  # open
        self._ranks: dict[int, int] = {}  # running, by pid; of an MPI program mpiexec alone, as rank 0
        self._mpi: cluster_mpi.MpiRun | None = None
        self._mpi_ranks: dict[int, int] = {}  # of an MPI program: rank to pid, running
        self._mpi_ended = 0  # ranks that told how they ended
        self._nodes: list[cluster_network.Node] = []
        self._shaping = cluster_network.Shaping("none", "none")
        self._pacer: pace.Pacer | None = None
        self._pace_file = ""
        self._status = 0  # of the program
        self._ending = False
        self._passed_on = 0  # the first signal that came for the program
        self._kill_at = float("inf")
        self._killed = False

    # -- building

    def build(self) -> None:
        task = self._task
        cluster_kernel.adopt_orphans()
        if task.own_pids:
            cluster_network.own_shared_memory()
        if task.emulated:
            self._nodes, self._shaping = cluster_network.build(
                task.n_nodes,
                Link(task.bits_s),
                task.latency_s,
                host_names=task.own_pids and cluster_network.name_hosts(task.n_nodes),
            )
            return
        pace_fd = os.memfd_create("zcomm-pace")
        os.ftruncate(pace_fd, pace.file_nbytes(task.n_nodes))
        self._pace_file = f"/proc/{os.getpid()}/fd/{pace_fd}"
        self._pacer = pace.Pacer(self._pace_file, task.bits_s or float("inf"), 0, task.ranks_per_node)
        latency = "not applied: paced in user space" if task.latency_s else "none"
        self._shaping = cluster_network.Shaping("paced in user space" if task.bits_s else "none", latency)

    # -- running

    def run(self) -> None:
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._selector.register(woken, selectors.EVENT_READ)
        self._connection.setblocking(False)
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._outbox.send(pack_json(Kind.READY, asdict(self._shaping)))
        before = self._counters()
        started = time.monotonic()
        deadline = started + (self._task.timeout_s or float("inf"))
        if self._task.mpiexec is None:
            self._start_ranks()
        else:
            self._start_mpi(cluster_mpi.Launcher(*self._task.mpiexec))
        self._obey(self._early)
        while self._ranks:
            now = time.monotonic()
            if now >= deadline:
                deadline = float("inf")
                if not self._ending:
                    self._status = TIMED_OUT
                    self._end_ranks(signal.SIGTERM, f"the time of {self._task.timeout_s:g} s is up")
            if now >= self._kill_at and not self._killed:
                self._killed = True
                self._signal_ranks(signal.SIGKILL)
            self._turn(min(deadline, self._kill_at if not self._killed else float("inf")) - now, woken)
            if self._receiver.ended:
                self._kill_all()
                return
        seconds = time.monotonic() - started
        counted = [b.since(a) for a, b in zip(before, self._counters(), strict=True)]
        for stream in self._streams:
            stream.drain(self._outbox)
        linger_until = time.monotonic() + _LINGER_S
        while self._streams and time.monotonic() < linger_until and not self._receiver.ended:
            self._turn(linger_until - time.monotonic(), woken)
        for stream in self._streams:
            stream.finish(self._outbox)
        self._kill_all()
        self._outbox.send(
            pack_json(
                Kind.RESULT,
                {
                    "exit_status": self._status,
                    "seconds": seconds,
                    "per_node": [asdict(counters) for counters in counted],
                },
            )
        )
        self._outbox.finish()

    def _start_ranks(self) -> None:
        task = self._task
        port = master_port(task)
        for rank in range(task.n_nodes * task.ranks_per_node):
            node, local_rank = divmod(rank, task.ranks_per_node)
            environment = rank_environment(task, node, local_rank, port, self._pace_file)
            if not self._start(rank, node, task.command, environment):
                return

    def _start_mpi(self, launcher: cluster_mpi.Launcher) -> None:
        """Start mpiexec in node 0, and listen to the ranks it will start."""
        task = self._task
        mpi = cluster_mpi.MpiRun(launcher, task.command, self._nodes, task.n_nodes, task.ranks_per_node)
        environment = mpi.environment() | rank_environment(task, 0, 0, master_port(task), self._pace_file)
        self._mpi = mpi
        if self._start(0, 0, mpi.words, environment):
            self._selector.register(mpi.events, selectors.EVENT_READ)
            for rank, (stdout, stderr) in enumerate(mpi.outputs):
                self._listen(rank, Kind.STDOUT, os.fdopen(stdout, "rb", buffering=0))
                self._listen(rank, Kind.STDERR, os.fdopen(stderr, "rb", buffering=0))

    def _start(self, rank: int, node: int, command: list[str], environment: dict[str, str]) -> bool:
        """Start a process in a node; whether that worked."""
        try:
            process = start_in_node(command, environment, self._nodes[node] if self._task.emulated else None)
        except (OSError, subprocess.SubprocessError) as problem:
            self._status = CANNOT_START
            self._end_ranks(signal.SIGTERM, f"rank {rank} could not be started: {problem}")
            return False
        self._ranks[process.pid] = rank
        for kind, pipe in ((Kind.STDOUT, process.stdout), (Kind.STDERR, process.stderr)):
            assert pipe is not None
            self._listen(rank, kind, pipe)
        process.returncode = 0  # reaped by _reap, not by Popen
        return True

    def _listen(self, rank: int, kind: Kind, pipe: IO[bytes]) -> None:
        stream = Stream(rank, kind, pipe)
        self._streams.add(stream)
        self._selector.register(pipe, selectors.EVENT_READ, stream)

    # -- the loop

    def _turn(self, wait_s: float, woken: int) -> None:
        """Wait for one round of events and handle them."""
        clogged = self._outbox.clogged
        events = selectors.EVENT_READ | (0 if self._outbox.empty else selectors.EVENT_WRITE)
        self._selector.modify(self._connection, events)
        ready = self._selector.select(None if wait_s == float("inf") else max(0.0, wait_s))
        for key, mask in ready:
            if key.fileobj is self._connection:
                if mask & selectors.EVENT_WRITE:
                    self._outbox.flush()
                if mask & selectors.EVENT_READ:
                    self._obey(self._receiver.receive())
            elif key.fileobj == woken:
                with contextlib.suppress(BlockingIOError):
                    for number in os.read(woken, 512):
                        if number != signal.SIGCHLD:
                            self._pass_on(number)
            elif self._mpi is not None and key.fileobj == self._mpi.events:
                self._hear(self._mpi.read_events())
            elif not clogged:
                self._pass_output(key.data)
        if clogged and ready:
            time.sleep(0.005)  # full pipes are ready at once; wait for the command, not for them
        self._reap()

    def _hear(self, events: list[cluster_mpi.Event]) -> None:
        """An MPI program's ranks tell when they begin and end."""
        for rank, pid, status in events:
            if status is None:
                self._mpi_ranks[rank] = pid
                continue
            self._mpi_ranks.pop(rank, None)
            self._mpi_ended += 1
            if self._mpi is not None and self._mpi_ended == self._task.n_nodes * self._task.ranks_per_node:
                self._mpi.let_go()
            if status != 0:
                self._rank_failed(rank, status)

    def _obey(self, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.kind is Kind.SIGNAL:
                self._pass_on(frame.json())

    def _pass_on(self, number: int) -> None:
        """A signal for the program: the first is passed on, a second one kills."""
        if self._mpi is not None:
            self._hear(self._mpi.read_events())  # whom to pass it to
        if self._ending:
            self._kill_at = 0.0
            return
        self._passed_on = number
        self._end_ranks(number, "")

    def _pass_output(self, stream: Stream) -> None:
        if not stream.pass_on(self._outbox):
            self._selector.unregister(stream.pipe)
            stream.pipe.close()
            self._streams.remove(stream)

    def _reap(self) -> None:
        """Collect ended processes: ranks, and orphans that fell to this process."""
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._ranks.pop(pid, None)
            if rank is None:
                continue
            status = os.waitstatus_to_exitcode(wait_status)
            if self._mpi is not None:
                self._hear(self._mpi.read_events())
                self._mpi.ended()
                if self._mpi_ended == self._task.n_nodes * self._task.ranks_per_node:
                    continue  # how the ranks ended is known, and says more than how mpiexec did
            if status != 0:
                self._rank_failed(rank, 128 - status if status < 0 else status)

    # -- ending

    def _rank_failed(self, rank: int, status: int) -> None:
        """The first failure is the program's; one that our own SIGKILL caused counts as the signal before."""
        if self._status == 0:
            self._status = 128 + self._passed_on if self._killed and self._passed_on else status
        if not self._ending:
            others = "; the others are ended" if self._ranks else ""
            who = "mpiexec" if self._mpi is not None and not self._ranks else f"rank {rank}"
            self._end_ranks(signal.SIGTERM, f"{who} ended with status {status}{others}")

    def _end_ranks(self, number: int, note: str) -> None:
        """Ask all ranks to end, and set the time when they must have."""
        self._ending = True
        self._kill_at = time.monotonic() + self._task.grace_s
        if note:
            self._outbox.send(pack_json(Kind.NOTE, note))
        self._signal_ranks(number)

    def _signal_ranks(self, number: int) -> None:
        launched = list(self._mpi_ranks.values())  # mpiexec ends when they have
        for pid in launched + list(self._ranks) if number == signal.SIGKILL or not launched else launched:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)  # each rank leads a group of its own

    def _kill_all(self) -> None:
        """Kill every descendant, however it was started, and wait until they are gone."""
        if self._task.own_pids and os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of this PID namespace but this process; the kernel waits for them
            return
        give_up_at = time.monotonic() + _KILL_TIMEOUT_S
        while (found := descendants(os.getpid())) and time.monotonic() < give_up_at:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
            self._reap()

    # -- counters

    def _counters(self) -> list[NodeCounters]:
        if self._pacer is not None:
            return [NodeCounters(node, *self._pacer.counters(node)) for node in range(self._task.n_nodes)]
        return [read_interface(node.keeper_pid, node.index) for node in self._nodes]


if __name__ == "__main__":
    main()
