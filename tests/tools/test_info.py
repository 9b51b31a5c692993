"""zcomm info: never fails, says why not, imports nothing that takes long."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cluster_runs import environment

from zcomm.tools import cli, info
from zcomm.tools.cluster_namespaces import Refused


def findings(*words: str) -> dict[tuple[str, str], dict[str, object]]:
    told = subprocess.run(
        [sys.executable, "-m", "zcomm", "info", "--json", *words],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return {(found["group"], found["name"]): found for found in json.loads(told.stdout)}


def test_it_names_machine_engines_packages_and_cluster():
    found = findings()

    assert {"machine", "engines", "packages", "cluster"} <= {group for group, _ in found}
    assert found["engines", "reference"]["works"] is True
    assert found["machine", "python"]["detail"].startswith(".".join(map(str, sys.version_info[:3])))
    assert {name for group, name in found if group == "packages"} >= {"torch", "mpi4py", "cupy", "pyroute2"}


def test_it_imports_no_torch():
    code = (
        "import sys; from zcomm.tools import info; info.find_out(probe=False);"
        "print([m for m in ('torch', 'cupy', 'mpi4py') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)

    assert told.stdout == "[]\n", told.stderr


def test_a_package_that_is_missing_names_its_extra(monkeypatch):
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    found = {finding.name: finding for finding in info._packages()}

    assert not found["cupy"].works
    assert "zcomm-collectives[cuda]" in found["cupy"].detail
    assert "zcomm-collectives[torch]" in found["torch"].detail


def test_refused_namespaces_are_told_with_the_reason(monkeypatch):
    monkeypatch.setattr("zcomm.tools.cluster_namespaces.find_namespaces", lambda: Refused("the moon is full"))
    found = info._cluster()

    assert [finding.works for finding in found] == [False]
    assert "the moon is full" in found[0].detail


@pytest.mark.parametrize("part", ["_machine", "_engines", "_packages", "_cluster"])
def test_a_probe_that_breaks_is_a_line_not_a_crash(part: str, monkeypatch, capsys):
    def broken() -> list[info.Finding]:
        raise OSError("broken disk")

    monkeypatch.setattr(info, part, broken)
    status = cli.main(["info"])

    assert status == 0
    assert "broken disk" in capsys.readouterr().out


def test_probing_asks_the_packages_themselves(monkeypatch):
    monkeypatch.setattr(info, "_cluster", list)
    asked = {finding.name: finding for finding in info.find_out(probe=True) if finding.group == "asked"}

    assert set(asked) == {"torch", "mpi4py", "cupy"}
    assert all(finding.detail for finding in asked.values())
