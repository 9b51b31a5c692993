"""The command line's frame: subcommands, versions, errors in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cluster_runs import environment

from zcomm.errors import ClusterError
from zcomm.tools import cli, info


def zcomm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "zcomm", *words], env=environment(), capture_output=True, text=True)


def test_version_and_help():
    assert zcomm("--version").stdout.startswith("zcomm ")
    listed = zcomm("--help").stdout
    assert all(name in listed for name in cli.SUBCOMMANDS)


@pytest.mark.parametrize("words", [(), ("nonsense",), ("cluster", "--nonsense", "--", "true")])
def test_a_wrong_command_line_is_status_2(words: tuple[str, ...]):
    ended = zcomm(*words)

    assert ended.returncode == 2
    assert "usage: zcomm" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", list(cli.SUBCOMMANDS))
def test_every_subcommand_has_help(name: str):
    ended = zcomm(name, "--help")

    assert ended.returncode == 0, ended.stderr
    assert f"usage: zcomm {name}" in ended.stdout


def test_an_error_of_zcomm_is_one_line_and_status_2(monkeypatch, capsys):
    def fail(_: object) -> int:
        raise ClusterError("three came, two were expected")

    monkeypatch.setattr(info, "run", fail)

    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err == "zcomm: three came, two were expected\n"
