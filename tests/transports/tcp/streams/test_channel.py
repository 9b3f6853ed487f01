"""A stream's items and the room of its sink: what waits, how long, and what is given back."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.conformance.requests.collecting import collect
from tests.conformance.requests.sinks import Collecting
from trinamo.runtime.errors import DisconnectedError, KilledError
from trinamo.runtime.protocol.streams.control import Handshake, Opened, Sentinel
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.request import StreamType
from trinamo.runtime.protocol.streams.response_stream import response_stream
from trinamo.transports.tcp.streams.channel import PUSHED_ITEMS_MAX, Channel

WINDOW_BYTES = 1000
ITEM = b"0123456789"


class Stream:
    """A channel, and the credit that it gave back."""

    def __init__(self) -> None:
        self.given_bytes = 0
        self.is_dropped = False
        self.machine = response_stream(Role.CALLER)
        self.channel = Channel(self.machine, WINDOW_BYTES, self._give, self._drop)
        self.machine.receive(Handshake("s", StreamType.RESPONSE))
        self.machine.receive(Opened())
        self.channel.call()
        self.channel.open()

    def complete(self) -> None:
        self.machine.receive(Sentinel())
        self.channel.ended()

    def _give(self, count: int) -> None:
        self.given_bytes += count

    def _drop(self) -> None:
        self.is_dropped = True


async def test_items_wait_as_they_came_while_the_sink_has_no_room(nursery: trio.Nursery) -> None:
    stream, sink = Stream(), Collecting(has_room=False)
    nursery.start_soon(stream.channel.forward, sink)
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(60):
        assert stream.channel.extend([ITEM])
    assert len(sink.items) == 1
    assert stream.given_bytes == 0
    assert stream.channel.buffered_bytes == 600
    sink.make_room()
    assert len(sink.items) == 60
    assert stream.given_bytes == 600
    assert stream.channel.buffered_bytes == 0


async def test_a_burst_is_pushed_in_pieces_between_which_the_sink_may_be_full(
    nursery: trio.Nursery,
) -> None:
    stream, sink = Stream(), Collecting(has_room=False)
    nursery.start_soon(stream.channel.forward, sink)
    await trio.testing.wait_all_tasks_blocked()
    stream.channel.extend([ITEM] * 100)
    assert len(sink.items) == PUSHED_ITEMS_MAX
    sink.room_again()
    assert len(sink.items) == 100
    assert stream.given_bytes == 640
    sink.make_room()
    assert stream.given_bytes == 640
    assert stream.channel.buffered_bytes == 0
    stream.channel.extend([ITEM] * 14)
    assert stream.given_bytes == 1140


async def test_forward_returns_after_the_end_mark_and_the_items_that_waited(
    nursery: trio.Nursery,
) -> None:
    stream, sink, returned = Stream(), Collecting(has_room=False), trio.Event()

    @nursery.start_soon
    async def consumer() -> None:
        await stream.channel.forward(sink)
        returned.set()

    await trio.testing.wait_all_tasks_blocked()
    stream.channel.extend([b"1"])
    stream.channel.extend([b"2"])
    stream.complete()
    await trio.testing.wait_all_tasks_blocked()
    assert not returned.is_set()
    sink.make_room()
    await returned.wait()
    assert sink.items == [b"1", b"2"]


async def test_a_lost_stream_gives_the_items_that_waited_before_its_error(
    nursery: trio.Nursery,
) -> None:
    stream, sink, failed = Stream(), Collecting(has_room=False), trio.Event()

    @nursery.start_soon
    async def consumer() -> None:
        with pytest.raises(DisconnectedError):
            await stream.channel.forward(sink)
        failed.set()

    await trio.testing.wait_all_tasks_blocked()
    stream.channel.extend([b"1"])
    stream.channel.extend([b"2"])
    stream.channel.fail(DisconnectedError("lost"))
    sink.make_room()
    await failed.wait()
    assert sink.items == [b"1", b"2"]


@pytest.mark.parametrize("is_ended", [False, True])
async def test_a_kill_drops_what_waits_for_a_sink_without_room(
    nursery: trio.Nursery, *, is_ended: bool
) -> None:
    stream, sink, failed = Stream(), Collecting(has_room=False), trio.Event()

    @nursery.start_soon
    async def consumer() -> None:
        with pytest.raises(KilledError):
            await stream.channel.forward(sink)
        failed.set()

    await trio.testing.wait_all_tasks_blocked()
    stream.channel.extend([b"1"])
    stream.channel.extend([b"2"])
    if is_ended:
        stream.complete()
    stream.channel.abandon(KilledError("killed"))
    await failed.wait()
    sink.make_room()
    assert sink.items == [b"1"]


async def test_a_sink_that_fails_at_what_waited_drops_its_stream(nursery: trio.Nursery) -> None:
    stream, sink, failed = Stream(), Collecting(has_room=False, fails_at=b"2"), trio.Event()

    @nursery.start_soon
    async def consumer() -> None:
        with pytest.raises(ZeroDivisionError):
            await stream.channel.forward(sink)
        failed.set()

    await trio.testing.wait_all_tasks_blocked()
    stream.channel.extend([b"1"])
    stream.channel.extend([b"2"])
    stream.complete()
    sink.make_room()
    await failed.wait()
    assert stream.is_dropped


async def test_what_waited_for_a_sink_that_was_left_can_be_iterated() -> None:
    """And no room is given back for it before that."""
    stream, sink = Stream(), Collecting(has_room=False)
    first, second, third = (each * 300 for each in (b"1", b"2", b"3"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.channel.forward, sink)
        await trio.testing.wait_all_tasks_blocked()
        stream.channel.extend([first])
        stream.channel.extend([second])
        nursery.cancel_scope.cancel()
    assert stream.channel.buffered_bytes == 300
    assert stream.given_bytes == 0, "what was taken is less than half a window"
    stream.channel.extend([third])
    stream.complete()
    assert await collect(stream.channel) == ([second, third], None)
    assert sink.items == [first]
    assert stream.given_bytes == 600
