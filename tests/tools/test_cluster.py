"""The emulated cluster: what ranks see, which bytes count, what a link lets pass, which status comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_runs import (
    ALLOWED,
    HANG_S,
    PACKET_BYTES,
    ROOT,
    SEND,
    Cluster,
    environment,
    needs_namespaces,
    run_cluster,
    run_with_report,
)

from zcomm.tools import cluster
from zcomm.tools.cluster_namespaces import Namespaces
from zcomm.tools.link import Link

pytestmark = needs_namespaces

PYTHON = (sys.executable, "-c")
SHOW = "import os, json; print(json.dumps(dict(os.environ)))"
BURST_50MBIT = 32 * 1024  # bytes that pass unshaped


def test_ranks_get_torchruns_environment():
    ended = run_cluster("--nodes", "2", "--ranks-per-node", "3", "--quiet", "--", *PYTHON, SHOW)

    seen = sorted((json.loads(line) for line in ended.out.splitlines()), key=lambda rank: int(rank["RANK"]))
    assert len(seen) == 6
    for rank, found in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "6",
            "LOCAL_RANK": str(rank % 3),
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": str(rank // 3),
            "NODE_RANK": str(rank // 3),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "eth0",
            "ZCOMM_CLUSTER": "1",
        }
        assert {name: found.get(name) for name in expected} == expected
        assert "ZCOMM_PACE" not in found


def test_omp_num_threads_is_1_unless_set(monkeypatch):
    show = (*PYTHON, "import os; print(os.environ['OMP_NUM_THREADS'])")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    unset = run_cluster("--nodes", "1", "--ranks-per-node", "1", "--", *show)
    as_set = run_cluster("--nodes", "1", "--ranks-per-node", "1", "--", *show, OMP_NUM_THREADS="3")

    assert (unset.out, as_set.out) == ("1\n", "3\n")
    assert "OMP_NUM_THREADS=1" in unset.err
    assert "OMP_NUM_THREADS" not in as_set.err


@pytest.mark.skipif(not getattr(ALLOWED, "own_pids", False), reason="no mount namespace to name hosts in")
def test_nodes_have_names_of_their_own_that_resolve():
    show = "import socket; n = socket.gethostname(); print(n, socket.gethostbyname(n))"
    ended = run_cluster("--nodes", "3", "--ranks-per-node", "1", "--quiet", "--", *PYTHON, show)

    assert sorted(ended.out.splitlines()) == ["node0 10.0.0.1", "node1 10.0.0.2", "node2 10.0.0.3"]


def test_bytes_between_nodes_are_counted(tmp_path: Path):
    ended, report = run_with_report(tmp_path, "--", *PYTHON, SEND, "2", "1000000")

    sender, receiver = report["per_node"]
    assert (sender["node"], receiver["node"]) == (0, 1)
    resent = sender["resent_segments"] * PACKET_BYTES
    for counted in (sender["tx_bytes"], receiver["rx_bytes"], json.loads(ended.out)["tx_bytes"]):
        assert 1_000_000 <= counted <= 1_050_000 + resent
    assert sender["rx_bytes"] < 50_000 + resent  # acknowledgements
    assert -500 < sender["tx_bytes"] - receiver["rx_bytes"] < 500 + resent  # nodes are read one after the other


def test_bytes_within_a_node_are_not_counted(tmp_path: Path):
    ended, report = run_with_report(tmp_path, "--", *PYTHON, SEND, "1", "1000000")

    assert json.loads(ended.out)["tx_bytes"] < 1000
    for node in report["per_node"]:
        assert node["tx_bytes"] + node["rx_bytes"] < 2000


def test_a_program_that_sends_nothing_counts_nothing(tmp_path: Path):
    _, report = run_with_report(tmp_path, "--nodes", "2", "--", "true")

    assert [node["tx_bytes"] for node in report["per_node"]] == [0, 0]


def test_a_link_takes_the_time_of_the_wire(tmp_path: Path):
    nbytes = 3_000_000
    words = ("--link", "50mbit", "--ranks-per-node", "1", "--", *PYTHON, SEND, "1", str(nbytes))
    ended, report = run_with_report(tmp_path, *words)

    assert json.loads(ended.out)["seconds"] >= (nbytes - BURST_50MBIT) * 8 / 50e6
    assert report["shaping"]["rate"] == "tbf"


# builds the network of argv[1]; tells of each end of each link its discipline, bytes per second, largest packet
BUILD = """
import json, sys
from pyroute2 import IPRoute
from zcomm.tools import cluster_kernel, cluster_network
from zcomm.tools.link import Link
nodes, _ = cluster_network.build(3, Link.parse(sys.argv[1]), 0.0, host_names=False)
found = {}
def look(node):
    with IPRoute() as iproute:
        disciplines = {one["index"]: one for one in iproute.get_qdiscs()}
        for link in iproute.get_links():
            name, one = link.get_attr("IFLA_IFNAME"), disciplines.get(link["index"])
            if name.startswith(("port", "eth")):
                kind = one.get_attr("TCA_KIND")
                rate = one.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"] if kind == "tbf" else None
                found[node or name] = kind, rate, link.get_attr("IFLA_GSO_MAX_SIZE")
