"""MPI programs on the emulated cluster: one world over all nodes, real bytes on the links, ends as of any program."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import mpi_world as mpi
import pytest
from cluster_runs import HANG_S, PACKET_BYTES, Cluster, needs_namespaces, run_cluster, run_with_report

from zcomm.errors import ClusterError
from zcomm.tools import cluster
from zcomm.tools.cluster_mpi import find_launcher

pytestmark = pytest.mark.skipif(mpi.why_not() is not None, reason=str(mpi.why_not()))

BOTH = [
    pytest.param((), id="namespaces", marks=needs_namespaces),
    pytest.param(("--namespaces", "off"), id="off"),
]
MPI = (sys.executable, "-c")
SLEEP = ("--mpi", "--", "sleep", "1000")

SHOW = """
import json, os, socket
from mpi4py import MPI
comm = MPI.COMM_WORLD
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE")
numbers = [int(os.environ[name]) for name in names]
print(json.dumps([comm.rank, comm.size, socket.gethostname(), numbers]))
"""
ALLREDUCE = """
import json, sys
import numpy, zcomm
from mpi4py import MPI
from zcomm.tools.cluster_counters import node_counters
comm = MPI.COMM_WORLD
x = numpy.ones(1 << 18, numpy.float32)
out = numpy.empty_like(x)

def bytes_of(call):
    comm.Barrier()
    before = node_counters()
    comm.Barrier()  # nobody sends before all have read
    call()
    comm.Barrier()
    return node_counters().since(before)

plain = bytes_of(lambda: comm.Allreduce(x, out))
with zcomm.mpi.Comm(comm, codec="int8") as compressed:
    compressed.Allreduce(x, out)
    compressed.reset_stats()
    sent = bytes_of(lambda: compressed.Allreduce(x, out))
    stats = compressed.stats()["all_reduce"]
    wire = comm.allreduce(stats.wire_bytes_inter) // 2
    nodes = compressed.communicator.topology.node_of_rank
if comm.rank == 0:
    found = {"plain": plain.tx_bytes, "sent": sent.tx_bytes, "resent_segments": sent.resent_segments}
    print(json.dumps({**found, "wire": wire, "nodes": nodes}))
"""


@pytest.fixture(params=BOTH)
def kind(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


@pytest.fixture(autouse=True)
def _no_file_stays(tmp_path: Path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    killed_open_mpi = ("ompi.", "prted.")  # what it leaves
    assert [path for path in folder.iterdir() if not path.name.startswith(killed_open_mpi)] == []


@needs_namespaces
def test_ranks_form_one_world_and_get_torchruns_variables():
    ended = run_cluster("--nodes", "2", "--ranks-per-node", "3", "--quiet", "--mpi", "--", *MPI, SHOW)

    seen = sorted(json.loads(line) for line in ended.out.splitlines())
    assert ended.status == 0, ended.err
    assert [numbers for *_, numbers in seen] == [[r, 6, r % 3, 3, r // 3, r // 3, 2] for r in range(6)]
    assert [(rank, size) for rank, size, *_ in seen] == [(rank, 6) for rank in range(6)]
    assert len({host for _, _, host, _ in seen}) in (1, 2)  # nodes have names where mounts are allowed


@needs_namespaces
def test_bytes_cross_the_link_and_are_those_that_zcomm_counts():
    ended = run_cluster("--quiet", "--mpi", "--", *MPI, ALLREDUCE)

    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    nbytes = 4 << 18
    assert found["nodes"] == [0, 0, 1, 1]
    assert found["plain"] >= nbytes  # MPI's own took the link too, not shared memory
    resent = found["resent_segments"] * PACKET_BYTES
    assert found["wire"] <= found["sent"] <= found["wire"] * 1.05 + 20_000 + resent
    assert found["wire"] < nbytes / 3


def test_the_fallback_paces_zcomms_bytes(tmp_path):
    ended = run_cluster("--namespaces", "off", "--quiet", "--mpi", "--", *MPI, ALLREDUCE)

    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert found["nodes"] == [0, 0, 1, 1]
    assert found["sent"] == found["wire"]  # no headers, and nobody charges for MPI's own
    assert found["plain"] == 0


@needs_namespaces
def test_output_is_each_ranks_own_and_crosses_no_link(tmp_path):
    shout = 'echo "rank $RANK of $0"; echo "error $RANK" >&2; [ $RANK = 3 ] && head -c 1000000 /dev/zero | tr "\\0" x'
    ended, report = run_with_report(
        tmp_path, "--quiet", "--prefix", "--mpi", "--", "sh", "-c", shout + "; exit 0", 'it\'s  "quoted" : $0'
    )

    lines = ended.out.splitlines()
    assert sorted(line for line in lines if " of " in line) == [
        f'[{rank}] rank {rank} of it\'s  "quoted" : $0' for rank in range(4)
    ]
    assert {f"[{rank}] error {rank}" for rank in range(4)} <= set(ended.err.splitlines())
    assert sum(line.count("x") for line in lines) == 1_000_000
    sender = report["per_node"][1]
    assert sender["tx_bytes"] < 100_000 + sender["resent_segments"] * PACKET_BYTES


@needs_namespaces
@pytest.mark.parametrize(
    ("failing", "status"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", 137),
        ("MPI.COMM_WORLD.Abort(5)", 5),
        ("sys.exit(3) if MPI.Finalize() is None else None", 3),
    ],
)
def test_the_first_failing_rank_gives_the_status(failing, status):
    program = (
        "import os, sys, time\nfrom mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank == 2: {failing}\n"
        "if 'Finalize' in sys.argv[1]: MPI.Finalize()\n"
        "time.sleep(1000)"
    )
    ended = run_cluster("--quiet", "--mpi", "--", *MPI, program, failing)

    assert ended.status == status
    assert f"ended with status {status}" in ended.err
    assert not ended.left_behind()


STAY = """
import os, sys, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
MPI.Finalize()
open(f"{sys.argv[1]}/there{rank}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/leave{rank}"):
    time.sleep(0.01)
