"""Every test of this room runs on both servers."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["native", "hypercorn"])
def http_server(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
