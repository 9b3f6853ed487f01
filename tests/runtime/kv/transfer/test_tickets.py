"""Asked about a ticket, a process says the truth: from a transfer's start until it is settled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.runtime.kv.transfer.lenders import (
    House,
    open_house,
)
from trinamo.runtime.planes import Transfer
from trinamo.runtime.protocol.transfer.description import Direction


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_house() as found:
        yield found


async def test_a_ticket_moves_from_its_transfer_s_start_until_it_is_settled(
    house: House, autojump_clock: MockClock
) -> None:
    theirs = await house.peer.register(bytearray(64), block_bytes=16)
    remote = await house.plane.connect(theirs.describe())
    house.plane.mover.faults.block_s = 1
    house.plane.mover.faults.lands_late = True
    tickets = house.leases.tickets

    def start(ticket: int) -> Any:
        blocks = house.pool.take(2)
        assert blocks is not None

        def begin() -> Transfer:
            return house.plane.start(
                *(Direction.READ, house.region._region, blocks, remote, [0, 1]),
                deadline_s=99,
                ticket=ticket,
            )

        return house.leases.start(begin, blocks, ticket)

    assert tickets.is_settled(7)
    first = start(7)
    assert not tickets.is_settled(7)
    second = start(7)
    other = start(8)
    first.abort()
    assert not tickets.is_settled(7), "it is over, but lands"
    await first.wait_settled()
    await second.wait_settled()
    await other.wait_settled()
    await trio.testing.wait_all_tasks_blocked()
    assert tickets.is_settled(7)
    assert tickets.is_settled(8)


async def test_a_transfer_that_never_settles_says_moving_for_ever(
    house: House, autojump_clock: MockClock
) -> None:
    theirs = await house.peer.register(bytearray(64), block_bytes=16)
    remote = await house.plane.connect(theirs.describe())
    house.plane.mover.faults.stalls_after = 0
    house.plane.mover.faults.lands_late = True
    blocks = house.pool.take(1)
    assert blocks is not None
    house.leases.start(
        lambda: house.plane.start(
            Direction.READ, house.region._region, blocks, remote, [0], deadline_s=9999, ticket=7
        ),
        blocks,
        7,
    ).abort()
    await trio.sleep(600)
    assert house.pool.quarantined_count == 1
    assert not house.leases.tickets.is_settled(7)