"""


def wait_for(what) -> None:
    give_up_at = time.monotonic() + HANG_S
    while not what():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


@needs_namespaces
def test_ranks_that_leave_at_different_times_do_not_make_mpiexec_fall(tmp_path):
    """mpiexec hears late that a node's ranks have all left, and then of one more elsewhere, while another stays."""
    last, others = 2, (0, 1, 3, 4, 5)
    running = Cluster("--quiet", "--ranks-per-node", "3", "--mpi", "--", *MPI, STAY, str(tmp_path))
    wait_for(lambda: all((tmp_path / f"there{rank}").exists() for rank in range(6)))
    launchers = ("mpiexec", "prterun")  # MPICH's, Open MPI's
    (mpiexec,) = [pid for pid, words in running.processes().items() if words.partition(" ")[0].endswith(launchers)]
    os.kill(mpiexec, signal.SIGSTOP)
    for rank in others:
        (tmp_path / f"leave{rank}").touch()
    wait_for(lambda: len(programs(running)) == 1)
    time.sleep(0.2)  # for their proxies to leave too, if they would
    os.kill(mpiexec, signal.SIGCONT)
    time.sleep(0.2)  # for mpiexec to fall, if it would
    (tmp_path / f"leave{last}").touch()
    ended = running.finish()

    assert ended.status == 0, ended.err


def programs(running: Cluster) -> list[int]:
    """The ranks that still run STAY."""
    return [pid for pid, words in running.processes().items() if words.startswith(f"{sys.executable} -c {STAY[:20]}")]


def test_a_signal_ends_the_ranks(kind):
    running = Cluster(*kind, *SLEEP)
    running.ranks(4)
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()

    assert ended.status == 128 + signal.SIGINT
    assert not ended.left_behind()


@needs_namespaces
def test_a_signal_reaches_a_program_that_handles_it():
    handle = 'trap "echo saved $RANK; exit 0" TERM; sleep 1000 & wait'
    running = Cluster("--mpi", "--", "sh", "-c", handle)
    running.ranks(4)
    running.process.terminate()
    ended = running.finish()

    assert sorted(ended.out.splitlines()) == [f"saved {rank}" for rank in range(4)]
    assert ended.status == 0
    assert not ended.left_behind()


@needs_namespaces
def test_a_program_that_ignores_sigterm_is_killed():
    stubborn = 'trap "" TERM; [ $RANK = 0 ] && exit 9; sleep 1000'
    ended = run_cluster("--mpi", "--", "sh", "-c", stubborn)

    assert ended.status == 9
    assert not ended.left_behind()


def test_the_killed_command_takes_everything_with_it(kind):
    running = Cluster(*kind, *SLEEP)
    running.ranks(4)
    running.process.kill()

    assert not running.left_behind()
    running.finish()


def test_the_time_is_up():
    ended = run_cluster("--namespaces", "off", "--timeout", "2", *SLEEP)

    assert ended.status == 124
    assert not ended.left_behind()


def script(folder: Path, name: str, says: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "kind"), [("HYDRA build details:\n    Version: 5.0.2", "mpich"), ("mpiexec (Open MPI) 5.0.11", "openmpi")]
)
def test_the_mpiexec_beside_the_program_is_taken_first(tmp_path, says, kind):
    program = script(tmp_path, "program", "")
    beside = script(tmp_path, "mpiexec", says)

    assert find_launcher([str(program)], os.environ) == (str(beside), kind)


@pytest.mark.parametrize("says", ["mpiexec (OpenRTE) 4.1.4", "mpiexec (Open MPI) 4.1.4", "something else"])
def test_an_mpiexec_that_cannot_be_spread_over_nodes_is_refused(tmp_path, says):
    script(tmp_path, "mpiexec", says)
    program = script(tmp_path, "program", "")

    with pytest.raises(ClusterError, match="expected MPICH"):
        find_launcher([str(program)], os.environ)


def test_the_mpiexec_beside_this_python_is_the_last_resort(tmp_path, monkeypatch):
    ours = script(tmp_path, "mpiexec", "HYDRA")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    assert find_launcher(["sleep"], {"PATH": "/nowhere"}).path == str(ours)


def test_without_an_mpiexec_it_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    with pytest.raises(ClusterError, match=r"needs an mpiexec.*zcomm-collectives\[mpi\]"):
        cluster.run(
            [str(script(tmp_path, "program", ""))], cluster.ClusterSpec(), environment={"PATH": "/nowhere"}, mpi=True
        )
