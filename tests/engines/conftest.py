"""What tests of engines share: the CUDA kernels built for the CPU, once."""

from __future__ import annotations

from pathlib import Path

import cuda_on_cpu
import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of cuda_on_cpu.KERNELS."""
    return cuda_on_cpu.build(tmp_path_factory.mktemp("cuda"))
