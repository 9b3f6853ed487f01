"""The response plane by push: what a sink is given, and how a source is told of room."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.conformance.requests.collecting import collect, serve_until_killed
from tests.conformance.requests.sinks import Collecting
from tests.transports.tcp.ends import Home, eventually
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import DisconnectedError, EngineError, KilledError
from trinamo.runtime.protocol.streams.request import ConnectionInfo


async def test_a_sink_gets_what_came_before_it_and_what_comes_then_in_order(home: Home) -> None:
    sink = Collecting()
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            for number in range(10):
                sender.send_nowait(b"%d" % number)
            await eventually(lambda: registration.channel.buffered_bytes == 10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(registration.channel.forward, sink)
                await eventually(lambda: len(sink.items) == 10)
                for number in range(10, 1000):
                    sender.send_nowait(b"%d" % number)
                sender.finish()
    assert sink.items == [b"%d" % number for number in range(1000)]


async def test_a_sink_without_items_is_never_called_and_forward_returns(home: Home) -> None:
    sink = Collecting()
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.finish()
        await registration.channel.forward(sink)
        await registration.channel.forward(sink)
    assert sink.items == []


async def test_forward_raises_the_terminal_error_after_the_items(home: Home) -> None:
    sink = Collecting()
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.send_nowait(b"a")
            sender.fail(EngineError("late"))
        with pytest.raises(EngineError, match="late"):
            await registration.channel.forward(sink)
        assert await collect(registration.channel) == ([], None)
    assert sink.items == [b"a"]


async def test_a_worker_that_vanishes_under_a_sink_is_disconnected(home: Home) -> None:
    sink = Collecting()
    with home.server.register(Context("r")) as registration:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def consumer() -> None:
                with pytest.raises(DisconnectedError):
                    await registration.channel.forward(sink)

            async with home.call(registration.connection) as sender:
                sender.send_nowait(b"a")
                await eventually(lambda: sink.items)
    assert sink.items == [b"a"]


async def test_kill_ends_forward_and_the_sink_gets_nothing_more(home: Home) -> None:
    mine, sink = Context("r"), Collecting()

    async def kill_at_the_first_item() -> None:
        await eventually(lambda: sink.items)
        mine.kill(Reason.CLIENT_DISCONNECT)

    async with trio.open_nursery() as nursery:
        with home.server.register(mine) as registration:
            nursery.start_soon(serve_until_killed, home, registration.connection, Context("w"))
            nursery.start_soon(kill_at_the_first_item)
            with pytest.raises(KilledError):
                await registration.channel.forward(sink)
    assert sink.items == [b"first"]


async def test_a_cancelled_forward_leaves_the_rest_to_be_iterated(home: Home) -> None:
    sink = Collecting(has_room=False)
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(registration.channel.forward, sink)
                sender.send_nowait(b"a")
                await eventually(lambda: sink.items)
                nursery.cancel_scope.cancel()
            sender.send_nowait(b"b")
            sender.finish()
        sink.make_room()
        assert await collect(registration.channel) == ([b"b"], None)
    assert sink.items == [b"a"]


async def test_what_a_sink_raises_kills_its_stream_alone_and_comes_out_of_forward(
    home: Home,
) -> None:
    theirs, sink = Context("w"), Collecting(fails_at=b"first")
    async with trio.open_nursery() as nursery:
        with (
            home.server.register(Context("r")) as registration,
            home.server.register(Context("other")) as other,
        ):
            async with home.call(other.connection) as sender:
                nursery.start_soon(serve_until_killed, home, registration.connection, theirs)
                with pytest.raises(ZeroDivisionError):
                    await registration.channel.forward(sink)
                await eventually(lambda: theirs.is_killed)
                sender.send_nowait(b"unharmed")
                sender.finish()
            assert await collect(other.channel) == ([b"unharmed"], None)
            assert await collect(registration.channel) == ([], None)
    assert theirs.reason is Reason.CONSUMER_DROPPED


async def test_a_stream_has_a_sink_or_a_consumer_and_not_two(home: Home) -> None:
    with home.server.register(Context("r")) as registration:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(registration.channel.forward, Collecting())
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await registration.channel.forward(Collecting())
            with pytest.raises(trio.BusyResourceError):
                await anext(registration.channel)
            nursery.cancel_scope.cancel()


async def test_a_sink_without_room_stops_the_worker_until_there_is_room(home: Home) -> None:
    """The worker's source is told by `on_room`, and never awaits."""
    item, sink = b"x" * 10_000, Collecting(has_room=False)
    theirs, sent, told = Context("w"), 0, 0

    async def handler(connection: ConnectionInfo) -> None:
        async with home.call(connection, theirs) as sender:

            def send() -> None:
                nonlocal sent, told
                told += 1
                while sent < 5000:
                    sent += 1
                    if not sender.send_nowait(item):
                        return
                if not finished.is_set():
                    finished.set()

            finished = trio.Event()
            sender.on_room(send)
            send()
            await finished.wait()
            sender.finish()

    queue = home.client.options.queue_bytes_max
    items_max = (2 * queue + 16 * 1024 * 1024) // len(item)
    async with trio.open_nursery() as nursery:
        with home.server.register(Context("r")) as registration:
            nursery.start_soon(handler, registration.connection)
            async with trio.open_nursery() as consuming:
                consuming.start_soon(registration.channel.forward, sink)
                before = -1
                while before != sent:
                    before = sent
                    await trio.testing.wait_all_tasks_blocked(0.05)
                assert 0 < sent <= items_max
                assert registration.channel.is_paused
                sink.make_room()
    assert sink.items == [item] * 5000
    assert told > 1
