"""What tests share: a world of torch processes and one of MPI ranks, started once per session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("zcomm", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on any machine
settings.load_profile("zcomm")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "collectives"))
sys.path.insert(0, str(Path(__file__).parent / "promises"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that the last of them does not run while the other core is idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def torch_world() -> Iterator:
    """Four gloo ranks, two on a node."""
    pytest.importorskip("torch")
    from torch_world import TorchWorld

    world = TorchWorld(4)
    yield world
    world.close()


@pytest.fixture(scope="session")
def mpi_world() -> Iterator:
    """Four MPI ranks under one mpiexec, two on a node."""
    import mpi_world

    if mpi_world.why_not():
        pytest.skip(mpi_world.why_not())
    world = mpi_world.MpiWorld(4)
    yield world
    world.close()
