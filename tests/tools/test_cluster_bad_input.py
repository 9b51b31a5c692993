"""Each wrong request is one clear line and status 2, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zcomm.errors import ClusterError, MissingExtra
from zcomm.tools import cli, cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The current folder, with a script that is not executable; starting anything is a failure."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('hello')\n")

    def started(*_: object) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(cluster, "find_namespaces", started)
    monkeypatch.setattr(cluster, "_Run", started)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--link", "0", "--", "true"], "carries nothing"),
        (["--link", "0mbit", "--", "true"], "carries nothing"),
        (["--link=-5mbit", "--", "true"], "carries nothing"),
        (["--link", "200", "--", "true"], "no unit; write 200mbit"),
        (["--link", "fast", "--", "true"], "not a number with a unit"),
        (["--link", "", "--", "true"], "not a number with a unit"),
        (["--link", "nan", "--", "true"], "not a number with a unit"),
        (["--link", "200mbyte", "--", "true"], "unknown unit 'mbyte'"),
        (["--link", "1bit", "--", "true"], "expected 8kbit to 32gbit"),
        (["--link", "100gbit", "--", "true"], "expected 8kbit to 32gbit"),
        (["--latency", "1", "--", "true"], "no unit; write 1ms"),
        (["--latency=-1ms", "--", "true"], "expected 0 to 10 s"),
        (["--latency", "1min", "--", "true"], "unknown unit 'min'"),
        (["--nodes", "0", "--", "true"], "nodes is 0; expected 1 to 8"),
        (["--nodes", "-1", "--", "true"], "nodes is -1; expected 1 to 8"),
        (["--nodes", "9", "--", "true"], "nodes is 9; expected 1 to 8"),
        (["--nodes", "two", "--", "true"], "'two' is not a whole number"),
        (["--nodes", "1.5", "--", "true"], "'1.5' is not a whole number"),
        (["--ranks-per-node", "0", "--", "true"], "ranks per node is 0; expected 1 to 8"),
        (["--ranks-per-node", "many", "--", "true"], "'many' is not a whole number"),
        (["--timeout", "0", "--", "true"], "expected a positive number"),
        (["--timeout", "soon", "--", "true"], "not a number of seconds"),
        ([], "no program was given"),
        (["--nodes", "2", "--"], "no program was given"),
        (["--", "no-such-program-anywhere"], "does not exist"),
        (["--", ""], "the program '' does not exist"),
        (["--", "./no-such-file"], "does not exist"),
        (["--", "./train.py"], "not an executable file; run it by its interpreter, as in: python ./train.py"),
        (["--", "train.py"], "run as: python train.py"),
        (["--", "."], "is a folder"),
        (["--json", "/no-such-folder/x.json", "--", "true"], "does not exist"),
        (["--json", ".", "--", "true"], "is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_status_2(words: list[str], said: str, folder: Path, capsys):
    status = cli.main(["cluster", *words])

    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("zcomm: ")
    assert said in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_json_path_without_permission_is_refused_first(folder: Path, capsys):
    folder.chmod(0o500)
    status = cli.main(["cluster", "--json", "x.json", "--", "true"])
    folder.chmod(0o700)

    assert status == 2
    assert "permission denied" in capsys.readouterr().err


def test_a_missing_pyroute2_names_the_extra(monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    monkeypatch.setattr(cluster, "find_namespaces", lambda: cluster.Namespaces((), False, True))

    with pytest.raises(MissingExtra, match=r"zcomm-collectives\[tools\]"):
        cluster.run(["true"], cluster.ClusterSpec())


def test_another_system_than_linux_is_refused(monkeypatch):
    monkeypatch.setattr(cluster.sys, "platform", "darwin")

    with pytest.raises(ClusterError, match="needs Linux; this is darwin"):
        cluster.run(["true"], cluster.ClusterSpec())
