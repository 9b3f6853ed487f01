"""The caller's port against workers that break the rules, die, or are no workers at all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from tests.transports.tcp.ends import (
    Home,
    eventually,
    open_home,
    raw_connection,
    raw_worker,
    task_count,
)
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    ConfigError,
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
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
    encode_control,
)
from trinamo.runtime.protocol.streams.membership import call_home_proof
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType
from trinamo.transports.tcp import TcpOptions, open_stream_server
from trinamo.transports.tcp.sockets import split_address

OVERSIZE = b"\0\0\0\0\xff\xff\xff\xff"
ITEM = Data(b"item")


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with open_home() as home:
        yield home


# --- a worker in the middle of an answer ---------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([ITEM], id="data before the prologue"),
        pytest.param([Sentinel()], id="sentinel before the prologue"),
        pytest.param([Failed(EngineError(""))], id="failed before the prologue"),
        pytest.param([Handshake("s", StreamType.RESPONSE)], id="a second handshake"),
        pytest.param([Opened(), Opened()], id="a second prologue"),
        pytest.param([Opened(), Stop()], id="stop from a worker"),
        pytest.param([Opened(), Kill()], id="kill from a worker"),
        pytest.param([Opened(), Refused("", "")], id="refused from a worker"),
        pytest.param([Opened(), encode_frame(b'"Sentinel"', b"data")], id="sentinel with data"),
        pytest.param([Opened(), encode_frame(b"{}")], id="unknown control frame"),
        pytest.param([Opened(), encode_frame(b"\xff\xfe")], id="no JSON"),
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
            assert await worker.hear_all() in ([Kill(Reason.PROTOCOL_ERROR)], [])
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
                worker.reset()
            elif how == "FIN":
                await worker.stream.send_eof()
            else:
                await worker.say(encode_control(ITEM)[:-1])
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


async def test_the_caller_hangs_up_after_every_end_mark(home: Home) -> None:
    for last in (
        [Opened(), Sentinel()],
        [Opened(), Failed(EngineError(""))],
        [Declined(EngineError(""))],
    ):
        with home.server.register(Context("r")) as mine:
            async with raw_worker(mine.connection, *last) as worker:
                assert await worker.hear_all() == []
                await eventually(lambda: mine.channel.is_ended)


# --- what the caller says ------------------------------------------------------------------------


async def test_dropping_the_stream_sends_kill_and_fin(home: Home) -> None:
    with home.server.register(Context("r")) as mine:
        worker_call = raw_worker(mine.connection, Opened(), ITEM)
        worker = await worker_call.__aenter__()
        await anext(mine.channel)
    assert await worker.hear_all() == [Kill()]
    await worker_call.__aexit__(None, None, None)


async def test_kill_sends_kill_and_fin_and_stop_sends_stop_once(home: Home) -> None:
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
            assert await worker.hear_all() == [Kill()]


async def test_stop_then_kill_in_one_breath_are_both_said_in_order(home: Home) -> None:
    mine = Context("r")
    with home.server.register(mine) as registration:
        async with raw_worker(registration.connection, Opened()) as worker:
            await registration.channel.wait_prologue()
            mine.stop()
            mine.kill()
            assert await worker.hear_all() == [Stop(), Kill()]


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


async def test_a_killed_worker_that_does_not_hang_up_is_hung_up_on(home: Home) -> None:
    with home.server.register(Context("r")) as mine:
        worker_call = raw_worker(mine.connection, Opened())
        worker = await worker_call.__aenter__()
        await mine.channel.wait_prologue()
    # No word and no FIN from the worker: this would hang were the linger not bounded.
    await worker.wait_gone()
    await eventually(lambda: task_count(home.server) == 0)
    await worker_call.__aexit__(None, None, None)


async def test_stop_after_the_worker_has_finished_says_nothing(home: Home) -> None:
    mine = Context("r")
    with home.server.register(mine) as registration:
        async with raw_worker(registration.connection, Opened(), ITEM, Sentinel()) as worker:
            assert await worker.hear_all() == []
            mine.stop()
            mine.kill()
        assert registration.channel.is_ended


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
        pytest.param([Handshake("0" * 32, StreamType.RESPONSE)], id="no proof"),
        pytest.param([Handshake("0" * 32, StreamType.RESPONSE, "0" * 64)], id="a wrong proof"),
        pytest.param([Opened()], id="prologue first"),
        pytest.param([ITEM], id="data first"),
        pytest.param([encode_frame(b"")], id="an empty frame"),
        pytest.param([OVERSIZE], id="oversize"),
        pytest.param([encode_frame(b"x" * 1017)], id="more than 1 KiB"),
        pytest.param([encode_frame(b'{"subject":1}')], id="malformed handshake"),
        pytest.param([encode_frame(b"{" * 1000)], id="deep JSON"),
        pytest.param([b"GET / HTTP/1.1\r\n\r\n"], id="HTTP"),
        pytest.param([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], id="TLS"),
        pytest.param([bytes(range(256)) * 40], id="noise"),
    ],
)
async def test_a_stranger_is_told_nothing_and_touches_nobody(
    home: Home, words: list[Control | bytes]
) -> None:
    with home.server.register(Context("r")) as mine:
        async with raw_connection(home.server.address) as stranger:
            await stranger.say(*words)
            assert await stranger.hear_all() == []
        assert not mine.is_taken
        async with home.call(mine.connection) as worker:
            worker.finish()
        assert [item async for item in mine.channel] == []
    assert home.server.refused_count == 1


async def test_a_subject_alone_does_not_take_the_stream() -> None:
    """Whoever sees a subject go by still lacks the secret, and the proof for it fits no other."""
    async with open_home(secret=b"0123456789abcdef") as home:
        with (
            home.server.register(Context("r")) as mine,
            home.server.register(Context("s")) as other,
        ):
            subject = mine.connection.subject
            overheard = call_home_proof(b"0123456789abcdef", other.connection.subject, "Response")
            for proof in ("", call_home_proof(b"", subject, "Response"), overheard):
                async with raw_connection(home.server.address) as stranger:
                    await stranger.say(Handshake(subject, StreamType.RESPONSE, proof), Opened())
                    assert await stranger.hear_all() == []
            assert not mine.is_taken
            async with home.call(mine.connection) as worker:
                worker.finish()
            assert [item async for item in mine.channel] == []


async def test_a_worker_that_answers_nobody_is_refused_with_a_reason(home: Home) -> None:
    nobody = ConnectionInfo(home.server.address, "0" * 32, StreamType.RESPONSE)
    async with raw_worker(nobody) as worker:
        (refusal,) = await worker.hear_all()
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
            (refusal,) = await worker.hear_all()
            assert getattr(refusal, "reason", None) is reason


async def test_silent_strangers_do_not_keep_a_worker_from_calling_home() -> None:
    """Attack row 10."""
    async with open_home(ungreeted_max=16, connections_max=32) as home:
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
            (refusal,) = await second.hear_all()
            assert isinstance(refusal, Refused)
            assert refusal.code == "taken_subject"
            await first.say(ITEM, Sentinel())
            assert [item async for item in mine.channel] == [b"item"]


@pytest.mark.parametrize("how", ["FIN", "RST", "half a handshake"])
async def test_a_stranger_that_leaves_before_its_handshake_is_counted(home: Home, how: str) -> None:
    async with raw_connection(home.server.address) as stranger:
        if how == "half a handshake":
            await stranger.say(encode_control(Handshake("s", StreamType.RESPONSE))[:-3])
        if how == "RST":
            stranger.reset()
        else:
            await stranger.stream.send_eof()
            await stranger.wait_gone()
    await eventually(lambda: home.server.refused_count == 1)


async def test_a_handshake_that_never_comes_is_waited_for_no_longer_than_its_timeout() -> None:
    async with (
        open_home(handshake_timeout_s=0.02) as home,
        raw_connection(home.server.address) as end,
    ):
        with home.server.register(Context("r")) as mine:
            await end.say(encode_frame(b"{}")[:-1])
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
    await worker.wait_gone()
    await connection.__aexit__(None, None, None)
