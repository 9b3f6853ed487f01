"""Renewals towards a server that is not there, on a channel of the test and a virtual clock."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trinamo.runtime.errors import ConnectError, DeadlineError, TrinamoError
from trinamo.transports.etcd.client import EtcdClient
from trinamo.transports.etcd.keeping import PAUSE_MIN_S, LeaseKeeper
from trinamo.transports.etcd.rpc import StatusError, StreamLostError

TIMEOUT_S = 1.0
REFUSED = StatusError("UNAVAILABLE", "failed to connect to all addresses; last error: refused")


@attrs.define
class SlowRefusal:
    """Calls and streams end by a refusal, `takes_s` after they began. Implements `Channel`, `Stream`.

    One that `is_there` answers calls, and its streams say nothing for so long.
    """

    takes_s: float
    is_there: bool = False
    sent: int = 0

    @asynccontextmanager
    async def open_stream(self, name: str, *, metadata: Any) -> AsyncIterator[SlowRefusal]:
        yield self

    def send_nowait(self, *requests: Any) -> None:
        self.sent += len(requests)

    async def receive(self) -> list[Any]:
        await trio.sleep(self.takes_s)
        if self.is_there:
            raise StreamLostError("reset")
        raise StreamLostError(REFUSED.text, REFUSED)

    def cancel(self) -> None: ...

    async def call(
        self, name: str, request: Any, *, timeout_s: float, metadata: Any, waits: bool = False
    ) -> Any:
        with trio.move_on_after(timeout_s):
            if not self.is_there:
                await trio.sleep(self.takes_s)
            while not self.is_there and waits:
                await trio.sleep(0.01)
            if self.is_there:
                return None
            raise REFUSED
        raise StatusError("DEADLINE_EXCEEDED", "Deadline Exceeded")

    def close(self) -> None: ...


async def renew(channel: SlowRefusal) -> TrinamoError:
    """What a renewal over the channel ends with."""
    client = EtcdClient(
        channel,
        where="nowhere",
        rng=random.Random(1),
        timeout_s=TIMEOUT_S,
        per_try_timeout_s=TIMEOUT_S,
    )
    keeper = LeaseKeeper(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        with pytest.raises(TrinamoError) as caught:
            await keeper.keep_alive(7)
        nursery.cancel_scope.cancel()
    return caught.value


@pytest.mark.parametrize("takes_s", [0.01, 0.13, 0.2, 0.9, 1.1, 60.0])
async def test_where_nobody_is_nothing_is_sent_however_late_that_is_said(
    takes_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """So the outcome is certain, whenever the last try began and whatever came of it."""
    channel = SlowRefusal(takes_s)
    error = await renew(channel)

    assert isinstance(error, ConnectError)
    assert error.definite
    assert channel.sent == 0
    assert trio.current_time() <= TIMEOUT_S


@pytest.mark.parametrize("takes_s", [0.3, 60.0])
async def test_a_stream_that_says_nothing_leaves_the_renewal_in_doubt(
    takes_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """Also after it was lost, and whatever the next one says."""
    channel = SlowRefusal(takes_s, is_there=True)

    error = await renew(channel)
    assert isinstance(error, DeadlineError)
    assert ("not renewed: no answer within 1 s" if takes_s > TIMEOUT_S else "reset") in str(error)
    assert channel.sent > 0


async def test_a_renewal_that_was_sent_once_stays_in_doubt_when_the_store_goes_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    channel = SlowRefusal(0.3, is_there=True)
    async with trio.open_nursery() as nursery:

        async def go_away() -> None:
            await trio.sleep(0.4)
            channel.is_there = False

        nursery.start_soon(go_away)
        assert isinstance(await renew(channel), DeadlineError)


async def test_a_renewal_is_sent_as_soon_as_there_is_a_connection_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """No pause but the shortest stands between the two, however long nobody was there."""
    channel = SlowRefusal(0.01)
    client = EtcdClient(channel, where="nowhere", rng=random.Random(1), timeout_s=1e3)
    keeper = LeaseKeeper(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        nursery.start_soon(keeper.keep_alive, 7)
        for number in range(4):
            sent, channel.is_there = channel.sent, False
            await trio.sleep(3 + number / 4)
            channel.is_there = True
            await trio.sleep(2 * PAUSE_MIN_S)
            assert channel.sent > sent
        nursery.cancel_scope.cancel()
