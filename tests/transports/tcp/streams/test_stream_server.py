"""The caller's port against workers that break the rules, or die, and against who is no worker at all.

Each worker calls home on a link of its own; what many share is in `test_link_peers.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import trio
import trio.testing

from tests.transports.tcp.ends import Home, eventually, open_home, raw_connection, task_count
from tests.transports.tcp.streams.raw_links import raw_worker
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    ConfigError,
    ConnectError,
    DisconnectedError,
    EngineError,
    KilledError,
    RemoteProtocolError,
    TrinamoError,
)
from trinamo.runtime.protocol.streams.codec import encode_frame
from trinamo.runtime.protocol.streams.control import (
    Control,
    Data,
    Declined,
    Failed,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.link_frames import Kind, encode_item
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType
from trinamo.transports.tcp import TcpOptions, open_stream_server
from trinamo.transports.tcp.sockets import split_address

OVERSIZE = b"\0\0\0\0\xff\xff\xff\xff"
ITEM = Data(b"item")


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with open_home(streams="dedicated") as home:
        yield home


# --- a worker in the middle of an answer ---------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([ITEM], id="data before the prologue"),
        pytest.param([Sentinel()], id="sentinel before the prologue"),
        pytest.param([Failed(EngineError(""))], id="failed before the prologue"),
        pytest.param([Stop()], id="stop before the prologue"),
        pytest.param([Opened(), Refused("", "")], id="refused from a worker"),
        pytest.param([encode_frame(b"\0\0\0\1" + bytes([Kind.FAILED]), b"\xff\xfe")], id="no JSON"),
        pytest.param([OVERSIZE], id="oversize before the prologue"),
        pytest.param([Opened(), OVERSIZE], id="oversize"),
        pytest.param([b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], id="not frames at all"),
    ],
)
async def test_a_worker_that_breaks_the_protocol_is_killed_and_only_its_stream_ends(
    home: Home, words: list[Control | bytes]
) -> None:
    with (
        home.server.register(Context("other")) as other,
        home.server.register(Context("r")) as mine,
    ):
        async with (
            raw_worker(mine.connection, *words) as worker,
            home.call(other.connection) as good,
        ):
            with pytest.raises(RemoteProtocolError):
                [item async for item in mine.channel]
            await worker.stream.send_eof()
            killed, *rest = await worker.hear_all()
            assert killed == Kill(Reason.PROTOCOL_ERROR)
            assert [each.code for each in rest if isinstance(each, Refused)] in ([], ["bad_link"])
            good.send_nowait(b"unharmed")
            good.finish()
        assert [item async for item in other.channel] == [b"unharmed"]


async def test_items_before_a_broken_frame_are_still_delivered(home: Home) -> None:
    with home.server.register(Context("r")) as mine:
        async with raw_worker(mine.connection, Opened(), ITEM, ITEM, OVERSIZE):
            assert [await anext(mine.channel) for _ in range(2)] == [b"item"] * 2
            with pytest.raises(RemoteProtocolError):
                await anext(mine.channel)


@pytest.mark.parametrize("how", ["FIN", "RST", "in the middle of a frame"])
@pytest.mark.parametrize("words", [[], [Opened()], [Opened(), ITEM, ITEM]])
async def test_a_worker_that_dies_without_an_end_mark_is_disconnected(
    home: Home, how: str, words: list[Control | bytes]
) -> None:
    mine = Context("r")
    with home.server.register(mine) as registration:
        async with raw_worker(registration.connection, *words) as worker:
            await eventually(lambda: registration.is_taken)
            if words:
                await registration.channel.wait_prologue()
            expected = len(words) - 1 if words else 0
            await eventually(lambda: registration.channel.buffered_bytes == 4 * expected)
            if how == "RST":
                worker.link.end.reset()
            elif how == "FIN":
                await worker.stream.send_eof()
            else:
                await worker.say(encode_item(1, b"item")[:-1])
                await worker.stream.send_eof()
            for _ in range(expected):
                assert await anext(registration.channel) == b"item"
            with pytest.raises(DisconnectedError) as caught:
                await anext(registration.channel)
        assert not caught.value.definite
        assert not mine.is_killed


async def test_nothing_counts_after_the_end_mark(home: Home) -> None:
    with home.server.register(Context("r")) as mine:
        words = (Opened(), ITEM, Sentinel(), ITEM, Failed(EngineError("late")), OVERSIZE)
        async with raw_worker(mine.connection, *words):
            assert [item async for item in mine.channel] == [b"item"]


async def test_a_stream_is_over_with_its_end_mark_and_its_link_with_the_worker(home: Home) -> None:
    for last in (
        [Opened(), Sentinel()],
        [Opened(), Failed(EngineError(""))],
        [Declined(EngineError(""))],
    ):
        with home.server.register(Context("r")) as mine:
            async with raw_worker(mine.connection, *last) as worker:
                await eventually(lambda: mine.channel.is_ended)
                assert (home.server.stream_count, len(home.server.links)) == (0, 1)
                await worker.stream.send_eof()
                assert await worker.hear_all() == []
                assert len(home.server.links) == 0


# --- what the caller says ------------------------------------------------------------------------


async def test_dropping_the_stream_sends_kill(home: Home) -> None:
    with home.server.register(Context("r")) as mine:
        worker_call = raw_worker(mine.connection, Opened(), ITEM)
        worker = await worker_call.__aenter__()
        await anext(mine.channel)
    assert home.server.stream_count == 0
    assert await worker.hear() == Kill()
    await worker_call.__aexit__(None, None, None)


async def test_kill_sends_kill_and_stop_sends_stop_once(home: Home) -> None:
    mine = Context("r")
    with home.server.register(mine) as registration:
        async with raw_worker(registration.connection, Opened()) as worker:
            await registration.channel.wait_prologue()
            mine.stop()
            mine.stop()
            assert await worker.hear() == Stop()
            await worker.say(ITEM)
            assert await anext(registration.channel) == b"item"
            mine.kill()
            mine.stop()
            assert await worker.hear() == Kill()
            await worker.stream.send_eof()
            assert await worker.hear_all() == []


async def test_stop_then_kill_in_one_breath_are_both_said_in_order(home: Home) -> None:
    mine = Context("r")
    with home.server.register(mine) as registration:
        async with raw_worker(registration.connection, Opened()) as worker:
            await registration.channel.wait_prologue()
            mine.stop()
            mine.kill()
            assert [await worker.hear() for _ in range(2)] == [Stop(), Kill()]


async def test_data_that_crosses_a_kill_is_dropped_and_is_no_error(home: Home) -> None:
    mine = Context("r")
    with home.server.register(mine) as registration:
        async with raw_worker(registration.connection, Opened(), ITEM) as worker:
            await registration.channel.wait_prologue()
            mine.kill()
            await worker.say(ITEM, ITEM, Sentinel())
            assert await worker.hear() == Kill()
            await worker.stream.send_eof()
            assert await worker.hear() is None
            with pytest.raises(KilledError):
                await anext(registration.channel)
    assert home.server.refused_count == 0


async def test_a_killed_stream_is_gone_whatever_its_worker_does(home: Home) -> None:
    with home.server.register(Context("r")) as mine:
        worker_call = raw_worker(mine.connection, Opened())
        await worker_call.__aenter__()
        await mine.channel.wait_prologue()
    # No word and no FIN from the worker: its link is there, and nothing on it.
    assert (home.server.stream_count, len(home.server.links)) == (0, 1)
    await worker_call.__aexit__(None, None, None)
    await eventually(lambda: task_count(home.server) == 0)


async def test_stop_after_the_worker_has_finished_says_nothing(home: Home) -> None:
    mine = Context("r")
    with home.server.register(mine) as registration:
        async with raw_worker(registration.connection, Opened(), ITEM, Sentinel()) as worker:
            await eventually(lambda: registration.channel.is_ended)
            mine.stop()
            mine.kill()
            await worker.stream.send_eof()
            assert await worker.hear_all() == []


async def test_a_context_that_ends_after_the_server_has_closed_harms_nobody() -> None:
    mine = Context("r")
    async with open_stream_server(TcpOptions(), RealEnv()) as server:
        registration = server.register(mine)
        connection = raw_worker(registration.connection, Opened())
        await connection.__aenter__()
        await registration.channel.wait_prologue()
    mine.stop()
    mine.kill()
    registration.close()
    await connection.__aexit__(None, None, None)
    with pytest.raises(DisconnectedError):
        await anext(registration.channel)


# --- strangers on the port -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(b"trinamo\r\n\r\n\x02\0\0"[:-1] + b"\x01" + bytes(16), id="other flags"),
        pytest.param(b"trinamo\r\n\r\n\x01\0\0" + bytes(16), id="another version"),
        pytest.param(b"trinamo\r\n\r\n\x02\0\0", id="half a hello"),
        pytest.param(encode_item(1, b"item"), id="data first"),
        pytest.param(encode_frame(b""), id="an empty frame"),
        pytest.param(OVERSIZE, id="oversize"),
        pytest.param(encode_frame(b"x" * 1017), id="more than 1 KiB"),
        pytest.param(encode_frame(b"{" * 1000), id="deep JSON"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(bytes(range(256)) * 40, id="noise"),
    ],
)
async def test_a_stranger_is_told_nothing_and_touches_nobody(home: Home, words: bytes) -> None:
    with home.server.register(Context("r")) as mine:
        async with raw_connection(home.server.address) as stranger:
            await stranger.say(words)
            with suppress(trio.BrokenResourceError):
                await stranger.stream.send_eof()
            assert await stranger.hear_all() == b""
        assert not mine.is_taken
        async with home.call(mine.connection) as worker:
            worker.finish()
        assert [item async for item in mine.channel] == []
    assert home.server.refused_count == 1


async def test_a_subject_alone_does_not_take_the_stream() -> None:
    """Whoever sees a subject go by still lacks the secret."""
    async with open_home(secret=b"0123456789abcdef", streams="dedicated") as home:
        with home.server.register(Context("r")) as mine:
            for secret in (b"", b"another secret of 16"):
                with pytest.raises(ConnectError):
                    async with raw_worker(mine.connection, Opened(), secret=secret):
                        raise AssertionError("greeted")
            assert not mine.is_taken
            async with home.call(mine.connection) as worker:
                worker.finish()
            assert [item async for item in mine.channel] == []


async def test_a_worker_that_answers_nobody_is_refused_with_a_reason(home: Home) -> None:
    nobody = ConnectionInfo(home.server.address, "0" * 32, StreamType.RESPONSE)
    async with raw_worker(nobody) as worker:
        refusal = await worker.hear()
        assert isinstance(refusal, Refused)
        assert refusal.code == "unknown_subject"
    assert home.server.refused_count == 1


@pytest.mark.parametrize("open_subject", ["register", "register_input"])
async def test_a_worker_that_calls_too_late_hears_why_its_caller_left(
    home: Home, open_subject: str
) -> None:
    """Its reason is that of the request, whoever was faster."""
    context = Context("r")
    with getattr(home.server, open_subject)(context) as left:
        context.kill(Reason.CLIENT_DISCONNECT)
    for reason in (Reason.CLIENT_DISCONNECT, Reason.CONSUMER_DROPPED):
        async with raw_worker(left.connection) as worker:
            refusal = await worker.hear()
            assert getattr(refusal, "reason", None) is reason


async def test_silent_strangers_do_not_keep_a_worker_from_calling_home() -> None:
    """Attack row 10."""
    async with open_home(ungreeted_max=16, connections_max=32, streams="dedicated") as home:
        strangers = [
            await trio.open_tcp_stream(*split_address(home.server.address)) for _ in range(100)
        ]
        with home.server.register(Context("r")) as mine:
            async with home.call(mine.connection) as worker:
                worker.finish()
            assert [item async for item in mine.channel] == []
        assert home.server.gate.ungreeted_count <= 16
        for stream in strangers:
            await stream.aclose()


async def test_a_taken_subject_is_refused_and_the_first_worker_goes_on(home: Home) -> None:
    with home.server.register(Context("r")) as mine:
        async with (
            raw_worker(mine.connection, Opened()) as first,
            raw_worker(mine.connection) as second,
        ):
            await mine.channel.wait_prologue()
            refusal = await second.hear()
            assert isinstance(refusal, Refused)
            assert refusal.code == "taken_subject"
            await first.say(ITEM, Sentinel())
            assert [item async for item in mine.channel] == [b"item"]


@pytest.mark.parametrize("how", ["FIN", "RST", "half a greeting"])
async def test_a_stranger_that_leaves_before_its_greeting_is_counted(home: Home, how: str) -> None:
    async with raw_connection(home.server.address) as stranger:
        if how == "half a greeting":
            await stranger.say(b"trinamo\r\n")
        if how == "RST":
            stranger.reset()
        else:
            await stranger.stream.send_eof()
            await stranger.wait_gone()
    await eventually(lambda: home.server.refused_count == 1)


async def test_a_greeting_that_never_comes_is_waited_for_no_longer_than_its_timeout() -> None:
    async with (
        open_home(handshake_timeout_s=4, streams="dedicated") as home,
        raw_connection(home.server.address) as end,
    ):
        with home.server.register(Context("r")) as mine:
            await end.say(b"trinamo")
            await end.wait_gone()
            assert home.server.refused_count == 1
            async with home.call(mine.connection) as worker:
                worker.finish()
            assert [item async for item in mine.channel] == []


async def test_a_port_in_use_is_a_sentence_that_names_it() -> None:
    async with open_stream_server(TcpOptions(), RealEnv()) as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use"):
            async with open_stream_server(TcpOptions(port=port), RealEnv()):
                raise AssertionError("bound twice")


async def test_leaving_the_server_ends_every_stream_with_a_typed_error() -> None:
    ended: list[TrinamoError] = []
    async with trio.open_nursery() as nursery:  # noqa: SIM117 -- the consumer outlives the server
        async with open_stream_server(TcpOptions(), RealEnv()) as server:
            registration = server.register(Context("r"))
            connection = raw_worker(registration.connection, Opened())
            worker = await connection.__aenter__()

            @nursery.start_soon
            async def consumer() -> None:
                with pytest.raises(DisconnectedError) as caught:
                    await anext(registration.channel)
                ended.append(caught.value)

            await eventually(lambda: registration.is_taken)
    assert len(ended) == 1
    registration.close()
    await worker.hear_all()
    await connection.__aexit__(None, None, None)
