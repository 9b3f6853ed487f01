"""The response plane on both carriers, and sealed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.transports.tcp.ends import Home, open_home


@pytest.fixture(
    params=[("dedicated", b""), ("multiplexed", b""), ("multiplexed", bytes(range(32)))]
)
async def home(request: Any) -> AsyncIterator[Home]:
    """Both ends over loopback, on each of the carriers, and with a secret."""
    streams, secret = request.param
    async with open_home(streams=streams, secret=secret) as home:
        yield home
