"""What the tests of the emulated cluster share: starting one, a program for it, finding what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import zcomm.tools
from zcomm.tools.cluster_namespaces import Refused, find_namespaces

ROOT = Path(zcomm.tools.__file__).parents[2]  # the folder that holds the package
MARKER = "ZCOMM_TEST_MARKER"

ALLOWED = find_namespaces()
needs_namespaces = pytest.mark.skipif(
    isinstance(ALLOWED, Refused), reason=f"network namespaces are not allowed here: {ALLOWED}"
)

HANG_S = 600.0  # ends a hang; never the pace of a slow machine

PACKET_BYTES = 1514  # of the largest on the wire, headers and all: of a resent segment at most

# rank 0 sends nbytes to rank `to` over TCP, waits for the answer, tells the time and its node's bytes
SEND = """
import json, os, socket, sys, time
rank, to, nbytes = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
node = to // int(os.environ["LOCAL_WORLD_SIZE"])
if rank == to:
    connection, _ = socket.create_server(("", 5000)).accept()
    while nbytes:
        nbytes -= len(connection.recv(1 << 16))
    connection.sendall(b"!")
    connection.recv(1)
elif rank == 0:
    while True:
        try:
            connection = socket.create_connection((f"10.0.0.{node + 1}", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    from zcomm.tools.cluster_counters import node_counters
    before, start = node_counters(), time.perf_counter()
    connection.sendall(bytes(nbytes))
    connection.recv(1)
    seconds, sent = time.perf_counter() - start, node_counters().since(before)
    print(json.dumps({"seconds": seconds, "tx_bytes": sent.tx_bytes, "resent_segments": sent.resent_segments}))
"""


def environment(**more: str) -> dict[str, str]:
    """This process's variables, with the package and what it needs on the path."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ZCOMM_")}
    return own | {"PYTHONPATH": os.pathsep.join(path for path in [str(ROOT), *sys.path] if path)} | more


class Cluster:
    """A running `zcomm cluster`, or another program of zcomm that starts one."""

    def __init__(
        self,
        *words: str,
        python: str = sys.executable,
        before: tuple[str, ...] = (),
        program: str = "cluster",
        **more: str,
    ):
        self.marker = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*before, python, "-m", "zcomm", program, *words],
            env=environment(**more) | {MARKER: self.marker},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, timeout_s: float = HANG_S) -> Cluster:
        """Wait for its end; sets status, out and err."""
        self.out, self.err = self.process.communicate(timeout=timeout_s)
        self.status = self.process.returncode
        return self

    def processes(self) -> dict[int, str]:
        """Every process this cluster started, except the command itself: pid to command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    if f"{MARKER}={self.marker}".encode() in (entry / "environ").read_bytes():
                        words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        found[int(entry.name)] = words
                except OSError:
                    continue
        return found

    def ranks(self, count: int) -> list[int]:
        """The pids of the ranks, once there are count that run `sleep`."""
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            found = [pid for pid, words in self.processes().items() if words.startswith("sleep ")]
            if len(found) == count:
                return sorted(found)
            time.sleep(0.02)
        raise AssertionError(f"expected {count} ranks that sleep, found {self.processes()}")

    def left_behind(self, within_s: float = 60.0) -> dict[int, str]:
        """What still runs after within_s at most; returns at once where nothing does."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


def run_cluster(*words: str, timeout_s: float = HANG_S, **more: str) -> Cluster:
    """Run `zcomm cluster words` to its end."""
    return Cluster(*words, **more).finish(timeout_s)


def run_with_report(folder: Path, *words: str) -> tuple[Cluster, dict[str, Any]]:
    """Run a cluster that must end well; returns it and what --json wrote."""
    path = folder / "cluster.json"
    ended = run_cluster("--json", str(path), *words)
    assert ended.status == 0, ended.err
    return ended, json.loads(path.read_text())
