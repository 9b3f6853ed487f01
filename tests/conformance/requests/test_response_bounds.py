"""Response streams: subjects, refusals, bounds and order."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.conformance.requests.collecting import collect, serve_until_killed, wait_room
from tests.transports.tcp.ends import Home
from trinamo.runtime.context import Context
from trinamo.runtime.errors import ConnectError, DisconnectedError, EngineError, KilledError
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType

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
                        await wait_room(sender)

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
                    await wait_room(sender)
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
