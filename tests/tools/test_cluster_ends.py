"""However a cluster ends, it ends soon and leaves no process, link or file behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from cluster_runs import Cluster, environment, needs_namespaces, run_cluster

from zcomm.tools.cluster_channel import Kind, Receiver, pack_json
from zcomm.tools.cluster_supervisor import GRACE_S, Task

SLEEP = ("--", "sleep", "1000")
BOTH = [
    pytest.param((), id="namespaces", marks=needs_namespaces),
    pytest.param(("--namespaces", "off"), id="off"),
]
SOON_S = 15.0  # for a busy machine; alone it takes a tenth of that


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
    running = Cluster(*kind, *SLEEP)
    running.ranks(4)
    running.process.send_signal(number)
    ended = running.finish(SOON_S)

    assert ended.status == 128 + number
    assert not ended.left_behind()


def test_a_signal_reaches_a_program_that_handles_it():
    handle = 'trap "echo saved $RANK; exit 0" TERM; sleep 1000 & wait'
    running = Cluster("--namespaces", "off", "--", "sh", "-c", handle)
    running.ranks(4)
    running.process.terminate()
    ended = running.finish(SOON_S)

    assert sorted(ended.out.splitlines()) == [f"saved {rank}" for rank in range(4)]
    assert ended.status == 0
    assert not ended.left_behind()


def test_a_program_that_ignores_sigterm_is_killed(kind):
    stubborn = 'trap "" TERM; [ $RANK = 0 ] && exit 9; sleep 1000'
    ended = run_cluster(*kind, "--", "sh", "-c", stubborn)

    assert ended.status == 9
    assert ended.seconds < 10
    assert not ended.left_behind()


def test_a_second_signal_kills_at_once(kind):
    running = Cluster(*kind, "--", "sh", "-c", 'trap "" INT; sleep 1000')
    running.ranks(4)
    running.process.send_signal(signal.SIGINT)
    running.process.send_signal(signal.SIGTERM)
    ended = running.finish(GRACE_S - 0.5)  # without the second it would take the whole grace

    assert ended.status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert not ended.left_behind()


def test_a_killed_rank_ends_the_program(kind):
    running = Cluster(*kind, *SLEEP)
    os.kill(running.ranks(4)[1], signal.SIGKILL)
    ended = running.finish(SOON_S)

    assert ended.status == 137
    assert not ended.left_behind()


def test_the_killed_command_takes_everything_with_it(kind):
    running = Cluster(*kind, "--", "sh", "-c", "setsid sleep 1000 & exec sleep 1000")
    running.ranks(8)
    running.process.kill()

    assert not running.left_behind(SOON_S)
    running.finish(SOON_S)


@needs_namespaces
@pytest.mark.parametrize("part", ["unshare", "cluster_supervisor"])
def test_a_killed_supervisor_takes_everything_with_it(part: str):
    running = Cluster("--", "sh", "-c", "setsid sleep 1000 & exec sleep 1000")
    running.ranks(8)
    found = [pid for pid, words in running.processes().items() if part in words]
    os.kill(min(found), signal.SIGKILL)
    ended = running.finish(SOON_S)

    assert ended.status == 2
    assert "ended from outside" in ended.err
    assert not ended.left_behind()


def test_children_a_program_leaves_running_are_ended(kind):
    ended = run_cluster(*kind, "--", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & exit 0")

    assert ended.status == 0
    assert ended.seconds < SOON_S
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

    assert running.process.wait(SOON_S) == 128 + signal.SIGPIPE
    assert not running.left_behind()


def test_a_signal_that_comes_with_the_task_is_not_lost():
    ours, theirs = socket.socketpair()
    task = Task(["sleep", "1000"], environment(), 1, 2, None, 0.0, emulated=False, own_pids=False, timeout_s=None)
    with subprocess.Popen(
        [sys.executable, "-m", "zcomm.tools.cluster_supervisor", str(theirs.fileno())],
        env=environment(),
        pass_fds=[theirs.fileno()],
    ):
        theirs.close()
        ours.settimeout(SOON_S)
        signal_then_task = pack_json(Kind.SIGNAL, signal.SIGTERM) + pack_json(Kind.TASK, asdict(task))
        ours.sendall(signal_then_task)
        receiver = Receiver(ours)
        frames = []
        while not receiver.ended:
            frames += receiver.receive()
        ours.close()

    assert [frame.json()["exit_status"] for frame in frames if frame.kind is Kind.RESULT] == [143]
