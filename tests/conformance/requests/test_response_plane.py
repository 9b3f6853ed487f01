"""The response plane, both ends: every row of the protocol's table that two live ends can show.

Rows that need a peer which breaks the rules, or dies, are in `tests/transports/tcp/`; those about
handlers and grace periods in `tests/runtime/worker/test_worker.py`.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.conformance.requests.collecting import collect, serve_until_killed
from tests.transports.tcp.ends import Home, eventually
from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import (
    DisconnectedError,
    EngineError,
    KilledError,
    OverloadedError,
    TrinamoError,
)
from trinamo.runtime.planes import CallHome, Registration, ResponseChannel, ResponsePlane
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType


async def test_they_are_the_interfaces_of_the_runtime(home: Home) -> None:
    plane: ResponsePlane = home.server
    call: CallHome = home.client
    with plane.register(Context("r")) as registration:
        held: Registration = registration
    assert held.connection.stream_type is StreamType.RESPONSE
    assert call is home.client


# --- the handler's ways to end -------------------------------------------------------------------


async def test_a_handler_that_finishes_gives_all_its_items_in_order_and_completes(
    home: Home,
) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            await registration.channel.wait_prologue()
            for number in range(1000):
                sender.send_nowait(b"%d" % number)
            sender.finish()
        assert await collect(registration.channel) == ([b"%d" % n for n in range(1000)], None)


async def test_an_answer_without_items_is_complete_too(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.finish()
        assert await collect(registration.channel) == ([], None)


@pytest.mark.parametrize(
    "told", [EngineError("no GPU", definite=True), EngineError("odd"), OverloadedError("full")]
)
async def test_a_handler_that_raises_before_its_first_item_declines_with_its_error(
    home: Home, told: TrinamoError
) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.client.call_home(registration.connection, Context("w")) as sender:
            sender.fail(told)
        with pytest.raises(type(told), match=told.message) as caught:
            await registration.channel.wait_prologue()
        assert caught.value.definite is told.definite
        assert await collect(registration.channel) == ([], None)


async def test_a_handler_that_raises_later_gives_its_items_then_its_error(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.send_nowait(b"a")
            sender.send_nowait(b"b")
            sender.fail(EngineError("late", definite=False))
        items, error = await collect(registration.channel)
        assert items == [b"a", b"b"]
        assert type(error) is EngineError
        assert (error.message, error.definite) == ("late", False)


async def test_an_error_with_an_endless_text_still_arrives_as_itself(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.fail(EngineError("x" * 1_000_000))
        _, error = await collect(registration.channel)
        assert type(error) is EngineError


async def test_a_worker_that_leaves_without_an_end_mark_is_disconnected(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.send_nowait(b"a")
            await eventually(lambda: registration.channel.buffered_bytes)
        items, error = await collect(registration.channel)
        assert items == [b"a"]
        assert type(error) is DisconnectedError
        assert not error.definite


async def test_words_after_the_last_one_are_not_said(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.finish()
            sender.finish()
            sender.fail(EngineError("too late"))
        assert await collect(registration.channel) == ([], None)


async def test_a_consumer_that_drops_the_stream_kills_the_handler(home: Home) -> None:
    theirs = Context("w")
    async with trio.open_nursery() as nursery:
        with home.server.register(Context("r")) as registration:
            nursery.start_soon(serve_until_killed, home, registration.connection, theirs)
            assert await anext(registration.channel) == b"first"
    assert (theirs.state, theirs.reason) == (State.KILLED, Reason.CONSUMER_DROPPED)


async def test_a_consumer_dropped_while_it_is_cancelled_kills_the_handler_all_the_same(
    home: Home,
) -> None:
    theirs = Context("w")
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope, home.server.register(Context("r")) as registration:
            nursery.start_soon(serve_until_killed, home, registration.connection, theirs)
            assert await anext(registration.channel) == b"first"
            scope.cancel()
            await anext(registration.channel)
        assert scope.cancelled_caught
    assert theirs.is_killed


async def test_kill_ends_the_consumer_at_once_and_drops_what_was_queued(home: Home) -> None:
    mine, theirs = Context("r"), Context("w")
    async with trio.open_nursery() as nursery:
        with home.server.register(mine) as registration:
            nursery.start_soon(serve_until_killed, home, registration.connection, theirs)
            await eventually(lambda: registration.channel.buffered_bytes)
            mine.kill(Reason.CLIENT_DISCONNECT)
            items, error = await collect(registration.channel)
    assert items == []
    assert isinstance(error, KilledError)
    assert error.reason == "client_disconnect"
    assert theirs.is_killed


async def test_kill_wakes_a_consumer_that_waits_for_an_item_or_the_prologue(home: Home) -> None:
    for wait in ("prologue", "item"):
        mine = Context("r")
        with home.server.register(mine) as registration:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def consumer(
                    wait: str = wait, channel: ResponseChannel = registration.channel
                ) -> None:
                    with pytest.raises(KilledError):
                        await (channel.wait_prologue() if wait == "prologue" else anext(channel))

                await trio.testing.wait_all_tasks_blocked()
                mine.kill()


async def test_stop_lets_the_handler_finish_and_every_item_arrive(home: Home) -> None:
    mine, theirs = Context("r"), Context("w")

    async def handler(connection: ConnectionInfo) -> None:
        async with home.call(connection, theirs) as sender:
            sender.send_nowait(b"first")
            await theirs.wait_stopped()
            sender.send_nowait(b"last words")
            sender.finish()

    async with trio.open_nursery() as nursery:
        with home.server.register(mine) as registration:
            nursery.start_soon(handler, registration.connection)
            await registration.channel.wait_prologue()
            mine.stop()
            mine.stop()
            result = await collect(registration.channel)
    assert result == ([b"first", b"last words"], None)
    assert (theirs.state, theirs.reason) == (State.STOPPED, Reason.STOP_REQUESTED)


async def test_stop_then_kill_is_as_kill(home: Home) -> None:
    mine, theirs = Context("r"), Context("w")
    async with trio.open_nursery() as nursery:
        with home.server.register(mine) as registration:
            nursery.start_soon(serve_until_killed, home, registration.connection, theirs)
            assert await anext(registration.channel) == b"first"
            mine.stop()
            mine.kill()
            _, error = await collect(registration.channel)
    assert isinstance(error, KilledError)
    assert theirs.is_killed
    assert theirs.stop_reason is Reason.STOP_REQUESTED


@pytest.mark.parametrize("state", [State.STOPPED, State.KILLED])
async def test_what_was_decided_before_the_worker_called_reaches_it_when_it_does(
    home: Home, state: State
) -> None:
    mine, theirs = Context("r"), Context("w")
    with home.server.register(mine) as registration:
        (mine.stop if state is State.STOPPED else mine.kill)()
        async with home.client.call_home(registration.connection, theirs) as sender:
            await eventually(lambda: theirs.state is state)
            sender.open()
            sender.finish()


async def test_a_context_killed_before_it_is_registered_ends_the_stream_at_once(home: Home) -> None:
    mine = Context("r")
    mine.kill(Reason.DEADLINE)
    with home.server.register(mine) as registration, pytest.raises(KilledError):
        await registration.channel.wait_prologue()


async def test_a_stream_failed_from_this_side_ends_with_that_error(home: Home) -> None:
    """How the client ends a wait whose instance has vanished from discovery."""
    with home.server.register(Context("r")) as registration:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def consumer() -> None:
                with pytest.raises(DisconnectedError, match="vanished"):
                    await registration.channel.wait_prologue()

            await trio.testing.wait_all_tasks_blocked()
            registration.channel.fail(DisconnectedError("vanished"))
