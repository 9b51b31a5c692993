"""What tests of collectives share."""

from __future__ import annotations

import pytest
from placements import PLACEMENTS

from zcomm import Topology


@pytest.fixture(params=PLACEMENTS, scope="module")
def placement(request: pytest.FixtureRequest) -> tuple[Topology, bool]:
    return PLACEMENTS[request.param]
