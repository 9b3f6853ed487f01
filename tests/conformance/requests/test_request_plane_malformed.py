"""The tcp request plane and those who speak it badly, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from tests.conformance.requests.service import ack_of, probe, result_of, stream, unary
from tests.conformance.requests.tcp_pairs import Pair, connected
from tests.transports.tcp.ends import (
    PATIENCE_S,
    accept_member,
    eventually,
    options,
    raw_member,
)
from tests.transports.tcp.streams.raw_links import RawLink
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    ImpostorError,
    RemoteProtocolError,
)
from trinamo.runtime.protocol.streams.codec import encode_frame
from trinamo.runtime.protocol.streams.control import Closed, Refused
from trinamo.runtime.protocol.streams.link_frames import (
    MESSAGES_FROM,
    Kind,
    LinkMessage,
    encode_event,
    encode_item,
    encode_message,
)
from trinamo.runtime.protocol.streams.multiplex import PART_BYTES
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Envelope,
    RequestAnswer,
    RequestKind,
    decode_answer,
    encode_answer,
    encode_cancel,
    encode_envelope,
)
from trinamo.transports.tcp import open_request_plane


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with connected() as pair:
        yield pair


def ask(header: bytes, payload: bytes = b"") -> bytes:
    return encode_message(Kind.REQUEST, header, payload)


def tell(header: bytes) -> bytes:
    return encode_message(Kind.ANSWER, header, b"")


@asynccontextmanager
async def raw_caller(pair: Pair) -> AsyncIterator[RawLink]:
    """A caller's end of a link that says whatever a test wants."""
    async with raw_member(pair.address) as end:
        yield RawLink(end)


async def hear_answer(link: RawLink) -> RequestAnswer:
    """What comes next, an ACK or a NACK."""
    arrival = await link.hear()
    assert arrival is not None
    stream, message = arrival
    assert isinstance(message, LinkMessage)
    assert (stream, message.kind) == (0, Kind.ANSWER)
    return decode_answer(message.header).ack


NO_FRAMES = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 64,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\0\0\0\0\xff\xff\xff\xff",
    tell(encode_answer(RequestAnswer(id="r1", status=AckStatus.ACCEPTED))),
    encode_message(Kind.REQUEST, b"{}", b"x", MESSAGES_FROM),
    encode_event(MESSAGES_FROM, Refused("", "")),
    encode_item(1, b"no such stream"),
]


NO_REQUESTS = [
    (ask(b"", b"no envelope"), ""),
    (ask(b"{}"), ""),
    (ask(b"\xff\xfe"), ""),
    (ask(b"[" * 50_000), ""),
    (ask(b'{"cancel": 1}'), ""),
    (ask(b'{"cancel":1}'), ""),
    (ask(encode_envelope(stream(""))), ""),
    (ask(encode_envelope(stream("x" * 129))), "x" * 129),
    (ask(encode_envelope(stream("x" * 2000))), ""),
    (ask(encode_envelope(Envelope(id="r1", endpoint="a/b/c"))), "r1"),
    (ask(b'{"id":"r1","endpoint":7}'), "r1"),
    (ask(b'{"id":"r1","endpoint":"a/b/c","kind":"poem"}'), "r1"),
]


@pytest.mark.parametrize(("garbage", "request_id"), NO_REQUESTS)
async def test_a_bad_envelope_is_answered_for_itself_and_costs_nobody_else_anything(
    pair: Pair, garbage: bytes, request_id: str
) -> None:
    async with raw_caller(pair) as caller:
        await caller.write(ask(encode_envelope(unary("slow", "wait"))), garbage)
        await eventually(lambda: pair.server.malformed_count == 1)
        pair.service.release.set()
        await caller.write(ask(encode_envelope(unary("r2"))))
        found = [await hear_answer(caller) for _ in range(3)]
        assert {(each.id, each.status) for each in found} == {
            (request_id, AckStatus.INVALID),
            ("slow", AckStatus.ACCEPTED),
            ("r2", AckStatus.ACCEPTED),
        }
    assert pair.service.remembered == []


