"""What tests of engines share: the CUDA kernels built for the CPU, once."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import cuda_on_cpu
import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of cuda_on_cpu.KERNELS, built once for all processes of a test run."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cuda"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = folder / "kernels.so"
        return built if built.exists() else cuda_on_cpu.build(folder)
