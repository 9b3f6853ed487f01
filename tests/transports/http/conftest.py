"""Every test of this room runs on all servers."""

from __future__ import annotations

import pytest

from tests.runtime.http.conftest import authority, serve  # noqa: F401 -- fixtures
from tests.runtime.http.running import SERVERS


@pytest.fixture(params=SERVERS)
def http_server(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
