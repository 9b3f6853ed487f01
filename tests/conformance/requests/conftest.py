"""The response plane on both carriers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.transports.tcp.ends import Home, open_home


@pytest.fixture(params=["dedicated", "multiplexed"])
async def home(request: Any) -> AsyncIterator[Home]:
    """Both ends over loopback, on each of the carriers."""
    async with open_home(streams=request.param) as home:
        yield home
