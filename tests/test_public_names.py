"""The names that `import zcomm` offers: complete, sorted, documented, and of one version."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from impatience import AMPLE_S

import zcomm

ROOT = Path(__file__).parent.parent


def test_all_names_exist_and_nothing_else_is_public():
    assert len(set(zcomm.__all__)) == len(zcomm.__all__)
    assert set(dir(zcomm)) <= set(zcomm.__all__)
    if all(map(importlib.util.find_spec, ("torch", "mpi4py"))):
        assert dir(zcomm) == sorted(zcomm.__all__)
    for name in zcomm.__all__:
        assert getattr(zcomm, name) is not None


def test_calls_under_torch_s_names_are_listed_once_more_and_alike():
    torch_calls = pytest.importorskip("zcomm.plugs.torch_calls")
    lazy = {name for name in zcomm.__all__ if getattr(getattr(zcomm, name), "__module__", "") == torch_calls.__name__}

    assert sorted(lazy) == torch_calls.__all__
    assert all(getattr(zcomm, name) is getattr(torch_calls, name) for name in lazy)


def test_every_public_function_and_class_says_what_it_does():
    for name in zcomm.__all__:
        value = getattr(zcomm, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name
            members = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else []
            for member, function in members:
                if not member.startswith("_") and function.__module__.startswith("zcomm"):
                    assert inspect.getdoc(function), f"{name}.{member}"


@pytest.mark.parametrize("submodule", ["ddp", "errors", "fsdp1", "fsdp2", "local", "mpi", "ops"])
def test_a_module_may_be_imported_by_the_name_it_has_in_zcomm(submodule):
    pytest.importorskip("torch")
    if submodule == "mpi":
        pytest.importorskip("mpi4py")
    for program in (
        f"import zcomm.{submodule}; from zcomm import {submodule}; assert zcomm.{submodule} is {submodule}",
        f"from zcomm.{submodule} import __name__ as name; import zcomm; assert zcomm.{submodule}.__name__ == name",
        f"import sys, zcomm; home = zcomm.{submodule}; import zcomm.{submodule} as again; assert again is home",
    ):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr


def test_a_module_that_is_not_there_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="fsdp3"):
        import zcomm.fsdp3  # noqa: F401


def test_without_torch_an_import_tells_the_extra():
    program = "import sys; sys.modules['torch'] = None; import zcomm.fsdp2"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.stderr.splitlines()[-1].startswith("zcomm.errors.MissingExtra: zcomm.fsdp2 needs torch; pip install")


def test_help_works_without_the_extras():
    program = """
import sys

sys.modules["torch"] = sys.modules["mpi4py"] = None  # as if they were not installed
import inspect
import zcomm

names = {name for name, value in inspect.getmembers(zcomm)}
assert {"Communicator", "codec", "errors", "local"} <= names, names
assert not {"all_reduce", "ddp", "fsdp1", "fsdp2", "mpi", "ops"} & names, names
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.returncode == 0, done.stderr


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="all_reduce"):
        zcomm.all_redoce  # noqa: B018


def test_without_torch_its_names_tell_the_extra_and_all_others_work():
    program = """
import sys

sys.modules["torch"] = None  # as if it were not installed
import zcomm

for name in zcomm.__all__:
    try:
        getattr(zcomm, name)
    except zcomm.errors.MissingExtra as error:
        print(name, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=AMPLE_S, check=False)

    needed = re.findall(r"^(\w+) zcomm\.\1 needs torch; pip install 'zcomm-collectives\[torch\]'$", done.stdout, re.M)
    without = {"AVG", "SUM", "CollectiveStats", "Communicator", "Feedback", "Plan", "ReduceOp", "Topology", "Work"}
    without |= {"__version__", "codec", "errors", "local", "mpi", "premul_sum"}
    assert (done.returncode, done.stderr) == (0, "")
    assert needed == [name for name in zcomm.__all__ if name not in without]


def test_the_version_is_the_distribution_s():
    text = (ROOT / "pyproject.toml").read_text()

    assert re.search(r'^version = "(.*)"$', text, re.MULTILINE).group(1) == zcomm.__version__
    assert f"## {zcomm.__version__}" in (ROOT / "CHANGELOG.md").read_text()
