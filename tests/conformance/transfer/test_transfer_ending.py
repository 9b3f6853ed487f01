"""How transfers, peers and planes end, on every backend."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.conformance.transfer.backends import (
    BACKENDS,
    BLOCKS,
    TransferBackend,
)
from tests.conformance.transfer.ends import DEADLINE_S, READ, Ends, scattered
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    KilledError,
    TransportError,
)
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    MemoryDescription,
    decode_description,
    encode_description,
)


@pytest.mark.parametrize("direction", Direction)
async def test_an_aborted_transfer_settles_and_says_so(ends: Ends, direction: Direction) -> None:
    transfer = ends.start(direction, scattered(60, 7), scattered(60, 8))
    transfer.abort()
    with pytest.raises(KilledError):
        await transfer.wait()
    if ends.backend.settles_at_once:
        assert transfer.is_settled
    await transfer.wait_settled()
    transfer.abort()
    await ends.ours.probe(ends.remote)
    ends.here.expected[:], ends.there.expected[:] = ends.here.memory, ends.there.memory
    await ends.move(direction, [3], [4])


@pytest.mark.parametrize("direction", Direction)
async def test_nothing_lands_after_an_aborted_transfer_has_settled(
    ends: Ends, direction: Direction
) -> None:
    for turns in range(12):
        transfer = ends.start(direction, list(range(BLOCKS)), list(range(BLOCKS)))
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        transfer.abort()
        await transfer.wait_settled()
        target = ends.here if direction is READ else ends.there
        if direction is READ:
            # Ours again: whatever we write there now must stay.
            target.memory[:] = bytes(len(target.memory))
        await ends.ours.probe(ends.remote)
        await trio.testing.wait_all_tasks_blocked(0.001)
        if direction is READ:
            assert not any(target.memory)


async def test_a_waiter_that_is_cancelled_leaves_the_transfer_alone(ends: Ends) -> None:
    here, there = scattered(50, 9), scattered(50, 10)
    for a, b in zip(here, there, strict=True):
        ends.here.expect(a, ends.there.block(b))
    transfer = ends.start(READ, here, there)
    with trio.CancelScope() as scope:
        scope.cancel()
        await transfer.wait()
    await transfer.wait()
    assert await transfer.wait() == await transfer.wait()
    ends.check()


async def test_a_forgotten_peer_s_transfers_fail_and_settle(ends: Ends) -> None:
    transfer = ends.start(READ, list(range(BLOCKS)), list(range(BLOCKS)))
    await ends.ours.forget(ends.theirs.incarnation)
    with pytest.raises((DisconnectedError, ConnectError)):
        await transfer.wait()
    assert transfer.is_settled
    await ends.ours.forget(ends.theirs.incarnation)
    await ends.ours.forget("unknown")


async def test_a_peer_that_was_forgotten_may_be_connected_again(ends: Ends) -> None:
    await ends.ours.forget(ends.theirs.incarnation)
    remote = await ends.ours.connect(ends.owned.describe())
    ends.here.expect(3, ends.there.block(4))
    await ends.ours.start(READ, ends.local, [3], remote, [4], deadline_s=DEADLINE_S).wait()
    ends.check()


async def test_a_probe_answers_while_the_peer_lives(ends: Ends) -> None:
    await ends.ours.probe(ends.remote)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
async def test_a_plane_that_is_closed_is_not_reached(backend: TransferBackend) -> None:
    async with backend.open_planes() as (_, theirs):
        region = await theirs.register(bytearray(8192), block_bytes=4096)
        described = region.describe()
    async with backend.open_planes() as (ours, _):
        with pytest.raises(TransportError):
            await ours.probe(await ours.connect(described))


async def test_a_description_survives_its_bytes(ends: Ends) -> None:
    described: MemoryDescription = ends.owned.description
    assert decode_description(encode_description(described)) == described