look(None)
for node in nodes:
    with open(f"/proc/{node.keeper_pid}/ns/net") as space:
        cluster_kernel.enter_namespace(space.fileno(), cluster_kernel.CLONE_NEWNET)
    look(f"node{node.index}")
print(json.dumps(found))
"""
ENDS = sorted(f"{end}{node}" for end in ("port", "node") for node in range(3))


def links_of(rate: str) -> dict[str, list]:
    """What shapes each end of each link of a network built for this rate."""
    assert isinstance(ALLOWED, Namespaces)
    command = ALLOWED.command([*PYTHON, BUILD, rate])
    built = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert built.returncode == 0, built.stderr
    return dict(json.loads(built.stdout))


def test_both_ends_of_every_link_let_pass_the_rate_asked_for_and_no_less():
    found = links_of("50mbit")

    assert sorted(found) == ENDS
    for kind, rate, largest_packet in found.values():
        assert (kind, rate) == ("tbf", 50_000_000 // 8)
        assert 0.9 * BURST_50MBIT < largest_packet < BURST_50MBIT  # larger ones would be cut up, at a cost


def test_a_link_of_none_is_not_limited():
    found = links_of("none")

    assert sorted(found) == ENDS
    assert {kind for kind, _, _ in found.values()} == {"noqueue"}


# every rank but `to` sends nbytes to it at once; it tells how long that took from the first byte
ALL_TO_ONE = """
import os, socket, sys, threading, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
to, nbytes = int(sys.argv[1]), int(sys.argv[2])
def drain(connection):
    left = nbytes
    while left:
        left -= len(connection.recv(1 << 16))
if rank == to:
    server = socket.create_server(("", 5000))
    connections = [server.accept()[0] for _ in range(world - 1)]
    start = time.perf_counter()
    for connection in connections:
        connection.sendall(b"!")
    threads = [threading.Thread(target=drain, args=(c,)) for c in connections]
    [t.start() for t in threads], [t.join() for t in threads]
    print(time.perf_counter() - start)
