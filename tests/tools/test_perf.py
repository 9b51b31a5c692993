"""zcomm perf as people start it: what it asks for, what it writes; bytes are the codec's, and nothing is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_runs import HANG_S, environment, needs_namespaces, run_cluster

import zcomm
from zcomm.tools import cli, perf
from zcomm.tools.perf_options import read_sizes
from zcomm.tools.perf_row import Counted, Form, Measured, judge
from zcomm.tools.perf_truth import Check
from zcomm.tools.perf_world import find_launcher

KIB = 1 << 10
PERF = (sys.executable, "-m", "zcomm", "perf")

# -- the request ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64K", [64 * KIB]),
        ("1M,64k,100", [100, 64 * KIB, 1024 * KIB]),
        ("64K:64M", [64 * KIB * 4**n for n in range(6)]),
        ("1KiB:8KB:2", [KIB, 2 * KIB, 4 * KIB, 8 * KIB]),
    ],
)
def test_sizes_are_lists_and_ranges(text: str, sizes: list[int]):
    assert list(read_sizes(text)) == sizes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all_to_all"], "no collective is called 'all_to_all' here; expected all_reduce, all_gather, reduce_scatter"),
        (["all_reduce", "--codec", "int9"], "no codec is spelled 'int9'"),
        (["all_reduce", "--codec", "int8,"], "--codec 'int8,' has an empty place"),
        (["all_reduce", "--sizes", "big"], "--sizes has 'big'; expected bytes, as in 65536, 64K, 16M or 1G"),
        (["all_reduce", "--sizes", "0"], "--sizes has '0'"),
        (["all_reduce", "--sizes", "1M:64K"], "which ends before it begins"),
        (["all_reduce", "--sizes", "1K:1M:1"], "expected FIRST:LAST or FIRST:LAST:FACTOR"),
        (["all_reduce", "--hops", "3"], "--hops are 1, 2 or 1,2, got '3'"),
        (["all_reduce", "--calls", "0"], "--calls must be a whole number of at least 1, got '0'"),
        (["all_reduce", "--seconds", "long"], "--seconds must be a time of 0 or more, got 'long'"),
        (["all_reduce", "--seconds", "-1"], "--seconds must be a time of 0 or more, got '-1'"),
        (["all_reduce", "--seconds", "inf"], "--seconds must be a time of 0 or more, got 'inf'"),
        (["all_reduce", "--link", "100"], "link '100' has no unit"),
        (["all_reduce", "--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["all_reduce"], "use one of: zcomm cluster --nodes 2"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(words, said, capsys, monkeypatch):
    for name in ("RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)

    assert cli.main(["perf", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_one_rank_says_it_for_all(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(perf, "FIRST_SPEAKS_S", 0)

    assert cli.main(["perf", "nonsense"]) == 2
    assert capsys.readouterr().err == ""


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
CLUSTER = {"RANK": "2", "WORLD_SIZE": "4", "ZCOMM_CLUSTER": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "name", "is_mpi", "rank"),
    [
        (TORCHRUN, "torchrun", False, 1),
        (CLUSTER, "zcomm cluster", False, 2),
        (MPICH, "a PMI launcher", True, 3),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, "Open MPI", True, 2),
        (MPICH | {"ZCOMM_CLUSTER": "1", "RANK": "3"}, "a PMI launcher", True, 3),  # an MPI program on the cluster
        (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, "torchrun", False, 1),  # one torchrun per Slurm task
        (CLUSTER | {"SLURM_STEP_NUM_TASKS": "1"}, "zcomm cluster", False, 2),  # in an interactive Slurm step
    ],
)
def test_the_launcher_is_known_by_its_environment(variables, name, is_mpi, rank):
    found = find_launcher(variables)

    assert found.name.startswith(name)
    assert (found.is_mpi, found.rank) == (is_mpi, rank)


# -- a short run ------------------------------------------------------------------------------------------------------

SIZES = (64 * KIB, 256 * KIB)
COLLECTIVES = ("all_reduce", "reduce_scatter")  # all three on threads: test_perf_measure.py
CODECS = ("raw", "bf16", "int4:64")


@pytest.fixture(scope="module")
def perf_run(tmp_path_factory):
    """Two collectives at two sizes on 2 x 2 ranks: standard output, JSON, picture."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("perf")
    options = ["--sizes", "64K,256K", "--codec", "int4:64", "--calls", "1", "--link", "none"]
    files = ["--json", str(folder / "perf.json"), "--plot", str(folder / "perf.png")]
    ended = run_cluster("--quiet", "--", *PERF, *COLLECTIVES, *options, *files)
    assert ended.status == 0, ended.out + ended.err
    return ended.out, json.loads((folder / "perf.json").read_text()), folder / "perf.png"


@pytest.mark.slow
@needs_namespaces
def test_no_element_of_any_form_is_wrong(perf_run):
    _, found, _ = perf_run

    assert len(found["rows"]) == len(COLLECTIVES) * len(SIZES) * (2 + 2 * len(CODECS))
    for row in found["rows"]:
        assert row["wrong_elems"] == 0, row
        assert row["replicas_equal"] is (None if row["collective"] == "reduce_scatter" else True)
        assert 0 <= row["max_error_over_bound"] <= 1
        assert row["time_ms"] > 0
        assert row["node_tx_bytes"] > 0
    assert any(row["max_error"] > 0.1 for row in found["rows"] if row["codec"] == "int4:64")


