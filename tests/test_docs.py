"""The documentation says what is so: links resolve, examples run, and the names it lists are those of the code.

Python fences of one page run in order and share their names. A comment before a fence says where it runs:

    <!-- runs: alone -->    in this process
    <!-- runs: 2x2 -->      on 2 nodes x 2 ranks, under zcomm cluster
    <!-- runs: mpi -->      on 2 nodes x 2 ranks, under zcomm cluster --mpi
    <!-- runs: gpus -->     where there are GPUs; tests/transports/test_nccl_page.py

A fence without one is a fragment: it must parse, and its imports must work.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mpi_world
import pytest

import zcomm
from zcomm.wire.registry import NAMES

ROOT = Path(__file__).parent.parent
SKIPPED_FOLDERS = {"build", "dist", ".venv", ".git", ".hypothesis", ".pytest_cache", "node_modules"}
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CLUSTER_TIMEOUT_S = 600  # ends a hang; never the pace of a slow machine

# Run by every rank: argv[1] is a JSON list of [name, first line, source], one namespace and one port per page.
RUN_PAGES = """
import json, os, sys
port = int(os.environ["MASTER_PORT"])
for number, page in enumerate(json.load(open(sys.argv[1]))):
    os.environ["MASTER_PORT"] = str(port + number)
    names = {"__name__": "__main__"}
    for name, line, source in page:
        exec(compile("\\n" * line + source, name, "exec"), names)
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


class Fence(NamedTuple):
    """One Python example."""

    page: str
    line: int  # of its opening mark
    runs: str  # "alone", "2x2", "mpi", or "" for a fragment
    source: str


def pages() -> list[Path]:
    """Every Markdown file of the project."""
    found = (path for path in ROOT.rglob("*.md") if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts))
    return sorted(found)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """The text of a page without its fences, where # and [] mean something else."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What #fragments a page offers, by GitHub's rule for headings."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def fences(page: Path) -> Iterator[Fence]:
    """The Python examples of a page."""
    pattern = r"(?:<!-- runs: (?P<runs>.*?) -->\n)?^```python\n(?P<source>.*?)^```"
    text = page.read_text()
    for found in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start("source"))
        yield Fence(name_of(page), line, found["runs"] or "", found["source"])


def all_fences() -> list[Fence]:
    return [fence for page in pages() for fence in fences(page)]


def by_page(runs: str) -> dict[str, list[Fence]]:
    """The examples that run in one way."""
    found: dict[str, list[Fence]] = {}
    for fence in all_fences():
        if fence.runs == runs:
            found.setdefault(fence.page, []).append(fence)
    return found


# -- links and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue  # the web
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(path), (
            f"{name_of(page)} links to {target}; {path.name} has {anchors(path)}"
        )


def test_markers_of_fences_are_known():
    assert {fence.runs for fence in all_fences()} <= {"alone", "2x2", "mpi", "gpus", ""}


def test_fragments_parse_and_import_what_exists():
    for fence in all_fences():
        tree = ast.parse(fence.source, f"{fence.page}, line {fence.line}")
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if not fence.runs:
            exec(compile(ast.Module(imports, []), fence.page, "exec"), {})


def test_the_index_lists_every_page_of_docs():
    text = (ROOT / "docs" / "README.md").read_text()

    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in text, f"docs/README.md does not list {page.name}"


def test_architecture_names_every_module_and_no_file_that_is_not_there():
    named = set(re.findall(r"`([\w./-]+/[\w.-]*)`", ARCHITECTURE.read_text()))
    modules = {name_of(path) for path in (ROOT / "zcomm").rglob("*.py") if path.name != "__init__.py"}
    sources = {name_of(path) for folder in ("cpu", "cuda") for path in (ROOT / folder).glob("*.[chc]*")}

    assert sorted(name for name in named if not (ROOT / name).exists()) == []
    assert sorted((modules | sources) - named) == []


def test_every_promise_is_kept_by_tests_that_exist():
    promises = ARCHITECTURE.read_text().split("\n## Promises\n")[1].split("\n## ")[0]
    numbered = re.split(r"^\*\*(\d+)\. ", promises, flags=re.MULTILINE)

    assert numbered[1::2] == [str(number) for number in range(1, 14)]
    for number, text in zip(numbered[1::2], numbered[2::2], strict=True):
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
        assert tests, f"promise {number} names no test"
        for file, test in tests:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {test}"


def test_codecs_in_the_docs_are_those_of_the_registry():
    """Spellings, and the sizes beside them, for a tensor long enough that padding does not show."""
    text = (ROOT / "docs" / "codecs.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| ([\d.]+)[^|]*\| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    n = 1 << 20

    assert sorted(row[0] for row in table) == sorted(NAMES)
    for spelling, bits, over_float32, over_bf16 in table:
        nbytes = zcomm.codec(spelling).nbytes(n)
        assert float(bits) == 8 * nbytes / n
        assert float(over_float32) == pytest.approx(4 * n / nbytes, abs=0.005)
        assert float(over_bf16) == pytest.approx(2 * n / nbytes, abs=0.005)


def test_plan_s_settings_in_the_docs_are_the_plan_s():
    text = (ROOT / "docs" / "torch.md").read_text().split("\n| Plan |")[1].split("\n\n")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    plan = zcomm.Plan()

    assert list(documented) == list(zcomm.Plan.__dataclass_fields__)
    for name, default in documented.items():
        assert getattr(plan, name) is None or default == f"`{getattr(plan, name)}`"


def test_no_path_of_one_machine_and_no_note_of_how_it_was_made_is_in_the_tree():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    # Letters in brackets, so that this file does not find itself.
    forbidden = re.compile(rb"/w[o]rk/|/t[m]p/v\b|/r[o]ot/|/h[o]me/\w|\.\./s[h]ared|\bi[s]sue #?\d", re.IGNORECASE)
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            found = forbidden.search(path.read_bytes())
            assert not found, f"{name} has {found[0]!r}"


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", by_page("alone"))
def test_examples_run_alone(page):
    names = {"__name__": "__main__"}
    for fence in by_page("alone")[page]:
        exec(compile("\n" * fence.line + fence.source, page, "exec"), names)


def test_examples_run_on_two_nodes_with_two_ranks(tmp_path):
    pytest.importorskip("torch")
    run_on_a_cluster(tmp_path, "2x2")


def test_mpi_examples_run_on_two_nodes_with_two_ranks(tmp_path):
    if mpi_world.why_not():
        pytest.skip(mpi_world.why_not())
    run_on_a_cluster(tmp_path, "mpi", "--mpi")


def run_on_a_cluster(folder: Path, runs: str, *options: str) -> None:
    """Run the examples of one kind on an emulated cluster."""
    programs = [[(fence.page, fence.line, fence.source) for fence in page] for page in by_page(runs).values()]
    (folder / "pages.json").write_text(json.dumps(programs))
    (folder / "run_pages.py").write_text(RUN_PAGES)
    cluster = ["-m", "zcomm", "cluster", "--nodes", "2", "--ranks-per-node", "2", "--quiet", *options]
    program = [sys.executable, str(folder / "run_pages.py"), str(folder / "pages.json")]

    done = subprocess.run(
        [sys.executable, *cluster, "--timeout", str(CLUSTER_TIMEOUT_S), "--", *program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
