"""Programs of bench/ run, on sizes that take no time, and write rows that say what they are.

training.py runs in tests/tools/test_demo.py.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mpi_world
import pytest

sys.path.insert(0, str(Path(__file__).parent / "tools"))

from cluster_runs import HANG_S, ROOT, environment, needs_namespaces

import zcomm
from zcomm.engines import native

PROGRAMS = ("collectives", "kernels", "mpi", "overhead")
ABOUT = {"command", "zcomm", "python", "numpy", "engine", "cpu", "cores", "load_average", "platform"}


def rows_of(folder: Path, program: str, *words: str) -> list[dict[str, Any]]:
    """What a program writes; it says what ran."""
    written = folder / "rows.json"
    command = [sys.executable, str(ROOT / "bench" / program), *words, "--json", str(written)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(written.read_text())

    assert found["about"].keys() >= ABOUT
    assert found["about"]["command"].startswith(f"python bench/{program} ")
    return list(found["rows"])


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        *(
            (f"{name}.py", ("--json", "/no/such/x.json"), "--json /no/such/x.json cannot be written")
            for name in PROGRAMS
        ),
        ("collectives.py", ("--links", "none,fast"), "link 'fast' is not a number with a unit"),
        ("mpi.py", ("--links", "none,fast"), "link 'fast' is not a number with a unit"),
        ("mpi.py", ("--nodes", "0"), "nodes is 0; expected 1 to 8"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(program, words, said):
    command = [sys.executable, str(ROOT / "bench" / program), *words]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False)

    assert ended.returncode == 2
    assert f"error: {said}" in ended.stderr
    assert ended.stdout == ""


def test_overhead(tmp_path):
    rows = rows_of(tmp_path, "overhead.py", "--calls", "3", "--nbytes", "1000")

    found = [(row["way"], row["codec"], row["collective"]) for row in rows]
    collectives = ("all_reduce", "all_gather", "reduce_scatter")
    ways = ("one exchange", "one hop", "two hops")
    assert found == [(way, c, name) for way in ways for c in ("raw", "int8", "int4") for name in collectives]
    assert {row["nbytes"] for row in rows} == {992}  # four equal shards
    assert all(0 < row["median_us"] <= row["p90_us"] for row in rows)


def test_kernels(tmp_path):
    if why := native.why_missing():
        pytest.skip(why)
    words = ("--n", "1Ki", "--rounds", "1", "--engines", "native,reference,torch", "--only", "int8")
    rows = rows_of(tmp_path, "kernels.py", *words)

    engines = [f"native {build}" for build in native.builds()] + ["reference"]
    engines += ["torch eager"] if importlib.util.find_spec("torch") else []
    float32 = [row for row in rows if row["dtype"] == "float32"]
    assert {row["engine"] for row in float32} == set(engines)
    assert [row["op"] for row in float32[:4]] == ["encode", "decode", "reduce", "reduce_encode"]
    assert {row["exact"] for row in rows if row["engine"] != "torch eager"} == {True}
    wire_nbytes = zcomm.codec("int8").nbytes(1024)
    moved = [4096 + wire_nbytes, wire_nbytes + 4096, 4 * wire_nbytes + 4096, 5 * wire_nbytes]
    assert [row["moved_nbytes"] for row in float32[:4]] == moved
    for row in rows:
        assert row["rate_gb_s"] == pytest.approx(row["moved_nbytes"] / row["time_us"] / 1e3, abs=0.01, rel=0.01)


@needs_namespaces
def test_collectives(tmp_path):
    pytest.importorskip("torch")
    words = ("--links", "none", "--sizes", "64K", "--collectives", "all_gather", "--codec", "int8", "--calls", "1")
    rows = rows_of(tmp_path, "collectives.py", *words, "--ranks-per-node", "1")

    assert [row["form"] for row in rows] == ["gloo fp32", "gloo bf16", "flat raw", "flat bf16", "flat int8"]
    assert [row["wrong_elems"] for row in rows] == [0] * 5
    assert rows[-1]["wire_bytes_inter"] == zcomm.codec("int8").nbytes(65536 // 4 // 2)


@needs_namespaces
@pytest.mark.skipif(mpi_world.why_not() is not None, reason=str(mpi_world.why_not()))
def test_mpi(tmp_path):
    n = 50_000
    words = ("--links", "none,1gbit", "--sizes", str(4 * n), "--forms", "MPI fp32,int8", "--calls", "5")
    rows = rows_of(tmp_path, "mpi.py", *words, "--ranks-per-node", "1")

    assert [(row["link"], row["form"]) for row in rows] == [
        (link, form) for link in ("none", "1gbit") for form in ("MPI fp32", "int8")
    ]
    for plain, int8 in (rows[:2], rows[2:]):
        assert plain["max_error"] < 1e-6 < int8["max_error"] < 0.1
        assert zcomm.codec("int8").nbytes(n) < int8["node_tx_bytes"] < plain["node_tx_bytes"] / 3
        assert int8["speedup_over_mpi"] == pytest.approx(plain["time_ms"] / int8["time_ms"])
