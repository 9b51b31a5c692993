"""Imports point down the picture (docs/architecture.md), and packages are imported only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "zcomm"
ROOT = PACKAGE.parent

# What each layer may import, besides itself. engines and transports never see each other.
SEES = {
    "errors": set(),
    "version": set(),
    "submodules": set(),
    "graphs": set(),
    "keywords": {"errors"},
    "streams": {"errors"},
    "buffers": {"errors", "streams"},
    "topology": {"errors", "keywords"},
    "reduce_op": {"errors"},
    "work": {"errors", "graphs", "streams"},
    "wire": {"errors", "buffers"},
    "plan": {"errors", "keywords", "wire"},
    "engines": {"errors", "streams", "buffers", "wire"},
    "transports": {"errors", "streams", "work"},
    "collectives": {
        "errors",
        "graphs",
        "keywords",
        "version",
        "streams",
        "buffers",
        "topology",
        "reduce_op",
        "work",
        "wire",
        "plan",
        "engines",
        "transports",
    },
    "plugs": {
        "errors",
        "graphs",
        "keywords",
        "buffers",
        "topology",
        "reduce_op",
        "work",
        "wire",
        "plan",
        "transports",
        "collectives",
    },
    "tools": {
        "errors",
        "version",
        "buffers",
        "wire",
        "plan",
        "topology",
        "engines",
        "transports",
        "collectives",
        "plugs",
    },
}
FRONT = {"__init__", "__main__"}  # may name everything

# Which files may import what zcomm does not depend on.
MAY_IMPORT = {
    "torch": {
        "transports/torch_dist.py",
        "plugs/ddp.py",
        "plugs/fsdp1.py",
        "plugs/fsdp2.py",
        "plugs/hook_state.py",
        "plugs/torch_calls.py",
        "plugs/torch_ops.py",
        "plugs/torch_work.py",
        "tools/demo_",
        "tools/perf_torch.py",
    },
    "cupy": {"streams.py"},
    "mpi4py": {
        "transports/mpi.py",
        "plugs/mpi.py",
        "plugs/mpi_buffers.py",
        "plugs/mpi_datatypes.py",
        "plugs/mpi_request.py",
        "plugs/mpi_short.py",
        "tools/perf_mpi.py",
    },
    "pyroute2": {"tools/cluster_network.py"},
    "rich": {"tools/"},
    "matplotlib": {"tools/"},
}
ALWAYS = {"numpy", "ml_dtypes", "zcomm"}


def layer(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module a file imports, anywhere in it, and whether only for type checkers."""
    found = []

    def visit(node: ast.AST, typing_only: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_only = True
        if isinstance(node, ast.Import):
            found.extend((alias.name, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name, not relatively"
            module = node.module or ""
            if module in {"zcomm", *(f"zcomm.{name}" for name in SEES)}:
                found.extend((f"{module}.{alias.name}", typing_only) for alias in node.names)
            else:
                found.append((module, typing_only))
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only)

    visit(ast.parse(path.read_text()), False)
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = layer(path)
    if own in FRONT:
        return

    for module, _ in imports(path):
        if not module.startswith("zcomm"):
            continue
        seen = module.split(".")[1] if "." in module else "__init__"
        assert seen == own or seen in SEES[own], f"{path.name} ({own}) imports {module}; it may see {sorted(SEES[own])}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_packages_are_imported_only_where_they_belong(path):
    where = str(path.relative_to(PACKAGE))

    for module, typing_only in imports(path):
        name = module.split(".")[0]
        if typing_only or name in ALWAYS or name in sys.stdlib_module_names:
            continue
        allowed = MAY_IMPORT.get(name, set())
        assert any(where == place or (place.endswith(("/", "_")) and where.startswith(place)) for place in allowed), (
            f"{where} imports {name}; that belongs in {sorted(allowed) or 'no file'}"
        )


def test_every_layer_is_in_the_table():
    assert {layer(path) for path in FILES} - FRONT == set(SEES)


def test_importing_zcomm_needs_numpy_only():
    heavy = ["torch", "cupy", "mpi4py", "pyroute2", "rich", "matplotlib"]
    program = (
        "import sys\n"
        f"for name in {heavy}: sys.modules[name] = None\n"  # any import of them raises
        "import zcomm, numpy\n"
        "zcomm.Plan(codec='int4'); zcomm.Topology(nodes=2, ranks_per_node=2)\n"
        "x = [numpy.arange(5, dtype='float32') for _ in range(2)]\n"
        "zcomm.local.run(2, lambda t: zcomm.Communicator(t).all_reduce(x[t.rank], codec='raw'))\n"
        "print(x[0].tolist())"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.stdout.strip() == "[0.0, 2.0, 4.0, 6.0, 8.0]", done.stderr