@pytest.mark.parametrize("garbage", NO_FRAMES)
async def test_what_is_no_frame_is_answered_invalid_and_hung_up_on_and_the_server_lives(
    pair: Pair, garbage: bytes
) -> None:
    async with raw_caller(pair) as stranger:
        await stranger.write(garbage)
        ((stream, said),) = await stranger.hear_all()
        assert isinstance(said, Refused)
        assert (stream, said.code) == (0, "bad_link")
    await eventually(lambda: pair.server.malformed_count == 1)
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"


async def test_a_request_that_ends_after_its_caller_was_turned_away_harms_nobody(
    pair: Pair,
) -> None:
    """The answer is due while the connection already says goodbye."""
    async with raw_caller(pair) as stranger:
        await stranger.write(ask(encode_envelope(unary("r1", "wait"))))
        await eventually(lambda: pair.service.running == 1)
        await stranger.write(b"\xff" * 8)
        await trio.testing.wait_all_tasks_blocked(0.01)
        pair.service.release.set()
        await eventually(lambda: pair.service.running == 0)
        await stranger.hear_all()
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"


async def test_a_request_id_in_use_on_the_same_connection_is_refused(pair: Pair) -> None:
    async with raw_caller(pair) as stranger:
        await stranger.write(ask(encode_envelope(unary("r1", "wait"))) * 2)
        assert "in use" in (await hear_answer(stranger)).message
        pair.service.release.set()
        await eventually(lambda: pair.service.answered == ["r1"])


async def test_a_cancel_for_a_request_nobody_knows_reaches_the_service_and_is_not_kept(
    pair: Pair,
) -> None:
    """A connection keeps order: who has not arrived before its cancel never will."""
    async with raw_caller(pair) as stranger:
        await stranger.write(ask(encode_cancel("r9")), encode_frame(b""))
        await eventually(lambda: pair.service.cancelled == ["r9"])
    assert pair.service.remembered == []


async def test_another_instance_than_was_meant_gets_nothing(pair: Pair) -> None:
    """The address was reused, or is another's in discovery: said before anything is sent."""
    other = msgspec.structs.replace(stream("r1"), instance_id="zz")
    for _ in range(2):
        with pytest.raises(ImpostorError, match="answers instance a1, not zz") as caught:
            await ack_of(pair.plane, pair.address, other, b"")
        assert caught.value.definite
    with pytest.raises(ImpostorError):
        await result_of(
            pair.plane, pair.address, msgspec.structs.replace(other, kind=RequestKind.UNARY), b""
        )
    with pytest.raises(ImpostorError):
        await pair.plane.hold(pair.address, lambda: None, instance_id="zz")
    assert pair.service.admitted == []
    assert (await ack_of(pair.plane, pair.address, probe("p1"), b"")).status is AckStatus.ACCEPTED
    assert pair.plane.connection_count == 1


async def test_a_caller_with_another_secret_sends_nothing_and_is_told_which_key(
    pair: Pair,
) -> None:
    async with open_request_plane(options(secret=bytes(16)), RealEnv()) as plane:
        with pytest.raises(ConnectError, match="secret_file") as caught:
            await ack_of(plane, pair.address, stream("r1"), b"")
        assert caught.value.definite
    assert pair.service.admitted == []


async def test_a_port_that_says_nothing_is_no_connection() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    for timeouts in ({"connect_timeout_s": 0.05}, {"ack_timeout_s": 0.05}):
        async with open_request_plane(options(**timeouts), RealEnv()) as plane:
            with pytest.raises(ConnectError, match=r"within|greet"):
                await ack_of(plane, address, stream("r1"), b"")
    await listener.aclose()


async def test_a_caller_that_goes_away_leaves_no_cancels_behind(pair: Pair) -> None:
    async with raw_caller(pair) as stranger:
        words = [ask(encode_envelope(unary(f"r{n}", "wait"))) for n in range(3)]
        await stranger.write(*words)
        await eventually(lambda: pair.service.running == 3)
    await eventually(lambda: pair.service.running == 0)
    assert sorted(pair.service.cancelled) == ["r0", "r1", "r2"]
    assert pair.service.remembered == []


