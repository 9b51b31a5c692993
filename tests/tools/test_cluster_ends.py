"""However a cluster ends, it ends soon and leaves no process, link or file behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import HANG_S, Cluster, environment, needs_namespaces, run_cluster

from zcomm.tools.cluster_channel import Frame, Kind, Receiver, pack_json
from zcomm.tools.cluster_task import Task

SLEEP = ("--", "sleep", "1000")
BOTH = [
    pytest.param((), id="namespaces", marks=needs_namespaces),
    pytest.param(("--namespaces", "off"), id="off"),
]


@pytest.fixture(params=BOTH)
def kind(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


@pytest.fixture(autouse=True)
def _machine_is_as_before(tmp_path: Path, monkeypatch):
    """No interface of the machine may come or go, no temporary file may stay."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = Path("/proc/net/dev").read_text().count("\n")
    yield
    assert Path("/proc/net/dev").read_text().count("\n") == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks(kind, number):
    before = signal.signal(number, signal.SIG_DFL)  # ignored where the tests run in the background or under nohup
    try:
        running = Cluster(*kind, *SLEEP)
    finally:
        signal.signal(number, before)
    running.ranks(4)
    running.process.send_signal(number)
    ended = running.finish()

    assert ended.status == 128 + number
    assert not ended.left_behind()


def test_a_signal_reaches_a_program_that_handles_it():
    handle = 'trap "echo saved $RANK; exit 0" TERM; sleep 1000 & wait'
    running = Cluster("--namespaces", "off", "--", "sh", "-c", handle)
    running.ranks(4)
    running.process.terminate()
    ended = running.finish()

    assert sorted(ended.out.splitlines()) == [f"saved {rank}" for rank in range(4)]
    assert ended.status == 0
    assert not ended.left_behind()


def test_a_program_that_ignores_sigterm_is_killed(kind):
    stubborn = 'trap "" TERM; [ $RANK = 0 ] && exit 9; sleep 1000'
    ended = run_cluster(*kind, "--", "sh", "-c", stubborn)

    assert ended.status == 9
    assert not ended.left_behind()


def test_a_killed_rank_ends_the_program(kind):
    running = Cluster(*kind, *SLEEP)
    os.kill(running.ranks(4)[1], signal.SIGKILL)
    ended = running.finish()

    assert ended.status == 137
    assert not ended.left_behind()


def test_the_killed_command_takes_everything_with_it(kind):
    running = Cluster(*kind, "--", "sh", "-c", "setsid sleep 1000 & exec sleep 1000")
    running.ranks(8)
    running.process.kill()

    assert not running.left_behind()
    running.finish()


@needs_namespaces
@pytest.mark.parametrize("part", ["unshare", "cluster_supervisor"])
def test_a_killed_supervisor_takes_everything_with_it(part: str):
    running = Cluster("--", "sh", "-c", "setsid sleep 1000 & exec sleep 1000")
    running.ranks(8)
    found = [pid for pid, words in running.processes().items() if part in words]
    os.kill(min(found), signal.SIGKILL)
    ended = running.finish()

    assert ended.status == 2
    assert "ended from outside" in ended.err
    assert not ended.left_behind()


def test_children_a_program_leaves_running_are_ended(kind):
    ended = run_cluster(*kind, "--", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & exit 0")

    assert ended.status == 0
    assert not ended.left_behind()


def test_the_time_is_up(kind):
    ended = run_cluster(*kind, "--timeout", "0.5", *SLEEP)

    assert ended.status == 124
    assert "0.5 s is up" in ended.err
    assert not ended.left_behind()


def test_a_reader_that_goes_away_ends_the_program(kind):
    running = Cluster(*kind, "--quiet", "--", "sh", "-c", "while echo yes; do :; done")
    assert running.process.stdout is not None
    running.process.stdout.read(10)
    running.process.stdout.close()

    assert running.process.wait(HANG_S) == 128 + signal.SIGPIPE
    assert not running.left_behind()


def supervise(task: Task, *signals: int) -> list[Frame]:
    """What a supervisor tells about a task that is followed at once by signals."""
    ours, theirs = socket.socketpair()
    with (
        ours,
        subprocess.Popen(
            [sys.executable, "-m", "zcomm.tools.cluster_supervisor", str(theirs.fileno())],
            env=environment(),
            pass_fds=[theirs.fileno()],
        ),
    ):
        theirs.close()
        ours.settimeout(HANG_S)
        ours.sendall(b"".join(pack_json(Kind.SIGNAL, number) for number in signals[:1]))
        ours.sendall(pack_json(Kind.TASK, asdict(task)))
        ours.sendall(b"".join(pack_json(Kind.SIGNAL, number) for number in signals[1:]))
        receiver = Receiver(ours)
        frames = []
        while not receiver.ended:
            frames += receiver.receive()
    return frames


def task(*command: str, **more: Any) -> Task:
    return Task(list(command), environment(), 1, 2, None, 0.0, emulated=False, own_pids=False, timeout_s=None, **more)


def status_of(frames: list[Frame]) -> list[int]:
    return [frame.json()["exit_status"] for frame in frames if frame.kind is Kind.RESULT]


def test_a_signal_that_comes_with_the_task_is_not_lost():
    assert status_of(supervise(task("sleep", "1000"), signal.SIGTERM)) == [143]


def test_a_second_signal_kills_at_once():
    """The grace, which the second signal cuts short, is longer than the test may take."""
    stubborn = task("sh", "-c", 'trap "" INT; sleep 1000', grace_s=10_000.0)

    assert status_of(supervise(stubborn, signal.SIGINT, signal.SIGTERM)) in ([130], [143])


def test_what_a_rank_wrote_arrives_whole_although_its_child_keeps_the_pipe():
    frames = supervise(task("sh", "-c", "sleep 1000 & head -c 60000 /dev/zero | tr '\\0' x"))

    assert status_of(frames) == [0]
    written = b"".join(frame.payload for frame in frames if frame.kind is Kind.STDOUT and frame.rank == 1)
    assert written == b"x" * 60_000