else:
    while True:
        try:
            connection = socket.create_connection((f"10.0.0.{to + 1}", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.recv(1)
    connection.sendall(bytes(nbytes))
    connection.recv(1)
"""


def test_what_enters_a_node_is_shaped_too():
    words = ("--nodes", "3", "--ranks-per-node", "1", "--link", "50mbit", "--quiet", "--")
    ended = run_cluster(*words, *PYTHON, ALL_TO_ONE, "0", "1500000")

    assert float(ended.out) >= (3_000_000 - 2 * BURST_50MBIT) * 8 / 50e6, ended.err


@pytest.mark.parametrize(
    ("body", "status"),
    [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
)
def test_the_status_of_the_failing_rank_comes_back(body: str, status: int):
    ended = run_cluster("--quiet", "--", "sh", "-c", f'[ "$RANK" = 2 ] || exit 0; {body}')

    assert ended.status == status
    assert ("rank 2 ended with status" in ended.err) == (status != 0)


def test_a_failing_rank_ends_the_others():
    ended = run_cluster("--quiet", "--", "sh", "-c", '[ "$RANK" = 1 ] && exit 3; exec sleep 1000')

    assert ended.status == 3
    assert not ended.left_behind()


def test_json_tells_status_and_counters_of_a_failing_program(tmp_path: Path):
    path = tmp_path / "out.json"
    ended = run_cluster("--json", str(path), "--link", "1gbit", "--", "sh", "-c", "exit 5")

    report = json.loads(path.read_text())
    assert ended.status == report["exit_status"] == 5
    assert (report["link"], report["nodes"], report["ranks_per_node"]) == ("1gbit", 2, 2)
    assert [set(node) for node in report["per_node"]] == [{"node", "tx_bytes", "rx_bytes", "resent_segments"}] * 2


def test_output_passes_through_line_by_line():
    half = "import sys, os; sys.stdout.write('x' * 5000 + os.environ['RANK'] + '\\n');sys.stderr.write('no newline')"
    ended = run_cluster("--nodes", "1", "--quiet", "--", *PYTHON, half)

    assert sorted(ended.out.splitlines()) == ["x" * 5000 + "0", "x" * 5000 + "1"]
    assert ended.err == "no newline" * 2


def test_prefix_marks_lines_and_rank0_output_hides_the_others():
    prefixed = run_cluster("--prefix", "--quiet", "--", "sh", "-c", "echo a; echo b")
    rank0 = run_cluster("--rank0-output", "--quiet", "--", "sh", "-c", "echo $RANK")

    assert sorted(prefixed.out.splitlines()) == sorted(f"[{r}] {x}" for r in range(4) for x in "ab")
    assert rank0.out == "0\n"


def test_much_output_arrives_whole():
    flood = "import sys; [print('y' * 99) for _ in range(20000)]"
    ended = run_cluster("--nodes", "1", "--quiet", "--", *PYTHON, flood, PYTHONUNBUFFERED="")

    assert ended.out == ("y" * 99 + "\n") * 40000


def test_the_most_nodes_and_ranks_work(tmp_path: Path):
    _, report = run_with_report(tmp_path, "--nodes", "8", "--ranks-per-node", "8", "--link", "1gbit", "--", "true")

    assert len(report["per_node"]) == 8


def test_two_clusters_at_once_do_not_meet(tmp_path: Path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    both = [
        Cluster("--json", str(path), "--", *PYTHON, SEND, "2", str(nbytes))
        for path, nbytes in zip(paths, (1_000_000, 4_000_000), strict=True)
    ]
    for one in both:
        one.finish()

    for path, nbytes in zip(paths, (1_000_000, 4_000_000), strict=True):
        sender = json.loads(path.read_text())["per_node"][0]
        assert nbytes <= sender["tx_bytes"] <= 1.05 * nbytes + sender["resent_segments"] * PACKET_BYTES


@needs_namespaces
def test_without_a_pid_namespace_it_works_and_cleans_up_too(monkeypatch):
    assert isinstance(ALLOWED, Namespaces)
    poorer = Namespaces(
        tuple(flag for flag in ALLOWED.flags if flag not in ("--pid", "--mount-proc")),
        ALLOWED.rootless,
        False,
    )
    monkeypatch.setattr(cluster, "find_namespaces", lambda: poorer)
    monkeypatch.setenv("ZCOMM_TEST_MARKER", "poorer-" + str(os.getpid()))
    lines: list[bytes] = []
    result = cluster.run(
        ["sh", "-c", "setsid sleep 1000 & [ $RANK = 3 ] && exit 4; exec sleep 1000"],
        cluster.ClusterSpec(2, 2, Link(10**9)),
        on_output=lambda output: lines.append(output.text),
        on_note=lambda _: None,
    )

    assert result.exit_status == 4
    mark = ("ZCOMM_TEST_MARKER=poorer-" + str(os.getpid())).encode()
    left = [entry for entry in Path("/proc").glob("[0-9]*/environ") if _holds(entry, mark)]
    assert left == []


def _holds(path: Path, text: bytes) -> bool:
    try:
        return text in path.read_bytes()
    except OSError:
        return False


def test_a_cluster_s_shared_memory_is_its_own_and_ends_with_it(tmp_path):
    """MPI libraries name what ranks share there alike in two clusters that start together."""
    outside = Path(f"/dev/shm/zcomm-test-{os.getpid()}-outside")
    inside = Path(f"/dev/shm/zcomm-test-{os.getpid()}-inside")
    outside.touch()
    try:
        program = (
            "import os; print([name for name in os.listdir('/dev/shm') if not os.path.isdir(f'/dev/shm/{name}')]); "
            f"open({str(inside)!r}, 'w').close()"
        )
        ended = run_cluster("--quiet", "--nodes", "1", "--ranks-per-node", "1", "--", sys.executable, "-c", program)
        assert (ended.status, ended.out.strip()) == (0, "[]"), ended.err
        assert not inside.exists()
    finally:
        outside.unlink()


def test_folders_in_shared_memory_stay_in_sight():
    folder = Path(f"/dev/shm/zcomm test {os.getpid()}")
    folder.mkdir()
    try:
        program = folder / "program.py"
        program.write_text("import sys; open(sys.path[0] + '/told', 'w').write('told')")
        ended = run_cluster("--quiet", "--nodes", "1", "--ranks-per-node", "1", "--", sys.executable, str(program))
        assert ended.status == 0, ended.err
        assert (folder / "told").read_text() == "told"
    finally:
        shutil.rmtree(folder)


RUN = "import sys; sys.path.remove(''); from zcomm.__main__ import run; sys.exit(run())"  # as the command does


def test_files_of_the_user_that_are_named_like_modules_are_not_run(tmp_path: Path):
    for name in ("select", "random", "json", "socket", "zcomm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not a module')")
    words = ("cluster", "--quiet", "--nodes", "1", "--ranks-per-node", "1", "--", "echo", "hello")
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )

    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


def test_a_cluster_that_is_started_with_its_signals_blocked_ends_and_hears(tmp_path: Path):
    blocked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); " + RUN
    command = [sys.executable, "-c", blocked, "cluster", "--quiet", "--nodes", "2", "--ranks-per-node", "1", "--"]
    quiet = "exec >&- 2>&-; sleep 0.5; exit 3"  # its output ends before it does, so that only SIGCHLD tells
    done = subprocess.run([*command, "sh", "-c", quiet], env=environment(), cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 3

    started = tmp_path / "started"
    program = f"touch {started}; exec sleep 1000"
    running = subprocess.Popen([*command, "sh", "-c", program], env=environment(), cwd=ROOT)
    try:
        give_up_at = time.monotonic() + HANG_S
        while not started.exists():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
    finally:
        running.terminate()
    assert running.wait(HANG_S) == 128 + signal.SIGTERM
