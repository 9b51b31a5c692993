"""A slow cluster on one Linux machine, and a program run on it as torchrun would.

    this command --> unshare --> supervisor --> keeper of node 0, keeper of node 1, ...
                                            \\-> rank 0, rank 1, ... (each inside its node)

Everything below unshare lives in fresh namespaces and ends with them; this process only checks the request,
shows the ranks' output, passes signals in, and reports. Where namespaces are not allowed the same supervisor
runs on loopback, and links are paced in user space (zcomm/transports/pace.py), under a plain notice.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from zcomm.errors import ClusterError, MissingExtra
from zcomm.tools.cluster_channel import Frame, Kind, Receiver, pack_json
from zcomm.tools.cluster_counters import NodeCounters
from zcomm.tools.cluster_mpi import Launcher, find_launcher
from zcomm.tools.cluster_namespaces import Namespaces, find_namespaces
from zcomm.tools.cluster_network import Shaping
from zcomm.tools.cluster_task import Task
from zcomm.tools.link import NO_LIMIT, Link, format_latency

MOST_NODES = 8
MOST_RANKS_PER_NODE = 8
_END_TIMEOUT_S = 10.0


class UseNamespaces(enum.Enum):
    """Whether nodes must be real network namespaces."""

    AUTO = "auto"  # where allowed, else the paced fallback, announced
    REQUIRE = "require"
    OFF = "off"  # always the paced fallback


# -c, like -m, puts the user's folder first on the path, where a file may have the name of a module.
OWN_MODULES_ONLY = "import sys; sys.path[:] = [place for place in sys.path if place]; "
_SUPERVISOR = OWN_MODULES_ONLY + "from zcomm.tools.cluster_supervisor import main; main()"


@dataclass(frozen=True)
class ClusterSpec:
    """The cluster asked for."""

    nodes: int = 2
    ranks_per_node: int = 2
    link: Link = NO_LIMIT
    latency_s: float = 0.0  # one way, node to node
    namespaces: UseNamespaces = UseNamespaces.AUTO

    def __post_init__(self) -> None:
        _check_count("nodes", self.nodes, MOST_NODES)
        _check_count("ranks per node", self.ranks_per_node, MOST_RANKS_PER_NODE)

    @property
    def world_size(self) -> int:
        """Ranks on all nodes together."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class ClusterResult:
    """What a program did on a cluster."""

    spec: ClusterSpec
    exit_status: int  # of the first rank that failed, 128 + signal if a signal ended it; 0 if none failed
    shaping: Shaping
    namespaces: str  # how nodes were made: "root", "rootless", or "none" in the fallback
    seconds: float  # from the start of the first rank to the end of the last
    per_node: tuple[NodeCounters, ...]  # bytes while the program ran
    signal: int | None = None  # the first that came while it ran, and was passed to the ranks

    def as_json(self) -> dict[str, Any]:
        """What --json writes."""
        return {
            "link": str(self.spec.link),
            "latency": format_latency(self.spec.latency_s),
            "nodes": self.spec.nodes,
            "ranks_per_node": self.spec.ranks_per_node,
            "exit_status": self.exit_status,
            "seconds": round(self.seconds, 3),
            "namespaces": self.namespaces,
            "shaping": asdict(self.shaping),
            "per_node": [asdict(counters) for counters in self.per_node],
        }


class Output(NamedTuple):
    """Whole lines a rank wrote."""

    rank: int
    to_stderr: bool
    text: bytes


def run(
    command: Sequence[str],
    spec: ClusterSpec,
    *,
    environment: dict[str, str] | None = None,  # the ranks' own variables are added; None: this process's
    timeout_s: float | None = None,
    mpi: bool = False,  # the ranks are those of one MPI program
    on_output: Callable[[Output], None] | None = None,  # None: to this process's stdout and stderr
    on_note: Callable[[str], None] | None = None,  # the cluster's own remarks; None: to stderr
) -> ClusterResult:
    """Run command once per rank on a fresh cluster; returns when all ranks have ended and nothing is left.

    A failing program is not an error: see exit_status. SIGINT, SIGTERM and SIGHUP are passed to the ranks while it
    runs, if called from the main thread. Ranks get OMP_NUM_THREADS=1 and PYTHONUNBUFFERED=1 where environment does not
    say. Raises ClusterError or MissingExtra before anything starts if it cannot be done.
    """
    environment = dict(os.environ if environment is None else environment)
    check_command(command, environment)
    if sys.platform != "linux":
        raise ClusterError(f"an emulated cluster needs Linux; this is {sys.platform}")
    mpiexec = find_launcher(command, environment) if mpi else None
    show = on_output or write_through
    note = on_note or print_note
    why, headline = "switched off", "NAMESPACES NOT ALLOWED"
    if spec.namespaces is not UseNamespaces.OFF:
        found = find_namespaces()
        if isinstance(found, Namespaces):
            if find_spec("pyroute2") is None:
                raise MissingExtra(
                    "an emulated cluster needs pyroute2; pip install 'zcomm-collectives[tools]' "
                    "(or --namespaces off to pace the link in user space)"
                )
            try:
                return _Run(command, spec, environment, timeout_s, mpiexec, found, show, note).finish()
            except _NotBuiltError as problem:
                why, headline = str(problem), "NETWORK NOT BUILT"
        else:
            why = found.why
        if spec.namespaces is UseNamespaces.REQUIRE:
            raise ClusterError(f"{headline}: {why}; --namespaces auto would pace it in user space")
    note(
        f"{headline}: {why}; all ranks run on loopback, link paced in user space: only the traffic of zcomm "
        "(and of programs that charge the pacer) is slowed and counted"
    )
    return _Run(command, spec, environment, timeout_s, mpiexec, None, show, note).finish()


