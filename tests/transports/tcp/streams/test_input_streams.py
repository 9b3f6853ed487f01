"""Request streams: a caller's input to the worker, its end marks, and what truncated input does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import trio
import trio.testing

from tests.transports.tcp.ends import Home, eventually, lone_client, open_home
from tests.transports.tcp.streams.raw_links import meeting, raw_caller, raw_worker
from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import DisconnectedError, KilledError, RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import encode_frame
from trinamo.runtime.protocol.streams.control import (
    Control,
    Data,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.link_frames import Kind, encode_item
from trinamo.runtime.protocol.streams.request import StreamType

OPEN = b"\0\0\0\1" + bytes([Kind.OPEN]) + bytes(5)
SENTINEL = b"\0\0\0\1" + bytes([Kind.SENTINEL])


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with open_home(streams="dedicated") as home:
        yield home


async def test_input_arrives_whole_in_order_and_ends(home: Home) -> None:
    items = [b"%d" % number for number in range(500)] + [b"x" * 300_000]
    got: list[bytes] = []

    async def worker() -> None:
        async with home.client.receive_input(asked.connection, Context("w")) as received:
            got.extend([item async for item in received])

    async with trio.open_nursery() as nursery:
        with home.server.register_input(Context("r")) as asked:
            nursery.start_soon(worker)
            for item in items:
                await asked.send(item)
            await asked.finish()
            await eventually(lambda: len(got) == len(items))
    assert got == items


@pytest.mark.parametrize("when", ["before the call", "after the call"])
@pytest.mark.parametrize("state", [State.STOPPED, State.KILLED])
async def test_stop_and_kill_of_the_caller_end_the_input(
    home: Home, state: State, when: str
) -> None:
    mine, theirs = Context("r"), Context("w")
    with home.server.register_input(mine) as asked:
        if when == "before the call":
            (mine.stop if state is State.STOPPED else mine.kill)()
        async with home.client.receive_input(asked.connection, theirs) as received:
            if when == "after the call":
                await asked.send(b"a")
                assert await anext(received) == b"a"
                (mine.stop if state is State.STOPPED else mine.kill)()
            if state is State.STOPPED:
                assert [item async for item in received] == []
            else:
                with pytest.raises(KilledError):
                    await anext(received)
        assert theirs.state is state
        with pytest.raises(KilledError):
            await asked.send(b"too late")


async def test_leaving_before_the_input_is_complete_is_a_kill(home: Home) -> None:
    """The worker must not take half an input for a whole one; what crosses the Kill is dropped."""
    theirs, left = Context("w"), trio.Event()

    async def worker() -> None:
        async with home.client.receive_input(asked.connection, theirs) as received:
            assert await anext(received) == b"half"
            left.set()
            with pytest.raises(KilledError):
                await anext(received)

    async with trio.open_nursery() as nursery:
        with home.server.register_input(Context("r")) as asked:
            nursery.start_soon(worker)
            await asked.send(b"half")
            await left.wait()
    assert theirs.is_killed


async def test_a_sender_that_waits_for_the_call_wakes_when_the_request_is_killed(
    home: Home,
) -> None:
    mine = Context("r")
    with home.server.register_input(mine) as asked:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def sender() -> None:
                with pytest.raises(KilledError):
                    await asked.send(b"x")

            await trio.testing.wait_all_tasks_blocked()
            mine.kill()


async def test_a_worker_that_drops_the_input_makes_the_sender_fail(home: Home) -> None:
    with home.server.register_input(Context("r")) as asked:
        async with home.client.receive_input(asked.connection, Context("w")):
            await asked.send(b"a")
        await eventually(lambda: asked._machine.ended is not None)
        with pytest.raises(DisconnectedError):
            await asked.send(b"b")


async def test_a_worker_that_does_not_read_holds_the_sender_back(home: Home) -> None:
    sent = 0
    async with trio.open_nursery() as nursery:
        with home.server.register_input(Context("r")) as asked:

            @nursery.start_soon
            async def sender() -> None:
                nonlocal sent
                with suppress(DisconnectedError, KilledError):
                    while True:
                        await asked.send(b"x" * 10_000)
                        sent += 1

            async with home.client.receive_input(asked.connection, Context("w")):
                before = -1
                while before != sent:
                    before = sent
                    await trio.testing.wait_all_tasks_blocked(0.05)
            assert 0 < sent * 10_000 < 20 * 1024 * 1024


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([Opened()], id="a prologue"),
        pytest.param([Data(b"x")], id="data"),
        pytest.param([Stop()], id="stop"),
        pytest.param([encode_frame(OPEN, b"s")], id="opened twice"),
        pytest.param([encode_frame(b"junk")], id="junk"),
        pytest.param([b"\xff" * 16], id="oversize"),
    ],
)
async def test_a_worker_that_talks_on_a_request_stream_ends_it(
    home: Home, words: list[Control | bytes]
) -> None:
    with home.server.register_input(Context("r")) as asked:
        async with raw_worker(asked.connection, *words):
            await eventually(lambda: asked.is_taken and home.server.stream_count == 0)
            with pytest.raises(RemoteProtocolError):
                await asked.send(b"x")


async def said(*words: Control | bytes, fin: bool = True) -> tuple[list[bytes], Context]:
    """What a worker makes of a raw caller's `words`: the items, and its context afterwards."""
    context = Context("w")
    items: list[bytes] = []

    async with raw_caller() as port:
        client = lone_client()
        call = client.receive_input(port.connection(StreamType.REQUEST), context)
        async with meeting(port, call) as (end, received):
            await end.say(*words)
            if fin:
                await end.stream.send_eof()
            else:
                end.link.end.reset()
            try:
                async for item in received:
                    items.append(item)  # noqa: PERF401 -- items before the error count
            except KilledError:
                assert context.is_killed
        assert client.open_count == 0
    return items, context


