"""An ordinary user gets the same cluster as root, through a user namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mpi_world
import pytest
from cluster_runs import PACKET_BYTES, SEND, Cluster, environment, needs_namespaces

NOBODY = 54_321  # a user that exists nowhere

BECOME = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


@pytest.fixture(scope="module")
def python() -> str:
    """A Python of this version that the made-up user may run and that finds what this one imports."""
    if os.geteuid() != 0:
        pytest.skip("not root: the other tests of the cluster are rootless already")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv of util-linux is not there to become another user")
    same_version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for candidate in (sys.executable, f"/usr/bin/{same_version}", f"/usr/local/bin/{same_version}"):
        try:
            tried = subprocess.run(
                # sh in between: setpriv itself may still open what the user may not
                [*BECOME, "sh", "-c", 'exec "$0" -c "import zcomm.tools.cluster, pyroute2"', candidate],
                env=environment(PYTHONDONTWRITEBYTECODE="1"),
                capture_output=True,
            )
        except OSError:
            continue
        if tried.returncode == 0:
            return candidate
    pytest.skip("no Python that an ordinary user may run with these packages")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the made-up user's own."""
    made = Path(tempfile.mkdtemp(prefix="zcomm-rootless-"))
    os.chown(made, NOBODY, NOBODY)
    yield made
    shutil.rmtree(made)


@needs_namespaces
def test_an_ordinary_user_gets_a_shaped_and_counted_cluster(python: str, folder: Path):
    tried = subprocess.run([*BECOME, "unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True)
    if tried.returncode != 0:
        pytest.skip(f"this machine allows ordinary users no namespaces: {tried.stderr.decode().strip()}")
    ended = Cluster(
        *("--json", str(folder / "out.json"), "--quiet", "--namespaces", "require", "--link", "50mbit"),
        *("--", python, "-c", SEND, "2", "1000000"),
        python=python,
        before=BECOME,
        PYTHONDONTWRITEBYTECODE="1",
    ).finish()

    assert ended.status == 0, ended.err
    report = json.loads((folder / "out.json").read_text())
    assert report["namespaces"].startswith("rootless")
    sender = report["per_node"][0]
    assert 1_000_000 <= sender["tx_bytes"] <= 1_050_000 + sender["resent_segments"] * PACKET_BYTES
    assert json.loads(ended.out)["seconds"] > (1_000_000 - 32 * 1024) * 8 / 50e6
    assert not ended.left_behind()


@needs_namespaces
@pytest.mark.skipif(mpi_world.why_not() is not None, reason=str(mpi_world.why_not()))
def test_an_ordinary_user_s_mpi_ranks_are_spread_over_the_nodes(python: str, folder: Path):
    ended = Cluster(
        *("--quiet", "--namespaces", "require", "--mpi", "--", "sh", "-c", "echo $RANK on $NODE_RANK"),
        python=python,
        before=BECOME,
        PYTHONDONTWRITEBYTECODE="1",
        TMPDIR=str(folder),
        PATH=os.pathsep.join([str(Path(mpi_world.mpiexec() or "").parent), os.environ["PATH"]]),
    ).finish()

    assert sorted(ended.out.splitlines()) == ["0 on 0", "1 on 0", "2 on 1", "3 on 1"], ended.err
    assert ended.status == 0


def test_an_ordinary_user_gets_the_fallback(python: str):
    ended = Cluster(
        *("--namespaces", "off", "--link", "50mbit", "--quiet", "--"),
        *(python, "-c", "from zcomm.tools.cluster_counters import node_counters as n; print(n().tx_bytes)"),
        python=python,
        before=BECOME,
        PYTHONDONTWRITEBYTECODE="1",
    ).finish()

    assert ended.out == "0\n" * 4, ended.err
    assert ended.status == 0
