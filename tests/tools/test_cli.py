"""The command line's frame: subcommands, versions, errors in one line."""

from __future__ import annotations

import signal
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


ECHO = ("cluster", "--namespaces", "off", "--nodes", "1", "--quiet", "--", "sh", "-c", "echo out; echo err >&2")


@pytest.mark.parametrize("words", [("info",), ECHO], ids=["info", "cluster"])
@pytest.mark.parametrize(("redirection", "status"), [("> /dev/full", 2), (">&-", 0), ("> /dev/full 2>&1", 2)])
def test_output_that_cannot_be_written_is_said_in_a_line(words, redirection, status):
    command = f'exec "$@" {redirection}'
    ended = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-m", "zcomm", *words],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )

    told = [line for line in ended.stderr.splitlines() if line != "err" and "NAMESPACES" not in line]
    full = "zcomm: standard output cannot be written: No space left on device"
    assert told == ([full] if redirection == "> /dev/full" else [])
    assert ended.returncode == status


# Ctrl-C comes as argv[1] is imported; the rest is a command line of zcomm
INTERRUPT = """
import os, runpy, signal, sys
class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == awaited:
            os.kill(os.getpid(), signal.SIGINT)
awaited = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
sys.meta_path.insert(0, CtrlC())
runpy.run_module("zcomm", run_name="__main__")
"""


@pytest.mark.parametrize("awaited", ["zcomm.tools.cli", "argparse", "zcomm.tools.cluster", "zcomm.tools.cluster_mpi"])
def test_ctrl_c_while_modules_are_imported_shows_no_traceback(awaited):
    command = [sys.executable, "-c", INTERRUPT, awaited, "cluster", "--help"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)

    assert ended.stderr == ended.stdout == ""
    assert ended.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