async def test_a_bad_answer_fails_the_request_it_names_and_no_other() -> None:
    """As `test_a_bad_envelope...`, the other way round."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    bad, good = (
        tell(b'{"id":"r1","status":"fine"}'),
        RequestAnswer(id="r2", status=AckStatus.ACCEPTED),
    )
    with trio.fail_after(PATIENCE_S):
        async with listener, open_request_plane(options(), RealEnv()) as plane:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def wronged() -> None:
                    with pytest.raises(RemoteProtocolError, match="malformed"):
                        await ack_of(plane, address, stream("r1"), b"")

                @nursery.start_soon
                async def unharmed() -> None:
                    assert await ack_of(plane, address, stream("r2"), b"") == good

                worker = RawLink(await accept_member(listener))
                for _ in range(2):
                    await worker.hear()
                await worker.write(bad, tell(encode_answer(good)))
            assert plane.connection_count == 1
            await worker.end.stream.aclose()


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_worker_that_dies_fails_every_waiting_request_at_once(how: str) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    failed: list[DisconnectedError] = []
    async with (
        listener,
        open_request_plane(options(), RealEnv()) as plane,
        trio.open_nursery() as nursery,
    ):

        async def ask(number: int) -> None:
            with pytest.raises(DisconnectedError) as caught:
                await ack_of(plane, address, stream(f"r{number}"), b"")
            failed.append(caught.value)

        for number in range(3):
            nursery.start_soon(ask, number)
        worker = await accept_member(listener)
        await trio.testing.wait_all_tasks_blocked(0.01)
        if how == "RST":
            worker.reset()
        else:
            await worker.stream.aclose()
    assert len(failed) == 3
    assert len({id(error) for error in failed}) == 3
    assert not any(error.definite for error in failed)


@pytest.mark.parametrize(
    "reply",
    [
        b"OK",
        b"\xff" * 8,
        tell(b"{}"),
        tell(b'{"id":"r1","status":"fine"}'),
        tell(b'{"id":"r1"}'),
        tell(encode_answer(RequestAnswer(id="", status=AckStatus.INVALID, message="what?"))),
        ask(encode_answer(RequestAnswer(id="r1", status=AckStatus.ACCEPTED))),
        encode_event(0, Refused("bad_link", "what?")),
    ],
)
async def test_an_answer_that_is_none_is_never_a_success(reply: bytes) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    async with (
        listener,
        open_request_plane(options(), RealEnv()) as plane,
        trio.open_nursery() as nursery,
    ):

        @nursery.start_soon
        async def worker() -> None:
            async with (await accept_member(listener)).stream as end:
                await end.receive_some(65536)
                await end.send_all(reply)
                await end.send_eof()
                async for _ in end:
                    pass

        with pytest.raises((RemoteProtocolError, DisconnectedError)):
            await ack_of(plane, address, stream("r1"), b"")


async def test_the_answer_to_a_forgotten_request_is_ignored(pair: Pair) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(result_of, pair.plane, pair.address, unary("r1", "wait"), b"")
            await eventually(lambda: pair.service.running == 1)
            pair.service.release.set()
            scope.cancel()
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"


async def test_a_long_request_that_is_given_up_on_its_way_never_arrives_and_leaves_no_parts(
    pair: Pair,
) -> None:
    """More of them than may be on their way at once; the link goes on."""
    async with raw_caller(pair) as caller:
        for number in range(MESSAGES_FROM, MESSAGES_FROM + 10):
            part = encode_item(number, bytes(PART_BYTES), is_last=False)
            await caller.write(part, encode_event(number, Closed()))
        await caller.write(ask(encode_envelope(unary("r1"))))
        assert await hear_answer(caller) == RequestAnswer(id="r1", status=AckStatus.ACCEPTED)
    assert pair.service.answered == ["r1"]


async def test_a_request_without_an_end_ends_its_link() -> None:
    async with connected(data_bytes_max=100_000) as pair, raw_caller(pair) as caller:
        for _ in range(7):
            await caller.write(encode_item(MESSAGES_FROM, bytes(PART_BYTES), is_last=False))
        ((stream, said),) = await caller.hear_all()
        assert isinstance(said, Refused)
        assert (stream, said.message) == (0, "a message over 100000 bytes")
