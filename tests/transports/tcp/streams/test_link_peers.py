"""Both ends of a link against peers that break the rules, or die: of a stream, or of the link."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from tests.conformance.requests.collecting import collect
from tests.transports.tcp.ends import Home, eventually, lone_client, open_home
from tests.transports.tcp.streams.raw_links import (
    WINDOW,
    RawLink,
    on_link,
    raw_caller,
    worker_link,
)
from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import DisconnectedError, EngineError, RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import encode_frame
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Failed,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.link_frames import (
    Kind,
    Opening,
    encode_credit,
    encode_event,
    encode_item,
)
from trinamo.runtime.protocol.streams.request import ConnectionInfo, StreamType

ITEM = b"item"


def head(stream: int, kind: int, rest: bytes = b"") -> bytes:
    return stream.to_bytes(4, "big") + bytes([kind]) + rest


def batch(*pairs: tuple[int, int], data: bytes = b"") -> bytes:
    lengths = b"".join(s.to_bytes(4, "big") + n.to_bytes(4, "big") for s, n in pairs)
    return encode_frame(head(0, Kind.BATCH, lengths), data)


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with open_home(streams="multiplexed", data_bytes_max=100_000) as home:
        yield home


# --- the caller's end ------------------------------------------------------------------------------

# Of stream 1, which is open; stream 2 is, too.
OF_ONE_STREAM = [
    pytest.param([encode_event(1, Opened())], id="a second prologue"),
    pytest.param([encode_event(1, Stop())], id="stop from a worker"),
    pytest.param([encode_event(1, Kill())], id="kill from a worker"),
    pytest.param([encode_event(1, Refused("", ""))], id="refused from a worker"),
    pytest.param([encode_credit(1, 1)], id="credit for nothing"),
    pytest.param(
        [encode_item(1, bytes(WINDOW)), encode_item(1, ITEM)], id="an item without credit"
    ),
    pytest.param([encode_item(1, bytes(100_001))], id="an item over its bound"),
    pytest.param(
        [encode_item(1, bytes(16_384), is_last=False)] * 7, id="an item in parts over its bound"
    ),
]
OF_THE_LINK = [
    pytest.param([encode_event(3, Opened())], id="a stream that never was"),
    pytest.param([encode_event(0, Opened())], id="stream 0"),
    pytest.param([encode_frame(head(1, 13))], id="an unknown kind"),
    pytest.param([encode_frame(b"\0\0\0")], id="a short header"),
    pytest.param([encode_frame(b"", b"data")], id="no header"),
    pytest.param([encode_frame(head(1, Kind.SENTINEL), b"data")], id="sentinel with data"),
    pytest.param([encode_frame(head(1, Kind.SENTINEL, b"x"))], id="sentinel with a long header"),
    pytest.param([encode_frame(head(1, Kind.FAILED), b"{")], id="an error that is no JSON"),
    pytest.param([encode_frame(head(1, Kind.DATA))], id="an empty item"),
    pytest.param([encode_frame(head(1, Kind.PART))], id="an empty part"),
    pytest.param([encode_frame(head(1, Kind.OPEN, bytes(5)), b"s")], id="opened twice"),
    pytest.param([encode_frame(head(3, Kind.OPEN, bytes(4)), b"s")], id="a short opening"),
    pytest.param([encode_frame(head(3, Kind.OPEN, bytes(4) + b"\7"), b"s")], id="no such type"),
    pytest.param([encode_frame(head(3, Kind.OPEN, bytes(5)))], id="no subject"),
    pytest.param([encode_frame(head(3, Kind.OPEN, bytes(5)), b"s" * 129)], id="a long subject"),
    pytest.param([encode_frame(head(1, Kind.CREDIT, b"\1"))], id="short credit"),
    pytest.param([batch((1, 3), (2, 1), data=b"abc")], id="a batch with too little"),
    pytest.param([batch((1, 1), (2, 1), data=b"abc")], id="a batch with too much"),
    pytest.param([batch((1, 0), (2, 3), data=b"abc")], id="an empty item in a batch"),
    pytest.param([batch((1, 1), (9, 2), data=b"abc")], id="a batch for a stream that never was"),
    pytest.param([encode_frame(head(0, Kind.BATCH, b"1234567"))], id="half a pair"),
    pytest.param(
        [encode_item(1, b"x", is_last=False), batch((1, 1), (2, 1), data=b"ab")],
        id="an item within the parts of another",
    ),
    pytest.param([b"\xff" * 8], id="oversize"),
    pytest.param([b"GET / HTTP/1.1\r\n\r\n"], id="not frames at all"),
]


@pytest.mark.parametrize("words", OF_ONE_STREAM)
async def test_a_worker_that_breaks_one_stream_loses_that_stream_alone(
    home: Home, words: list[bytes]
) -> None:
    with (
        home.server.register(Context("r")) as mine,
        home.server.register(Context("other")) as other,
    ):
        async with worker_link(home.server.address) as link:
            await link.open(1, mine.connection, Opened())
            await link.open(2, other.connection, Opened())
            await link.write(*words)
            _, error = await collect(mine.channel)
            assert type(error) is RemoteProtocolError
            assert await link.hear() == (1, Kill(Reason.PROTOCOL_ERROR))
            # What is on its way for it is no error.
            await link.say(1, ITEM, Sentinel())
            await link.say(2, b"unharmed", Sentinel())
            assert await collect(other.channel) == ([b"unharmed"], None)
            assert len(home.server.links) == 1


@pytest.mark.parametrize("words", OF_THE_LINK)
async def test_a_worker_that_breaks_its_link_loses_its_streams_and_nobody_else_s(
    home: Home, words: list[bytes]
) -> None:
    with (
        home.server.register(Context("r")) as mine,
        home.server.register(Context("too")) as too,
        home.server.register(Context("other")) as other,
    ):
        async with (
            worker_link(home.server.address) as link,
            home.call(other.connection) as good,
        ):
            await link.open(1, mine.connection, Opened(), ITEM)
            await link.open(2, too.connection, Opened())
            await link.write(*words)
            items, error = await collect(mine.channel)
            assert items[:1] == [ITEM]
            assert type(error) is RemoteProtocolError
            assert type((await collect(too.channel))[1]) is RemoteProtocolError
            kill = Kill(Reason.PROTOCOL_ERROR)
            *killed, (stream, last) = await link.hear_all()
            assert killed == [(1, kill), (2, kill)]
            assert isinstance(last, Refused)
            assert (stream, last.code) == (0, "bad_link")
            good.send_nowait(b"unharmed")
            good.finish()
        assert await collect(other.channel) == ([b"unharmed"], None)


async def test_more_items_in_parts_than_allowed_end_the_link(home: Home) -> None:
    async with worker_link(home.server.address) as link:
        contexts = [Context(str(number)) for number in range(5)]
        registrations = [home.server.register(context) for context in contexts]
        for number, registration in enumerate(registrations, start=1):
            await link.open(number, registration.connection, Opened())
            await link.write(encode_item(number, b"x", is_last=False))
        for registration in registrations:
            _, error = await collect(registration.channel)
            assert type(error) is RemoteProtocolError
            registration.close()


@pytest.mark.parametrize("how", ["FIN", "RST", "in the middle of a frame"])
async def test_a_worker_that_dies_disconnects_each_of_its_streams(home: Home, how: str) -> None:
    async with worker_link(home.server.address) as link:
        registrations = [home.server.register(Context(str(number))) for number in range(20)]
        for number, registration in enumerate(registrations, start=1):
            await link.open(number, registration.connection, Opened(), ITEM)
        await registrations[-1].channel.wait_prologue()
        if how == "RST":
            link.end.reset()
        else:
            if how != "FIN":
                await link.write(encode_item(1, ITEM)[:-1])
            await link.end.stream.send_eof()
        for registration in registrations:
            items, error = await collect(registration.channel)
            assert items == [ITEM]
            assert type(error) is DisconnectedError
            assert not error.definite
            registration.close()


async def test_a_stream_closed_without_an_end_mark_is_disconnected_and_the_link_stays(
    home: Home,
) -> None:
    with home.server.register(Context("r")) as mine:
        async with worker_link(home.server.address) as link:
            await link.open(1, mine.connection, Opened(), ITEM, Closed())
            items, error = await collect(mine.channel)
            assert items == [ITEM]
            assert type(error) is DisconnectedError
            assert len(home.server.links) == 1


async def test_who_is_refused_hears_why_and_goes_on_with_its_other_streams(home: Home) -> None:
    with (
        home.server.register(Context("r")) as mine,
        home.server.register_input(Context("i")) as asked,
    ):
        async with worker_link(home.server.address) as link:
            unknown = ConnectionInfo(home.server.address, "0" * 32, StreamType.RESPONSE)
            other_type = ConnectionInfo(
                home.server.address, asked.connection.subject, StreamType.RESPONSE
            )
            await link.open(1, mine.connection, Opened())
            for number, (connection, code) in enumerate(
                [
                    (unknown, "unknown_subject"),
                    (mine.connection, "taken_subject"),
                    (other_type, "bad_handshake"),
                ],
                start=2,
            ):
                await link.open(number, connection, Opened(), ITEM)
                heard = await link.hear()
                assert heard is not None
                assert heard[0] == number
                assert isinstance(heard[1], Refused)
                assert heard[1].code == code
            await link.say(1, ITEM, Sentinel())
            assert await collect(mine.channel) == ([ITEM], None)
        assert home.server.refused_count == 3


async def test_nothing_counts_after_the_end_mark_of_a_stream(home: Home) -> None:
    with home.server.register(Context("r")) as mine:
        async with worker_link(home.server.address) as link:
            late = Failed(EngineError("late"))
            await link.open(1, mine.connection, Opened(), ITEM, Sentinel(), ITEM, late, Closed())
            assert await collect(mine.channel) == ([ITEM], None)
            assert len(home.server.links) == 1


async def test_an_input_s_worker_that_speaks_loses_that_stream_alone(home: Home) -> None:
    with home.server.register_input(Context("r")) as asked:
        async with worker_link(home.server.address) as link:
            await link.open(1, asked.connection, ITEM)
            await eventually(lambda: asked.is_taken and home.server.stream_count == 0)
            with pytest.raises(RemoteProtocolError):
                await asked.send(b"x")
            assert len(home.server.links) == 1


# --- the worker's end ------------------------------------------------------------------------------


class Calls:
    """Two streams of one worker to a caller that says what it wants."""

    def __init__(self, link: RawLink, contexts: list[Context]) -> None:
        self.link = link
        self.contexts = contexts
        self.may_end = trio.Event()


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    """Opened; each handler sleeps until it is killed or may end, and then finishes."""
    client, contexts = lone_client(), [Context("one"), Context("two")]
    async with raw_caller() as port, trio.open_nursery() as nursery:

        async def handler(context: Context) -> None:
            async with client.call_home(on_link(port, subject=context.id), context) as sender:
                sender.open()
                with context.scope:
                    await found.may_end.wait()
                sender.finish()

        found = Calls(None, contexts)  # type: ignore[arg-type]
        for context in contexts:
            nursery.start_soon(handler, context)
        with trio.fail_after(120):
            found.link = await port.accept_link()
            async with found.link.end.stream:
                heard = [await found.link.hear() for _ in range(4)]
                said = [each[1] for each in heard if each is not None]
                assert said[1::2] == [Opened(), Opened()]
                order = [each.handshake.subject for each in said if isinstance(each, Opening)]
                contexts.sort(key=lambda context: order.index(context.id))
                yield found
                found.may_end.set()
        await eventually(lambda: client.open_count == 0)


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(encode_event(1, Sentinel()), id="sentinel"),
        pytest.param(encode_item(1, b"x"), id="data"),
        pytest.param(encode_event(1, Opened()), id="prologue"),
        pytest.param(encode_event(1, Stop()) * 2, id="stop twice"),
        pytest.param(encode_event(1, Stop()) + encode_event(1, Refused("", "")), id="refused late"),
        pytest.param(encode_credit(1, 1), id="credit for nothing"),
        pytest.param(encode_credit(1, 0), id="no credit"),
    ],
)
async def test_a_caller_that_breaks_one_stream_kills_that_request_alone(
    calls: Calls, word: bytes
) -> None:
    one, two = calls.contexts
    await calls.link.write(word)
    await eventually(lambda: one.is_killed)
    assert one.kill_reason is Reason.PROTOCOL_ERROR
    assert await calls.link.hear() == (1, Closed())
    assert two.state is State.LIVE
    calls.may_end.set()
    assert await calls.link.hear() == (2, Sentinel())


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(encode_event(7, Kill()), id="a stream that never was"),
        pytest.param(
            encode_frame(head(3, Kind.OPEN, bytes(5)), b"s"), id="a caller opens a stream"
        ),
        pytest.param(encode_frame(head(1, 99)), id="an unknown kind"),
        pytest.param(b"\xff" * 8, id="oversize"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="not frames at all"),
    ],
)
async def test_a_caller_that_breaks_the_link_kills_each_request_of_it(
    calls: Calls, word: bytes
) -> None:
    await calls.link.write(word)
    await eventually(lambda: all(context.is_killed for context in calls.contexts))
    assert {context.kill_reason for context in calls.contexts} == {Reason.PROTOCOL_ERROR}


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_caller_that_dies_kills_each_request_of_its_link(calls: Calls, how: str) -> None:
    if how == "RST":
        calls.link.end.reset()
    else:
        await calls.link.end.stream.send_eof()
    await eventually(lambda: all(context.is_killed for context in calls.contexts))
    assert {context.kill_reason for context in calls.contexts} == {Reason.CONSUMER_DROPPED}


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (Kill(), Reason.CONSUMER_DROPPED),
        *[(Kill(reason), reason) for reason in Reason],
        (Refused("unknown_subject", ""), Reason.CONSUMER_DROPPED),
        (Refused("bad_handshake", ""), Reason.PROTOCOL_ERROR),
        (Closed(), Reason.CONSUMER_DROPPED),
    ],
)
async def test_the_words_that_end_one_stream_end_no_other(
    calls: Calls, word: Control, reason: Reason
) -> None:
    one, two = calls.contexts
    await calls.link.say(1, word)
    await eventually(lambda: one.is_killed)
    assert one.kill_reason is reason
    # The second time it is late.
    await calls.link.say(1, word)
    await calls.link.say(2, Stop(reason))
    await eventually(lambda: two.is_stopped)
    assert not two.is_killed
    assert two.stop_reason is reason