class _NotBuiltError(Exception):
    """The supervisor could not build the network; nothing was started."""


class _Run:
    """One supervisor, from start to result."""

    def __init__(
        self,
        command: Sequence[str],
        spec: ClusterSpec,
        environment: dict[str, str],
        timeout_s: float | None,
        mpiexec: Launcher | None,
        namespaces: Namespaces | None,
        show: Callable[[Output], None],
        note: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._namespaces = "none" if namespaces is None else str(namespaces)
        self._show = show
        self._note = note
        self._task = Task(
            command=list(command),
            environment=environment,
            n_nodes=spec.nodes,
            ranks_per_node=spec.ranks_per_node,
            bits_s=spec.link.bits_s,
            latency_s=spec.latency_s,
            emulated=namespaces is not None,
            own_pids=namespaces is not None and namespaces.own_pids,
            timeout_s=timeout_s,
            mpiexec=mpiexec,
        )
        self._shaping = Shaping("none", "none")
        self._result: ClusterResult | None = None
        self._signal: int | None = None
        self._connection, theirs = socket.socketpair()
        program = [sys.executable, "-c", _SUPERVISOR, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                namespaces.command(program) if namespaces else program,
                env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C comes to this process alone, which passes it on
            )

    def finish(self) -> ClusterResult:
        """Talk to the supervisor until it has ended."""
        receiver = Receiver(self._connection)
        try:
            with _signals_to(self._pass_on) as woken:
                self._connection.sendall(pack_json(Kind.TASK, asdict(self._task)))
                while not receiver.ended:
                    ready, _, _ = select.select([self._connection, woken], [], [])
                    if woken in ready:
                        woken.recv(512)  # the handlers have run by now
                    if self._connection in ready:
                        for frame in receiver.receive():
                            self._handle(frame)
        finally:
            self._end()
        if self._result is None:
            raise ClusterError(
                f"the cluster's supervisor was ended from outside (status {self._process.returncode}), "
                "and all ranks with it"
            )
        return self._result

    def _handle(self, frame: Frame) -> None:
        if frame.kind in (Kind.STDOUT, Kind.STDERR):
            self._show(Output(frame.rank, frame.kind is Kind.STDERR, frame.payload))
        elif frame.kind is Kind.NOTE:
            self._note(frame.json())
        elif frame.kind is Kind.REFUSED:
            raise _NotBuiltError(frame.json())
        elif frame.kind is Kind.READY:
            self._shaping = Shaping(**frame.json())
            if self._shaping.latency not in ("none", "netem"):
                asked = format_latency(self._spec.latency_s)
                self._note(f"LATENCY OF {asked} NOT EMULATED ({self._shaping.latency}); only the rate is")
        elif frame.kind is Kind.RESULT:
            told = frame.json()
            self._result = ClusterResult(
                self._spec,
                told["exit_status"],
                self._shaping,
                self._namespaces,
                told["seconds"],
                tuple(NodeCounters(**counters) for counters in told["per_node"]),
                self._signal,
            )

    def _pass_on(self, number: int) -> None:
        self._signal = self._signal or number
        with contextlib.suppress(OSError):
            self._connection.send(pack_json(Kind.SIGNAL, number))

    def _end(self) -> None:
        """Close the channel, which ends a supervisor that still runs, and wait for it."""
        self._connection.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # unshare takes its child, and so all processes inside, with it
            self._process.wait()


@contextlib.contextmanager
def _signals_to(pass_on: Callable[[int], None]) -> Iterator[socket.socket]:
    """Catch the signals that end a program, for a while; the main thread only can.

    Yields a socket to wait on beside others: Python runs a handler only between two steps of its own, so a signal
    that comes just before a blocking read would otherwise be held up by it.
    """
    woken, waker = socket.socketpair()
    with woken, waker:
        if threading.current_thread() is not threading.main_thread():
            yield woken
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        waker.setblocking(False)
        waker_before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda caught, _: pass_on(caught)) for number in numbers}
        mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # some who start programs block them
        try:
            yield woken
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(waker_before)


def write_through(output: Output) -> None:
    """Pass on what a rank wrote, at once."""
    stream = sys.stderr if output.to_stderr else sys.stdout
    stream.flush()
    stream.buffer.write(output.text)
    stream.buffer.flush()


def print_note(text: str) -> None:
    """Say a remark of the cluster's own, on stderr."""
    print(f"zcomm cluster: {text}", file=sys.stderr, flush=True)


def check_command(
    command: Sequence[str],  # the program and its arguments
    environment: Mapping[str, str],  # whose PATH is searched
) -> None:
    """Raise ClusterError unless the program is there and can be run."""
    if not command:
        raise ClusterError("no program was given; write it after --, as in: zcomm cluster --nodes 2 -- python train.py")
    program = command[0]
    if shutil.which(program, path=environment.get("PATH")) is not None:
        return
    if os.path.isdir(program):
        raise ClusterError(f"the program {program} is a folder")
    if "/" in program and os.path.exists(program):
        raise ClusterError(f"{program} is not an executable file; run it by its interpreter, as in: python {program}")
    if os.path.exists(program):
        raise ClusterError(f"{program} is not a program on the PATH; a file here is run as: python {program}")
    raise ClusterError(f"the program {program!r} does not exist (or is not on the PATH)")


def _check_count(what: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ClusterError(f"{what} is {count}; expected 1 to {most}")
