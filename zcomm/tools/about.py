"""What ran, and where: the facts that stand beside every measured number. Shared by zcomm's programs and `bench/`."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zcomm.engines.select import available
from zcomm.version import __version__

PACKAGES = ("numpy", "ml_dtypes", "torch", "mpi4py", "cupy-cuda13x")


def about(
    program: str,  # as typed: "python bench/mpi.py"; the arguments are this process's
    **more: Any,  # facts of this run
) -> dict[str, Any]:
    """Command, versions and machine, to be written as JSON. Imports none of the packages."""
    return {
        "command": " ".join([program, *sys.argv[1:]]),
        "zcomm": __version__,
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := installed(name)) is not None},
        "engine": engine("cpu"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "platform": platform.platform(),
        **more,
    }


def installed(package: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def engine(device: str) -> str:
    """The engine that codes on a device, and how it was built."""
    usable = [one for one in available() if one.device == device and one.usable]
    return f"engine {usable[0].name} ({usable[0].detail})" if usable else f"no engine for {device}"


def cpu_model() -> str:
    """The processor's name."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
