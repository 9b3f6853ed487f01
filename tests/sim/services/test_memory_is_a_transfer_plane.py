"""The transfer plane's conformance suite, on simulated memory inside a world."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from tests.conformance.transfer import (
    test_several_buffers,
    test_transfer_ending,
    test_transfer_plane,
    test_transfer_refusals,
)
from tests.conformance.transfer.backends import BLOCK_BYTES, Pages, Planes, TransferBackend
from tests.conformance.transfer.conftest import bounded, granted
from tests.conformance.transfer.ends import Ends
from tests.conformance.transfer.test_several_buffers import both
from tests.worlds import in_world, on_host
from trinamo.sim import Network, SeedChoices, SimEnv, World
from trinamo.sim.services import MemoryFabric
from trinamo.transports.memory.transfer import open_memory_transfer_plane

__all__ = ["both", "bounded", "granted"]

# This one opens every backend of the real suite, with their sockets.
ELSEWHERE = {"test_a_plane_that_is_closed_is_not_reached"}

globals().update(
    (name, body)
    for suite in (
        test_transfer_plane,
        test_transfer_refusals,
        test_transfer_ending,
        test_several_buffers,
    )
    for name, body in vars(suite).items()
    if name.startswith("test_") and name not in ELSEWHERE
)


@asynccontextmanager
async def open_planes(world: World) -> AsyncIterator[Planes]:
    fabric = MemoryFabric(world, Network(world))
    async with AsyncExitStack() as stack:
        ours, theirs = [
            await stack.enter_async_context(
                on_host(
                    world, name, partial(open_memory_transfer_plane, fabric, SimEnv(world, name))
                )
            )
            for name in ("decode", "prefill")
        ]
        yield ours, theirs


@pytest.fixture
def simulated() -> Iterator[World]:
    world = World(SeedChoices(1), ambient="raise")
    with in_world(world):
        yield world


@pytest.fixture
async def ends(simulated: World) -> AsyncIterator[Ends]:
    backend = TransferBackend(
        name="simulated",
        open_planes=partial(open_planes, simulated),
        settles_at_once=False,
    )
    here, there = Pages(1), Pages(2)
    async with backend.open_planes() as (ours, theirs):
        local = await ours.register(here.memory, block_bytes=BLOCK_BYTES, fingerprint="pages")
        owned = await theirs.register(there.memory, block_bytes=BLOCK_BYTES, fingerprint="pages")
        remote = await ours.connect(owned.describe())
        yield Ends(backend, ours, theirs, here, there, local, owned, remote)
