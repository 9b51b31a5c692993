"""zcomm perf started in environments that do not fit: one line, and no wait for ranks that cannot be."""

from __future__ import annotations

import re

import pytest

from zcomm.tools import cli, perf
from zcomm.tools.perf_world import RANK_VARIABLES

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMI_SIZE")
OF_LAUNCHERS += ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", *RANK_VARIABLES)


def start(monkeypatch, variables: str) -> None:
    """As a launcher does, by variables and nothing else."""
    for name in OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("RANK=abc WORLD_SIZE=2", "RANK=abc and WORLD_SIZE=2 do not fit: expected a rank from 0 to below the size"),
        ("RANK=0 WORLD_SIZE=two", "RANK=0 and WORLD_SIZE=two do not fit"),
        ("RANK=-1 WORLD_SIZE=2", "RANK=-1 and WORLD_SIZE=2 do not fit"),
        ("RANK=² WORLD_SIZE=2", "RANK=² and WORLD_SIZE=2 do not fit"),
        ("TORCHELASTIC_RUN_ID=x", "RANK= and WORLD_SIZE= do not fit"),
        ("RANK=0 WORLD_SIZE=2", "torch cannot join the ranks: .*MASTER_ADDR"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=http", "torch cannot join the ranks: .*'http'"),
        ("PMI_SIZE=2", r"a PMI launcher .* \(PMI_SIZE=2\) said no rank; expected a number in PMI_RANK or "),
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=first", r"Open MPI's .* said no rank; expected a number in"),
        ("SLURM_STEP_NUM_TASKS=²", "no launcher started this process"),
    ],
)
def test_variables_that_make_no_sense_are_one_line_and_status_2(variables, said, monkeypatch, capsys):
    pytest.importorskip("torch")
    start(monkeypatch, variables)

    assert cli.main(["perf", "all_reduce"]) == 2
    err = capsys.readouterr().err
    assert re.match(f"zcomm: .*{said}", err)
    assert err.count("\n") == 1


def test_a_rank_beyond_the_world_leaves_at_once(monkeypatch, capsys):
    start(monkeypatch, "RANK=5 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1")
    monkeypatch.setattr(perf, "FIRST_SPEAKS_S", 0)  # rank 0 would say it

    assert cli.main(["perf", "all_reduce"]) == 2
    assert capsys.readouterr().err == ""
