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
from trinamo.transports.etcd.client import Client
from trinamo.transports.etcd.failures import StatusError, StreamLostError
from trinamo.transports.etcd.keeping import LeaseKeeper

TIMEOUT_S = 1.0
REFUSED = StatusError("UNAVAILABLE", "failed to connect to all addresses; last error: refused")


@attrs.define
class SlowRefusal:
    """Each stream ends by a refusal, `takes_s` after it was opened. Implements `Channel`, `Stream`."""

    takes_s: float

    @asynccontextmanager
    async def open_stream(self, name: str, *, metadata: Any) -> AsyncIterator[SlowRefusal]:
        yield self

    def send_nowait(self, *requests: Any) -> None: ...

    async def receive(self) -> list[Any]:
        await trio.sleep(self.takes_s)
        raise StreamLostError(REFUSED.text, REFUSED)

    def cancel(self) -> None: ...

    async def call(self, name: str, request: Any, *, timeout_s: float, metadata: Any) -> Any:
        raise REFUSED

    def close(self) -> None: ...


async def renew(takes_s: float) -> TrinamoError:
    """What a renewal ends with if every try is refused so slowly."""
    client = Client(
        SlowRefusal(takes_s),
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


@pytest.mark.parametrize("takes_s", [0.01 * step for step in range(1, 20)])
async def test_a_try_under_way_at_the_end_still_says_that_nobody_is_there(
    takes_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """So nothing was sent, whenever the last try began: the outcome is certain."""
    error = await renew(takes_s)

    assert isinstance(error, ConnectError)
    assert error.definite
    assert trio.current_time() <= TIMEOUT_S + 0.2


async def test_a_try_that_says_nothing_leaves_the_renewal_in_doubt(
    autojump_clock: trio.testing.MockClock,
) -> None:
    assert isinstance(await renew(60), DeadlineError)
