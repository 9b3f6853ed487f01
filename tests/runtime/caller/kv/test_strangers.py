"""Other routers that tell nonsense about their requests: ours goes on, and keeps nothing of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from tests.runtime.caller.kv.test_policy import GENERATE, ask, cluster, known, until
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.kv import agreement
from trinamo.runtime.events.source import EventSource, topic_of
from trinamo.runtime.planes import EventPlane
from trinamo.runtime.protocol.kv.active import ActiveEvent, Began, Ended, encode_active, pack_keys


@pytest.fixture(autouse=True)
def no_router_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that a busy machine stalls has not ended."""
    monkeypatch.setattr(agreement, "SILENT_S", 60.0)


@asynccontextmanager
async def stranger(events: EventPlane) -> AsyncIterator[EventSource]:
    """A router of this endpoint; its requests are only what it says."""
    source = EventSource(
        events,
        topic_of("active", GENERATE),
        publisher="stranger",
        incarnation=1,
        snapshot=lambda _part, _parts: encode_active([]),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        yield source
        nursery.cancel_scope.cancel()


def began(number: int, instance_id: str, keys: Sequence[int]) -> ActiveEvent:
    return Began(number, instance_id, 16, pack_keys(keys))


async def tell(source: EventSource, *events: ActiveEvent) -> None:
    await source.publish(encode_active(events))


def events_of(client: Client) -> EventPlane:
    kv = client.router.kv
    assert kv is not None
    assert kv._agreement is not None
    return kv._agreement._source._events


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 2, 1), ()), ((2,), (1, 2)), ((1, 2, 3), (9, 3))],
    ids=["a block twice", "a block without its parent", "a block under two parents"],
)
async def test_blocks_that_are_no_chain_do_not_end_the_router(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    async with cluster() as (client,), stranger(events_of(client)) as source:
        # It is believed once it has answered for what it has under way, nothing.
        await tell(source)
        await until(lambda: known(client).routers == 1)
        # The last of an instance's requests takes all its blocks along: so there is a third.
        await tell(source, began(1, "f", first), began(2, "f", second), began(3, "f", ()))
        await until(lambda: known(client).active_requests == 3)
        await tell(source, Ended(1), Ended(2))
        await until(lambda: known(client).active_requests == 1)
        assert known(client).active_blocks == 0
        await tell(source, Ended(3))
        await until(lambda: known(client).active_requests == 0)
        assert await ask(client, "and requests are answered as before")


async def test_a_router_that_never_ends_its_requests_is_not_believed_without_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "_REQUESTS_MAX", 100)
    async with cluster() as (client,), stranger(events_of(client)) as source:
        for number in range(0, 200, 50):
            await tell(source, *(began(number + n, "f", ()) for n in range(50)))
        # The loss leads to a snapshot, which says that it has none.
        await until(lambda: known(client).routers == 1 and not known(client).active_requests)
        await tell(source, began(1000, "f", ()))
        await until(lambda: known(client).active_requests == 1)
