"""zcomm perf end to end on three ranks that are threads, beside a library that can be told to go wrong."""

from __future__ import annotations

import argparse
import json
import threading
from typing import Any

import numpy as np
import pytest

from zcomm import local
from zcomm.errors import ZcommError
from zcomm.tools import perf, perf_options
from zcomm.tools.perf_world import Launcher

SIZE = 3


class Meeting:
    """Where ranks bring values and take everybody's."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=300)
        self.brought: list[Any] = [None] * SIZE

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class ThreadWorld:
    """Ranks of zcomm.local; the library adds in float64, then does to its result what `fault` does."""

    library = "threads"
    versions = "threads"
    own_dtypes: tuple[str, ...] = ("float32",)

    def __init__(self, transport: Any, meeting: Meeting, fault: Any) -> None:
        self.group, self.rank, self.size = transport, transport.rank, transport.size
        self._meeting, self._fault = meeting, fault

    def array(self, values: np.ndarray, dtype: str) -> np.ndarray:
        return values.copy()

    def numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def own(self, collective: str, output: np.ndarray, input: np.ndarray) -> None:
        every = self.gather(input.copy())
        whole = np.concatenate(every) if collective == "all_gather" else np.sum(every, axis=0, dtype=np.float64)
        output[:] = whole.reshape(SIZE, -1)[self.rank] if collective == "reduce_scatter" else whole
        self._fault(self.rank, output)

    def synchronize(self) -> None:
        pass

    def barrier(self) -> None:
        self._meeting.barrier.wait()

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.gather(self.rank, value)

    def close(self) -> None:
        pass


def run_perf(tmp_path: Any, *words: str, fault: Any = lambda rank, output: None) -> tuple[list[int], dict[str, Any]]:
    """Exit status of every rank, and rows by form."""
    parser = argparse.ArgumentParser()
    perf.add_arguments(parser)
    written = tmp_path / "perf.json"
    options = perf_options.read_options(parser.parse_args(["--calls", "1", "--json", str(written), *words]))
    meeting = Meeting()

    def program(transport):
        world = ThreadWorld(transport, meeting, fault)
        return perf.measure(options, Launcher("the test", False, world.rank), world)

    statuses = local.run(SIZE, program)
    rows = json.loads(written.read_text())["rows"] if written.exists() else []
    return statuses, {row["form"]: row for row in rows}


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_three_ranks_and_a_size_that_they_cannot_share_evenly(collective, tmp_path):
    statuses, rows = run_perf(tmp_path, collective, "--sizes", "50000", "--codec", "int8,int3:64")

    assert statuses == [0] * SIZE
    assert list(rows) == ["threads fp32", "flat raw", "flat bf16", "flat int8", "flat int3:64"]
    for row in rows.values():
        assert row["size_bytes_total"] == 49_992  # 3 ranks x 4166 elements x 4 bytes
        assert row["wrong_elems"] == 0
        assert row["replicas_equal"] in (True, None)


def test_a_size_beyond_the_machine_s_memory_is_refused(tmp_path):
    with pytest.raises(
        ZcommError, match=r"--sizes goes up to 107374182400000000 bytes; the memory of this machine has"
    ):
        run_perf(tmp_path, "all_reduce", "--sizes", "64K,100000000G")


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (("--calls", "5", "--seconds", "0"), 3),
        (("--calls", "2", "--seconds", "0"), 2),
        ((), 1),
        (("--calls", "1000000000000", "--seconds", "0"), 3),  # more than could be counted to
    ],
)
def test_a_form_makes_three_calls_however_little_time_it_may_take(asked, made, tmp_path):
    _, rows = run_perf(tmp_path, "all_gather", "--sizes", "96K", "--codec", "int8", *asked)

    assert [row["calls"] for row in rows.values()] == [made] * 4


def test_one_wrong_element_on_every_rank_is_counted_once_and_is_no_baseline(tmp_path, capsys):
    def fault(rank: int, output: np.ndarray) -> None:
        output[5000] += 0.001

    statuses, rows = run_perf(tmp_path, "all_reduce", "--sizes", "96K", "--codec", "int8", fault=fault)

    assert statuses == [1] * SIZE
    assert (rows["threads fp32"]["wrong_elems"], rows["threads fp32"]["verdict"]) == (1, "wrong")
    assert rows["flat int8"]["best_uncompressed"] != "threads fp32"
    assert "wrong: 96 KiB (elements off by more than their bound: 1)" in capsys.readouterr().out


def test_replicas_that_differ_are_found_even_where_nobody_checks_the_element(tmp_path, capsys):
    def fault(rank: int, output: np.ndarray) -> None:
        if rank == 2:
            output[0] += 1  # rank 0 checks this part, and has it right

    statuses, rows = run_perf(tmp_path, "all_gather", "--sizes", "96K", "--codec", "int8", fault=fault)

    assert statuses == [1] * SIZE
    assert rows["threads fp32"]["wrong_elems"] == 0
    assert rows["threads fp32"]["replicas_equal"] is False
    assert "DIFFER" in capsys.readouterr().out


def test_a_result_that_never_came_is_wrong(tmp_path):
    def fault(rank: int, output: np.ndarray) -> None:
        if rank == 1:
            output[:] = np.nan

    statuses, rows = run_perf(tmp_path, "reduce_scatter", "--sizes", "96K", "--codec", "int8", fault=fault)

    assert statuses == [1] * SIZE
    assert rows["threads fp32"]["wrong_elems"] == 8192
    assert rows["threads fp32"]["max_error"] is None  # infinite


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hops", "2"], "--hops 2 needs several nodes, one of them with several ranks"),
        (["--plot", "perf.txt"], "expected a name that ends in .png, .svg, .pdf"),
        (["--plot", "/nowhere/perf.png"], "--plot /nowhere/perf.png cannot be written: the folder /nowhere"),
    ],
)
def test_what_only_the_ranks_can_find_is_one_line_and_status_2_on_every_rank(words, said, tmp_path, capsys):
    statuses, _ = run_perf(tmp_path, "all_reduce", *words)

    assert statuses == [2] * SIZE
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