@pytest.mark.slow
@needs_namespaces
def test_wire_bytes_are_the_codec_s_summed_by_level(perf_run):
    """docs/numbers.md, bytes sent, with K = 2 nodes of L = 2 ranks."""
    _, found, _ = perf_run
    by_hops = {1: (1, 2), 2: (2, 1)}  # shards sent inside the node, and to the other
    checked = 0
    for row in found["rows"]:
        if row["by"] != "zcomm":
            assert row["wire_bytes_intra"] is row["wire_bytes_inter"] is None
            continue
        passes = 2 if row["collective"] == "all_reduce" else 1
        shard = row["size_bytes_total"] // 4 // 4
        c = zcomm.codec(row["codec"]).nbytes(shard)
        intra, inter = (passes * shards * c for shards in by_hops[row["hops"]])
        everything = zcomm.codec(row["codec"]).nbytes(4 * shard)
        if row["collective"] == "all_reduce" and 3 * everything <= 32 * KIB:
            intra, inter = everything, 2 * everything  # one exchange, whatever the hops
        elif row["collective"] == "all_reduce" and row["hops"] == 2 and everything <= 16 * 32 * KIB:
            half = zcomm.codec(row["codec"]).nbytes(2 * shard)
            intra, inter = 3 * half, half  # two nodes swap their sums
        if row["collective"] != "all_reduce" and 3 * c <= 8 * KIB:
            intra, inter = c, 2 * c

        assert (row["wire_bytes_intra"], row["wire_bytes_inter"]) == (intra, inter)
        assert row["link_bytes"] == 2 * inter
        assert row["compression_ratio"] == pytest.approx(4 * shard / c)
        assert row["node_tx_bytes"] >= row["link_bytes"]  # headers come on top
        checked += 1
    assert checked == len(COLLECTIVES) * len(SIZES) * 2 * len(CODECS)


@pytest.mark.slow
@needs_namespaces
def test_rows_say_sizes_bandwidths_and_baseline_in_named_units(perf_run):
    _, found, _ = perf_run
    assert found["about"]["launcher"] == "zcomm cluster"
    assert found["about"]["world_size"] == 4
    for size in SIZES:
        for collective in COLLECTIVES:
            rows = [r for r in found["rows"] if (r["size_bytes_total"], r["collective"]) == (size, collective)]
            uncompressed = {row["form"]: row for row in rows if row["verdict"] == "uncompressed"}
            assert set(uncompressed) == {
                *("gloo fp32", "gloo bf16"),
                *("flat raw", "two hops raw", "flat bf16", "two hops bf16"),
            }
            best = min(uncompressed.values(), key=lambda row: row["time_ms"])
            for row in rows:
                seconds = row["time_ms"] / 1e3
                assert row["size_bytes_per_rank"] == size // (1 if collective == "all_reduce" else 4)
                assert row["algbw_gb_s"] == pytest.approx(size / seconds / 1e9)
                assert row["busbw_gb_s"] == pytest.approx(
                    size / seconds / 1e9 * (1.5 if collective == "all_reduce" else 0.75)
                )
                assert row["best_uncompressed"] == best["form"]
                assert row["speedup_over_best_uncompressed"] == pytest.approx(best["time_ms"] / row["time_ms"])
                assert row["speedup_over_gloo_bf16"] == pytest.approx(
                    uncompressed["gloo bf16"]["time_ms"] / row["time_ms"]
                )
                if row["codec"] == "int4:64":
                    assert row["verdict"] in ("faster", "about equal", "slower")
                    assert row["break_even"] is not None
                    assert row["wire_bandwidth_gb_s"] < row["algbw_gb_s"]


@pytest.mark.slow
@needs_namespaces
def test_the_table_has_nccl_tests_columns_and_ends_in_words(perf_run):
    out, _, _ = perf_run
    lines = out.splitlines()
    head = next(line for line in lines if "busbw" in line and "#wrong" in line)

    assert head.split()[:3] == ["#", "size", "count"]
    assert all(word in head for word in ("type", "redop", "time", "algbw", "codec", "ratio", "of bound", "break-even"))
    assert len([line for line in lines if not line.startswith("#")]) == len(COLLECTIVES) * len(SIZES) * 8
    for collective in COLLECTIVES:
        assert any(line.startswith(f"# {collective}, two hops int4:64: ") for line in lines)


@pytest.mark.slow
@needs_namespaces
def test_the_picture_is_drawn(perf_run):
    assert perf_run[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_under_mpiexec_mpi_s_own_fp32_is_among_the_baselines(tmp_path):
    pytest.importorskip("mpi4py")
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python")
    words = ["all_reduce", "--sizes", "64K", "--codec", "int8", "--calls", "1", "--json", str(tmp_path / "perf.json")]

    ended = subprocess.run(
        [mpiexec, "-n", "2", *PERF, *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "perf.json").read_text())["rows"]
    assert [row["form"] for row in rows] == ["mpi fp32", "flat raw", "flat bf16", "flat int8"]
    assert [row["wrong_elems"] for row in rows] == [0] * 4
    assert all(row["speedup_over_mpi_fp32"] > 0 for row in rows)


def test_a_picture_of_one_size_and_many_codecs(tmp_path):
    pytest.importorskip("matplotlib")
    from zcomm.tools import perf_plot

    forms = [Form("gloo", "bf16"), *(Form("zcomm", f"int{bits}", hops) for bits in range(2, 9) for hops in (1, 2))]
    counted = Counted(1, 1, 4, 2, 0.001)
    found = [Measured("all_gather", form, 4, KIB, (0.01,), Check(0, 0, 0), True, counted, None) for form in forms]

    perf_plot.draw("all at once", judge(found), tmp_path / "perf.svg")

    assert "</svg>" in (tmp_path / "perf.svg").read_text()
