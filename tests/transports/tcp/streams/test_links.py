"""The life of a link: dialled once, shared, kept while it is wanted, ended when its peer hangs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest
import trio
import trio.testing

from tests.conformance.requests.collecting import collect, wait_room
from tests.conformance.requests.sinks import Collecting
from tests.transports.tcp.ends import Home, eventually, lone_client, open_home, options
from tests.transports.tcp.streams.raw_links import on_link, raw_caller
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, DisconnectedError, ImpostorError, KilledError
from trinamo.runtime.protocol.streams import multiplex
from trinamo.runtime.protocol.streams.control import Closed, Opened, Sentinel
from trinamo.runtime.protocol.streams.link_frames import encode_credit
from trinamo.runtime.protocol.streams.multiplex import PART_BYTES
from trinamo.runtime.protocol.streams.request import Carrier, ConnectionInfo, StreamType
from trinamo.transports.tcp import open_client, open_stream_server


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with open_home(streams="multiplexed") as home:
        yield home


async def one_item(home: Home, item: bytes = b"item") -> None:
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            sender.send_nowait(item)
            sender.finish()
        assert await collect(registration.channel) == ([item], None)


async def test_streams_that_begin_together_wait_for_one_dial_and_share_its_link(
    home: Home,
) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(one_item, home)
    assert len(home.client.links) == len(home.server.links) == 1


async def test_a_caller_that_cannot_be_reached_is_a_connect_error_of_each_waiting_stream() -> None:
    async with raw_caller() as port:
        pass
    client, errors = lone_client(), list[ConnectError]()

    async def call() -> None:
        with pytest.raises(ConnectError) as caught:
            async with client.call_home(on_link(port), Context("w")):
                raise AssertionError("nobody was there")
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(call)
    assert len({id(error) for error in errors}) == 5
    assert all(error.definite for error in errors)
    assert len(client.links) == 0


async def test_a_caller_of_another_cluster_is_an_impostor() -> None:
    async with open_stream_server(options(secret=b"another secret of 16"), RealEnv()) as server:
        connection = ConnectionInfo(
            server.address, "s", StreamType.RESPONSE, Carrier.MULTIPLEXED, 1
        )
        with pytest.raises((ConnectError, ImpostorError)):
            async with lone_client().call_home(connection, Context("w")):
                raise AssertionError("greeted")
        await eventually(lambda: server.refused_count == 1)


async def test_a_request_killed_while_its_link_is_dialled_does_not_wait() -> None:
    theirs = Context("w")
    async with raw_caller() as port, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call() -> None:
            with pytest.raises(KilledError):
                async with lone_client().call_home(on_link(port), theirs):
                    raise AssertionError("called all the same")
            # What dials the link goes on for others until its own time is up.
            nursery.cancel_scope.cancel()

        # It is accepted by the kernel, and never greeted.
        await trio.testing.wait_all_tasks_blocked(0.01)
        theirs.kill()


async def test_an_idle_link_is_closed_and_the_next_stream_dials_another() -> None:
    async with open_home(streams="multiplexed", idle_s=0.02) as home:
        for _ in range(3):
            await one_item(home)
            await eventually(lambda: len(home.client.links) == len(home.server.links) == 0)


async def test_a_link_without_another_id_is_retired_and_ends_with_its_streams(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplex, "_STREAM_MAX", 2)
    with home.server.register(Context("r")) as registration:
        async with home.call(registration.connection) as sender:
            await one_item(home)
            assert len(home.server.links) == 1
            await one_item(home)
            assert len(home.server.links) == 2
            sender.send_nowait(b"still here")
            sender.finish()
        assert await collect(registration.channel) == ([b"still here"], None)


async def test_a_consumer_that_does_not_read_stops_its_own_handler_and_nobody_else(
    home: Home,
) -> None:
    """Its window and one item are all that is kept of it, on both sides."""
    window, item, stuck = home.client.options.window_bytes, b"x" * 1000, Context("stuck")
    sent = 0

    async def endless(connection: ConnectionInfo) -> None:
        nonlocal sent
        async with home.call(connection, stuck) as sender:
            with stuck.scope:
                while True:
                    sent += 1
                    if not sender.send_nowait(item):
                        await wait_room(sender)

    async with trio.open_nursery() as nursery:
        with home.server.register(Context("r")) as unread:
            nursery.start_soon(endless, unread.connection)
            await eventually(lambda: unread.channel.is_paused)
            for _ in range(100):
                await one_item(home, item)
            assert unread.channel.buffered_bytes <= window + len(item)
            assert sent * len(item) <= window + 2 * len(item)
            # It goes on where it was.
            for _ in range(1000):
                assert await anext(unread.channel) == item
    assert stuck.is_killed


async def test_a_long_item_gives_way_to_short_ones_of_other_streams(home: Home) -> None:
    """It goes out in parts, and what is put behind it arrives before its last one."""
    long, order = bytes(400 * PART_BYTES), list[str]()

    async def consume(name: str, channel: AsyncIterator[bytes]) -> None:
        async for item in channel:
            order.append(name)
            assert item == (long if name == "long" else b"short")

    with (
        home.server.register(Context("long")) as big,
        home.server.register(Context("short")) as small,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume, "long", big.channel)
            nursery.start_soon(consume, "short", small.channel)
            async with home.call(big.connection) as one, home.call(small.connection) as other:
                assert not one.send_nowait(long)
                other.send_nowait(b"short")
                other.finish()
                one.finish()
    assert order == ["short", "long"]


async def test_many_long_items_at_once_arrive_whole(home: Home) -> None:
    """More than may be on their way in parts at the same time."""
    long = [bytes([number]) * (10 * PART_BYTES + number) for number in range(12)]

    async def answer(connection: ConnectionInfo, item: bytes) -> None:
        async with home.call(connection) as sender:
            for _ in range(3):
                if not sender.send_nowait(item):
                    await wait_room(sender)
            sender.finish()

    with ExitStack() as held:
        registrations = [held.enter_context(home.server.register(Context("r"))) for _ in long]
        async with trio.open_nursery() as nursery:
            for registration, item in zip(registrations, long, strict=True):
                nursery.start_soon(answer, registration.connection, item)
            for registration, item in zip(registrations, long, strict=True):
                assert await collect(registration.channel) == ([item] * 3, None)


async def test_a_kill_in_the_middle_of_a_long_item_leaves_nothing_of_it(home: Home) -> None:
    theirs = Context("w")
    async with trio.open_nursery() as nursery:

        async def handler(connection: ConnectionInfo) -> None:
            async with home.call(connection, theirs) as sender:
                with theirs.scope:
                    while True:
                        sender.send_nowait(bytes(2000 * PART_BYTES))
                        await wait_room(sender)

        for _ in range(6):
            theirs = Context("w")
            with home.server.register(Context("r")) as registration:
                nursery.start_soon(handler, registration.connection)
                await registration.channel.wait_prologue()
            await eventually(lambda: theirs.is_killed)  # noqa: B023 -- called in this turn
    await one_item(home)
    (link,) = home.server.links
    assert link._demux.parted_bytes == 0


async def test_a_peer_that_takes_nothing_for_a_time_is_taken_for_dead() -> None:
    client = lone_client(options(send_timeout_s=0.1))
    context = Context("w")
    async with raw_caller() as port, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def handler() -> None:
            async with client.call_home(on_link(port, window_bytes=1 << 30), context) as sender:
                sender.open()
                with context.scope:
                    while True:
                        if not sender.send_nowait(bytes(PART_BYTES)):
                            await wait_room(sender)

        link = await port.accept_link()
        await eventually(lambda: context.is_killed)
        assert context.reason is Reason.CONSUMER_DROPPED
        await link.end.stream.aclose()
    await eventually(lambda: len(client.links) == 0)


async def test_leaving_the_client_sends_what_is_left_and_hangs_up() -> None:
    async with raw_caller() as port:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def worker() -> None:
                async with (
                    open_client(options(), RealEnv()) as client,
                    client.call_home(on_link(port), Context("w")) as sender,
                ):
                    sender.open()
                    sender.send_nowait(b"last words")
                    sender.finish()

            link = await port.accept_link()
            heard = [what for _, what in await link.hear_all()]
            await link.end.stream.aclose()
        assert heard[1:] == [Opened(), [b"last words"], Sentinel()]


async def test_an_answer_for_a_slow_consumer_is_held_until_there_is_credit_for_all_of_it() -> None:
    left = False
    async with raw_caller() as port, trio.open_nursery() as nursery:
        client = lone_client()

        @nursery.start_soon
        async def worker() -> None:
            nonlocal left
            async with client.call_home(on_link(port, window_bytes=4), Context("w")) as sender:
                sender.open()
                for _ in range(3):
                    sender.send_nowait(b"item")
                sender.finish()
            left = True

        link = await port.accept_link()
        heard = [await link.hear() for _ in range(3)]
        assert heard[2] == (1, [b"item"])
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not left
            await link.write(encode_credit(1, 4))
            assert await link.hear() == (1, [b"item"])
        assert await link.hear() == (1, Sentinel())
        await eventually(lambda: left)
        await link.end.stream.aclose()


async def test_a_worker_killed_from_within_does_not_wait_for_credit_longer_than_the_linger() -> (
    None
):
    async with raw_caller() as port, trio.open_nursery() as nursery:
        client, context = lone_client(options(linger_s=0.02)), Context("w")

        @nursery.start_soon
        async def worker() -> None:
            with pytest.raises(KilledError, match="before its caller had"):  # noqa: PT012 -- leaving raises
                async with client.call_home(on_link(port, window_bytes=4), context) as sender:
                    sender.open()
                    for _ in range(3):
                        sender.send_nowait(b"item")
                    context.kill(Reason.WORKER_SHUTDOWN)
                    sender.finish()

        link = await port.accept_link()
        heard = [await link.hear() for _ in range(4)]
        assert heard[2:] == [(1, [b"item"]), (1, Closed())]
        await link.end.stream.aclose()


async def test_leaving_the_server_ends_every_stream_of_a_link_with_a_typed_error() -> None:
    theirs = [Context(str(number)) for number in range(20)]
    async with open_client(options(), RealEnv()) as client, trio.open_nursery() as nursery:
        async with open_stream_server(options(streams="multiplexed"), RealEnv()) as server:
            registrations = [server.register(Context("r")) for _ in theirs]

            async def handler(connection: ConnectionInfo, context: Context) -> None:
                async with client.call_home(connection, context) as sender:
                    sender.open()
                    with context.scope:
                        await trio.sleep_forever()

            for registration, context in zip(registrations, theirs, strict=True):
                nursery.start_soon(handler, registration.connection, context)
                await registration.channel.wait_prologue()
        for registration in registrations:
            _, error = await collect(registration.channel)
            assert type(error) is DisconnectedError
            registration.close()
    assert all(context.reason is Reason.CONSUMER_DROPPED for context in theirs)


@pytest.mark.check
async def test_ten_thousand_streams_of_one_link_leave_nothing_behind() -> None:
    """A third is left in the middle, pulled or pushed; no stream, credit, task or block is left."""
    theirs, using = set[Context](), options(streams="multiplexed")
    async with (
        open_stream_server(using, RealEnv()) as server,
        open_client(using, RealEnv()) as client,
    ):
        home = Home(server, client)
        await one_item(home)
        (link,), tasks = home.server.links, trio.lowlevel.current_statistics().tasks_living

        async def handler(connection: ConnectionInfo, number: int) -> None:
            context = Context(f"w{number}")
            theirs.add(context)
            async with home.call(connection, context) as sender:
                with context.scope:
                    for _ in range(3):
                        sender.send_nowait(b"item")
                    if number % 3 == 0:
                        await trio.sleep_forever()
                sender.finish()
            theirs.discard(context)

        async def requests(first: int) -> None:
            for number in range(first, 10_000, 50):
                with home.server.register(Context(f"r{number}")) as registration:
                    handlers.start_soon(handler, registration.connection, number)
                    if number % 3 == 0:
                        assert await anext(registration.channel) == b"item"
                    elif number % 2:
                        sink = Collecting()
                        await registration.channel.forward(sink)
                        assert sink.items == [b"item"] * 3
                    else:
                        assert await collect(registration.channel) == ([b"item"] * 3, None)

        async with trio.open_nursery() as handlers, trio.open_nursery() as callers:
            for first in range(50):
                callers.start_soon(requests, first)
        assert theirs == set()
        assert link.ids.newest == 10_001
        await eventually(lambda: link.lanes == {} and home.client.open_count == 0)
        assert (link._waiting, link._demux.pending_bytes, link._mux.is_empty) == ({}, 0, True)
        assert trio.lowlevel.current_statistics().tasks_living == tasks
