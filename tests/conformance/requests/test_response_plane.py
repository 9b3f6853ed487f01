"""The response plane, both ends: every row of the protocol's table that two live ends can show.

Rows that need a peer which breaks the rules, or dies, are in `tests/transports/tcp/`; those about
handlers and grace periods in `tests/runtime/worker/test_worker.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from tests.transports.tcp.ends import Home, eventually, open_home
from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    EngineError,
    KilledError,
    OverloadedError,
    TrinamoError,
)
from trinamo.runtime.planes import CallHome, Registration, ResponseChannel, ResponsePlane
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with open_home() as home:
        yield home


async def collect(channel: ResponseChannel) -> tuple[list[bytes], TrinamoError | None]:
    """All items, then the one terminal: None for a complete answer. After it nothing comes."""
    items: list[bytes] = []
    error: TrinamoError | None = None
    try:
        async for item in channel:
            items.append(item)  # noqa: PERF401 -- items before the error count
    except TrinamoError as raised:
        error = raised
    assert [item async for item in channel] == []
    return items, error


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


# --- the consumer's ways to end ------------------------------------------------------------------


async def serve_until_killed(home: Home, connection: ConnectionInfo, context: Context) -> None:
    """A handler that streams one item and then sleeps in its scope, as in a long prefill."""
    async with home.call(connection, context) as sender:
        with context.scope:
            sender.send_nowait(b"first")
            await trio.sleep_forever()


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


# --- subjects ------------------------------------------------------------------------------------


async def test_subjects_are_unguessable_and_gone_when_their_registration_is_left(
    home: Home,
) -> None:
    subjects = set()
    for _ in range(50):
        with home.server.register(Context("r")) as registration:
            subjects.add(registration.connection.subject)
            assert home.server.registered_count == 1
    assert len(subjects) == 50
    assert all(len(subject) == 32 for subject in subjects)
    assert home.server.registered_count == 0


@pytest.mark.parametrize("why", ["left", "unknown", "other type", "taken"])
async def test_a_call_that_is_refused_kills_the_handler_and_touches_no_registration(
    home: Home, why: str
) -> None:
    theirs = Context("w")
    with home.server.register(Context("r")) as registration:
        connection = registration.connection
        if why == "left":
            with home.server.register(Context("r2")) as other:
                connection = other.connection
        elif why == "unknown":
            connection = ConnectionInfo(connection.address, "0" * 32, StreamType.RESPONSE)
        elif why == "other type":
            with home.server.register_input(Context("r2")) as asked:
                connection = asked.connection
                await serve_until_killed(home, connection, theirs)
        async with home.call(registration.connection) as first:
            if why != "other type":
                if why == "taken":
                    await registration.channel.wait_prologue()
                await serve_until_killed(home, connection, theirs)
            assert theirs.is_killed
            first.send_nowait(b"untouched")
            first.finish()
        assert await collect(registration.channel) == ([b"untouched"], None)
    assert home.server.refused_count == 1


async def test_a_caller_that_cannot_be_reached_is_a_connect_error(home: Home) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    await listener.aclose()
    nobody = ConnectionInfo(address, "0" * 32, StreamType.RESPONSE)
    with pytest.raises(ConnectError) as caught:
        async with home.client.call_home(nobody, Context("w")):
            raise AssertionError("nobody was there")
    assert caught.value.definite


async def test_a_request_killed_before_the_worker_dialled_does_not_call(home: Home) -> None:
    theirs = Context("w")
    theirs.kill()
    with home.server.register(Context("r")) as registration, pytest.raises(KilledError):
        async with home.client.call_home(registration.connection, theirs):
            raise AssertionError("called all the same")


# --- bounds and order ----------------------------------------------------------------------------


async def test_a_consumer_that_stops_reading_stops_the_handler(home: Home) -> None:
    """Bounded in bytes on every hop: outbox, both kernel buffers, the consumer's channel."""
    item = b"x" * 10_000
    sent = 0
    theirs = Context("w")

    async def handler(connection: ConnectionInfo) -> None:
        nonlocal sent
        async with home.call(connection, theirs) as sender:
            with theirs.scope:
                while True:
                    sent += 1
                    if not sender.send_nowait(item):
                        await sender.drain()

    queue = home.client.options.queue_bytes_max
    # Linux grows loopback buffers to a few megabytes a side; nothing else may hold items.
    items_max = (2 * queue + 16 * 1024 * 1024) // len(item)
    async with trio.open_nursery() as nursery:
        with home.server.register(Context("r")) as registration:
            nursery.start_soon(handler, registration.connection)
            before = -1
            while before != sent:
                before = sent
                await trio.testing.wait_all_tasks_blocked(0.05)
            assert 0 < sent <= items_max
            assert registration.channel.buffered_bytes <= queue + 65536 + len(item)
            assert await anext(registration.channel) == item
    assert theirs.is_killed


async def test_items_of_every_size_arrive_whole_and_in_order(home: Home) -> None:
    sizes = [1, 7, 8, 65528, 65536, 65537, 300_000, 3_000_000, 2]
    items = [bytes([number]) * size for number, size in enumerate(sizes)]

    async def handler(connection: ConnectionInfo) -> None:
        async with home.call(connection) as sender:
            for item in items:
                if not sender.send_nowait(item):
                    await sender.drain()
            sender.finish()

    async with trio.open_nursery() as nursery:
        with home.server.register(Context("r")) as registration:
            nursery.start_soon(handler, registration.connection)
            assert await collect(registration.channel) == (items, None)


async def test_a_cancelled_receive_loses_no_item(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(registration.channel)
            sender.send_nowait(b"a")
            sender.finish()
        assert await collect(registration.channel) == ([b"a"], None)


async def test_one_stream_has_one_consumer(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(registration.channel.wait_prologue)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await anext(registration.channel)
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_many_streams_with_every_ending_leave_nothing_behind(home: Home) -> None:
    endings = ("finish", "fail", "drop", "kill", "stop", "vanish")

    async def handler(connection: ConnectionInfo, ending: str) -> None:
        context = Context("w")
        async with home.call(connection, context) as sender:
            with context.scope:
                for number in range(20):
                    sender.send_nowait(b"%d" % number)
                    await trio.lowlevel.checkpoint()
                    if context.is_stopped:
                        break
                if ending in ("drop", "kill"):
                    await trio.sleep_forever()
                if ending == "fail":
                    sender.fail(EngineError("x"))
                elif ending != "vanish":
                    sender.finish()

    async def request(number: int) -> None:
        ending, mine = endings[number % len(endings)], Context(f"r{number}")
        with home.server.register(mine) as registration:
            nursery.start_soon(handler, registration.connection, ending)
            await anext(registration.channel)
            if ending == "drop":
                return
            if ending == "kill":
                mine.kill()
            if ending == "stop":
                mine.stop()
            items, error = await collect(registration.channel)
            expected = {"fail": EngineError, "kill": KilledError, "vanish": DisconnectedError}
            assert type(error) is expected.get(ending, type(None))
            if ending == "finish":
                assert len(items) == 19

    async with trio.open_nursery() as nursery:
        for number in range(120):
            nursery.start_soon(request, number)
