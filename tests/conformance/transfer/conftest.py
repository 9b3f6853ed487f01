"""Every suite here runs on every backend."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from tests.conformance.transfer.backends import (
    BACKENDS,
    BLOCK_BYTES,
    Pages,
    TransferBackend,
)
from tests.conformance.transfer.ends import Ends, Granted


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    backend: TransferBackend = request.param
    here, there = Pages(1), Pages(2)
    async with backend.open_planes() as (ours, theirs):
        local = await ours.register(here.memory, block_bytes=BLOCK_BYTES, fingerprint="pages")
        owned = await theirs.register(there.memory, block_bytes=BLOCK_BYTES, fingerprint="pages")
        remote = await ours.connect(owned.describe())
        yield Ends(backend, ours, theirs, here, there, local, owned, remote)


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    """No test waits for ever."""
    with trio.fail_after(120):
        yield


@pytest.fixture
async def granted(ends: Ends) -> Granted:
    owned = await ends.theirs.register(
        Pages(9).memory, block_bytes=BLOCK_BYTES, fingerprint="pages", needs_ticket=True
    )
    heard: list[bytes] = []
    owned.grant(77, [1, 2, 3], heard.append)
    owned.grant(78, [4, 5])
    return Granted(ends, owned, await ends.ours.connect(owned.describe()), heard)
