"""What each end of a stream does at its end, and while its link is full."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from tests.conformance.requests.collecting import collect, wait_room
from tests.transports.tcp.ends import Home, eventually, open_home, options
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    KilledError,
    UnavailableError,
)
from trinamo.runtime.protocol.streams.request import ConnectionInfo
from trinamo.transports.tcp.streams.link import Link
from trinamo.transports.tcp.streams.linked import AnsweringLink


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with open_home(streams="multiplexed") as home:
        yield home


async def test_a_handler_that_leaves_without_a_last_word_is_taken_for_dead(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.send_nowait(b"half")
        items, error = await collect(registration.channel)
    assert items == [b"half"]
    assert isinstance(error, DisconnectedError)


async def test_a_worker_that_its_caller_has_given_up_is_killed(home: Home) -> None:
    """It left discovery, say, and works on all the same."""
    theirs = Context("w")
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection, theirs) as sender:
            sender.send_nowait(b"item")
            await anext(aiter(registration.channel))
            registration.channel.fail(UnavailableError("it left"))
            with pytest.raises(UnavailableError):
                await anext(aiter(registration.channel))
            registration.close()
            await eventually(lambda: theirs.is_killed)
            assert not sender.send_nowait(b"more")


async def test_a_stream_that_is_over_is_not_killed_when_it_is_left(home: Home) -> None:
    theirs = Context("w")
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection, theirs) as sender:
            sender.finish()
            assert await collect(registration.channel) == ([], None)
            registration.close()
    # What was said for the first is before what is said for the second.
    with home.server.register(Context("s")) as registration:
        async with home.call(registration.connection) as sender:
            sender.finish()
            assert await collect(registration.channel) == ([], None)
    assert not theirs.is_killed


async def test_who_found_the_link_full_goes_on_when_its_bytes_are_out() -> None:
    """With credit left, nobody has to read for that."""
    async with open_home(streams="multiplexed", queue_bytes_max=1000) as home:
        with home.server.register(Context("r")) as registration:
            async with home.call(registration.connection) as sender:
                assert not sender.send_nowait(b"x" * 1000)
                with trio.fail_after(120):
                    await wait_room(sender)
                sender.finish()
            assert await collect(registration.channel) == ([b"x" * 1000], None)


async def test_an_input_that_waits_for_credit_is_dropped_when_its_worker_breaks_the_protocol(
    home: Home,
) -> None:
    with home.server.register_input(Context("r")) as asked:
        async with (
            trio.open_nursery() as nursery,
            home.client.receive_input(asked.connection, Context("w")) as receiver,
        ):

            @nursery.start_soon
            async def send() -> None:
                with suppress(DisconnectedError):
                    while True:
                        await asked.send(b"x" * 100_000)

            await eventually(lambda: receiver.channel.buffered_bytes > 0)
        (link,) = home.server.links
        assert isinstance(link, Link)
        await eventually(lambda: not link.lanes)


@pytest.mark.parametrize("takes_streams", [True, False])
@pytest.mark.parametrize("is_killed", [True, False])
async def test_no_stream_is_opened_for_who_is_killed_or_where_the_link_is_lost(
    takes_streams: bool, is_killed: bool
) -> None:
    link = cast("Link", SimpleNamespace(takes_streams=takes_streams))
    context = Context("w")
    if is_killed:
        context.kill(Reason.CONSUMER_DROPPED)
    waiting = AnsweringLink(link, options()).wait_ready(cast("ConnectionInfo", None), context)
    if is_killed:
        with pytest.raises(KilledError):
            await waiting
    elif takes_streams:
        assert await waiting is link
    else:
        with pytest.raises(ConnectError):
            await waiting
