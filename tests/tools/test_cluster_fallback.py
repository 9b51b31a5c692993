"""Where namespaces are not allowed: it says so, and links are paced and counted in user space."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from cluster_runs import run_cluster, run_with_report

from zcomm.errors import ClusterError
from zcomm.tools.cluster_counters import node_counters
from zcomm.transports import pace
from zcomm.transports.pace import Pacer, file_nbytes

OFF = ("--namespaces", "off")

# every rank sends nbytes to a rank of the other node, and as many within its own
CHARGE = """
import json, os, sys, time
from zcomm.tools.cluster_counters import node_counters
from zcomm.transports import pace
from zcomm.transports.pace import Pacer
rank, nbytes = int(os.environ["RANK"]), int(sys.argv[1])
pacer = Pacer.from_environment()
start = time.monotonic()
pacer.charge(nbytes, to_rank=(rank + 2) % 4)
pacer.charge(nbytes, to_rank=rank ^ 1)
print(json.dumps({"start": start, "end": time.monotonic(), "tx": node_counters().tx_bytes}))
"""


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """The shared file of a two-node cluster."""
    path = tmp_path / "pace"
    path.write_bytes(bytes(file_nbytes(2)))
    return str(path)


def test_it_says_so_and_ranks_are_told():
    show = 'echo "$GLOO_SOCKET_IFNAME $MASTER_ADDR $ZCOMM_CLUSTER $ZCOMM_PACE"'
    ended = run_cluster(*OFF, "--quiet", "--link", "20mbit", "--", "sh", "-c", show)

    assert ended.out == "lo 127.0.0.1 1 20000000\n" * 4
    assert "NAMESPACES NOT ALLOWED" in ended.err
    assert "paced in user space" in ended.err


def test_ranks_of_a_node_share_its_paced_link(tmp_path: Path):
    words = (*OFF, "--link", "10mbit", "--", sys.executable, "-c", CHARGE, "250000")
    ended, report = run_with_report(tmp_path, *words)

    ranks = [json.loads(line) for line in ended.out.splitlines()]
    took_s = max(rank["end"] for rank in ranks) - min(rank["start"] for rank in ranks)
    assert took_s >= 2 * 250_000 * 8 / 10e6  # two ranks share a node's link
    assert max(rank["tx"] for rank in ranks) == 500_000
    assert report["per_node"] == [
        {"node": node, "tx_bytes": 500_000, "rx_bytes": 500_000, "resent_segments": 0} for node in (0, 1)
    ]
    assert report["shaping"]["rate"] == "paced in user space"


def test_refused_namespaces_lead_to_the_fallback_and_require_refuses(tmp_path: Path):
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    fallback = run_cluster("--quiet", "--link", "1gbit", "--", "true", PATH=path)
    refused = run_cluster("--quiet", "--namespaces", "require", "--", "true", PATH=path)

    assert fallback.status == 0
    assert "NAMESPACES NOT ALLOWED: unshare: unshare failed: Operation not permitted" in fallback.err
    assert refused.status == 2
    assert "Operation not permitted" in refused.err


class StandingClock:
    """Stands in for the time module in pace.py: no time passes unless it is moved on."""

    def __init__(self) -> None:
        self.now_ns = 10**9
        self.slept_s: list[float] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(round(seconds, 9))


@pytest.fixture
def clock(monkeypatch) -> StandingClock:
    standing = StandingClock()
    monkeypatch.setattr(pace, "time", standing)
    return standing


def test_ranks_and_threads_of_a_node_share_its_link_and_no_other(shared: str, clock: StandingClock):
    ranks = [Pacer(shared, 8e6, node=0, ranks_per_node=2) for _ in range(2)]  # 1 MB/s
    elsewhere = Pacer(shared, 8e6, node=1, ranks_per_node=2)
    threads = [threading.Thread(target=rank.charge, args=(50_000,)) for rank in ranks for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elsewhere.charge(30_000, to_rank=1)

    assert sorted(clock.slept_s[:-1]) == [0.05, 0.1, 0.15, 0.2]  # each waits for those before it, and no longer
    assert clock.slept_s[-1] == 0.03
    assert ranks[0].counters(0) == (200_000, 30_000)
    assert ranks[0].counters(1) == (30_000, 200_000)


def test_idle_time_is_not_saved_up(shared: str, clock: StandingClock):
    pacer = Pacer(shared, 8e6, node=0, ranks_per_node=1)
    pacer.charge(1000)
    clock.now_ns += 200_000_000
    pacer.charge(100_000)

    assert clock.slept_s == [0.001, 0.1]


def test_what_stays_in_the_node_is_free(shared: str, clock: StandingClock):
    pacer = Pacer(shared, 8e6, node=0, ranks_per_node=2)
    pacer.charge(1000, to_rank=1)

    assert clock.slept_s == []
    assert pacer.counters(0) == pacer.counters(1) == (0, 0)


def test_a_pacer_that_nobody_has_lets_go_of_its_file(shared: str):
    for _ in range(3):
        Pacer(shared, 8e6, node=0, ranks_per_node=1)
    with Pacer(shared, 8e6, node=0, ranks_per_node=1) as pacer:
        pass
    pacer.close()  # once more is no error

    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    assert not any(os.path.realpath(link) == os.path.realpath(shared) for link in links)


def test_a_charge_really_waits(shared: str):
    pacer = Pacer(shared, 8e6, node=0, ranks_per_node=1)
    start = time.monotonic()
    pacer.charge(100_000)

    assert time.monotonic() - start >= 0.1


def test_no_pacer_where_links_are_real(monkeypatch):
    monkeypatch.delenv("ZCOMM_PACE", raising=False)

    assert Pacer.from_environment() is None


@pytest.mark.parametrize("rate", ["fast", "0", ""])
def test_a_pacer_of_a_broken_environment_says_so(rate: str, monkeypatch, shared: str):
    monkeypatch.setenv("ZCOMM_PACE", rate)
    monkeypatch.setenv("ZCOMM_PACE_FILE", shared)
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    with pytest.raises(ClusterError, match="zcomm cluster"):
        Pacer.from_environment()


def test_a_pace_file_that_is_gone_says_so(monkeypatch, tmp_path: Path):
    with pytest.raises(ClusterError, match="lives as long as"):
        Pacer(str(tmp_path / "gone"), 8e6, node=0, ranks_per_node=1)


def test_counters_outside_a_cluster_say_so(monkeypatch):
    monkeypatch.delenv("ZCOMM_CLUSTER", raising=False)

    with pytest.raises(ClusterError, match="outside an emulated cluster"):
        node_counters()