async def test_sentinel_completes_the_input() -> None:
    items, context = await said(Data(b"a"), Data(b"b"), Sentinel())
    assert (items, context.state) == ([b"a", b"b"], State.LIVE)


async def test_stop_ends_the_input_and_stops_the_request() -> None:
    items, context = await said(Data(b"a"), Stop())
    assert (items, context.state) == ([b"a"], State.STOPPED)


@pytest.mark.parametrize("reason", Reason)
async def test_an_input_stream_says_why_it_was_stopped_or_killed(reason: Reason) -> None:
    _, stopped = await said(Data(b"a"), Stop(reason))
    _, killed = await said(Data(b"a"), Kill(reason))
    assert (stopped.stop_reason, killed.kill_reason) == (reason, reason)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="nothing"),
        pytest.param([Data(b"a")], id="no end mark"),
        pytest.param([encode_item(1, b"abc")[:-1]], id="half a frame"),
    ],
)
@pytest.mark.parametrize("fin", [True, False], ids=["FIN", "RST"])
async def test_truncated_input_kills_the_request(words: list[Control | bytes], fin: bool) -> None:
    _, context = await said(*words, fin=fin)
    assert context.kill_reason is Reason.CONSUMER_DROPPED


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param([Data(b"a"), Kill()], Reason.CONSUMER_DROPPED, id="kill"),
        pytest.param([Refused("unknown_subject", "")], Reason.CONSUMER_DROPPED, id="refused"),
        pytest.param([Refused("bad_handshake", "")], Reason.PROTOCOL_ERROR, id="bad handshake"),
        pytest.param([Opened()], Reason.PROTOCOL_ERROR, id="prologue"),
        pytest.param([Sentinel(), Sentinel()], Reason.PROTOCOL_ERROR, id="two end marks"),
        pytest.param([Stop(), Data(b"a")], Reason.PROTOCOL_ERROR, id="data after stop"),
        pytest.param([b"\xff" * 8], Reason.PROTOCOL_ERROR, id="oversize"),
        pytest.param(
            [encode_frame(SENTINEL, b"x")], Reason.PROTOCOL_ERROR, id="sentinel with data"
        ),
    ],
)
async def test_a_caller_s_other_words_kill_the_request(
    words: list[Control | bytes], reason: Reason
) -> None:
    _, context = await said(*words)
    assert context.kill_reason is reason
