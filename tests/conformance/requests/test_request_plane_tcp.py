"""The request plane over TCP: what every request plane does, and what a connection adds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import msgspec
import pytest
import trio
import trio.testing

from tests.conformance.requests.test_request_plane_nats import Service, probe, stream, unary
from tests.transports.tcp.ends import (
    PATIENCE_S,
    RawEnd,
    accept_member,
    eventually,
    options,
    raw_member,
)
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    EngineError,
    ImpostorError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    UnavailableError,
)
from trinamo.runtime.planes import RequestPlane, RequestServer
from trinamo.runtime.protocol.streams.codec import FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Answer,
    Envelope,
    RequestKind,
    decode_answer,
    encode_answer,
    encode_cancel,
    encode_envelope,
)
from trinamo.transports.tcp import (
    TcpRequestPlane,
    TcpRequestServer,
    open_request_plane,
    open_request_server,
)


@attrs.frozen
class Pair:
    """A worker and a caller over loopback."""

    service: Service
    server: TcpRequestServer
    plane: TcpRequestPlane
    address: str


@asynccontextmanager
async def connected(**changes: int) -> AsyncIterator[Pair]:
    using = options(**changes)
    with trio.fail_after(PATIENCE_S):
        async with (
            open_request_server(using, RealEnv(), instance_id="a1") as server,
            open_request_plane(using, RealEnv()) as plane,
            trio.open_nursery() as nursery,
        ):
            service = Service()
            await nursery.start(server.serve, service)
            yield Pair(service, server, plane, server.address)
            await eventually(lambda: service.running == 0)
            nursery.cancel_scope.cancel()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with connected() as pair:
        yield pair


async def test_they_are_the_interfaces_of_the_runtime(pair: Pair) -> None:
    server: RequestServer = pair.server
    plane: RequestPlane = pair.plane
    assert server.transport == plane.transport == "tcp"


async def test_an_accepted_request_arrives_whole_and_is_acknowledged(pair: Pair) -> None:
    envelope = stream("r1")
    ack = await pair.plane.send(pair.address, envelope, bytes(range(256)))
    assert ack == Answer(id="r1", status=AckStatus.ACCEPTED, message="it is accepted")
    assert pair.service.admitted == [(envelope, bytes(range(256)))]


@pytest.mark.parametrize("status", [each for each in AckStatus if each is not AckStatus.ACCEPTED])
async def test_every_nack_reaches_the_caller_as_itself(pair: Pair, status: AckStatus) -> None:
    ack = await pair.plane.send(pair.address, stream("r1", status.value), b"")
    assert ack == Answer(id="r1", status=status, message=f"it is {status}")


async def test_a_probe_is_decided_like_a_request_that_streams_and_says_who_answers(
    pair: Pair,
) -> None:
    for status in (AckStatus.ACCEPTED, AckStatus.DRAINING):
        ack = await pair.plane.send(pair.address, probe("p1", status.value), b"")
        assert ack == Answer(id="p1", status=status, message=f"it is {status}", instance_id="a1")
    assert pair.service.answered == []


async def test_unary_requests_at_once_share_a_connection_and_get_their_own_results(
    pair: Pair,
) -> None:
    results: dict[int, bytes] = {}

    async def call(number: int) -> None:
        results[number] = await pair.plane.call(pair.address, unary(f"r{number}"), b"%d" % number)

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(call, number)
    assert results == {number: b"re:%d" % number for number in range(200)}
    assert pair.plane.connection_count == 1


async def test_answers_may_overtake_each_other(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.plane.call, pair.address, unary("slow", "wait"), b"")
        await eventually(lambda: pair.service.running == 1)
        assert await pair.plane.call(pair.address, unary("fast"), b"x") == b"re:x"
        pair.service.release.set()


async def test_a_typed_error_of_the_handler_is_raised_at_the_caller(pair: Pair) -> None:
    with pytest.raises(EngineError, match="out of luck") as failed:
        await pair.plane.call(pair.address, unary("r1", "fail"), b"")
    assert not failed.value.definite
    with pytest.raises(UnavailableError, match="draining"):
        await pair.plane.call(pair.address, unary("r2", "drain"), b"")


async def test_a_port_nobody_listens_on_is_a_connect_error_and_later_requests_dial_again(
    pair: Pair,
) -> None:
    for _ in range(2):
        with pytest.raises(ConnectError) as caught:
            await pair.plane.send("127.0.0.1:1", stream("r1"), b"")
        assert caught.value.definite
    assert pair.plane.connection_count == 0


async def test_a_caller_that_is_cancelled_tells_the_worker(pair: Pair) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.plane.call, pair.address, unary("r1", "wait"), b"")
            await eventually(lambda: pair.service.running == 1)
            scope.cancel()
    await eventually(lambda: pair.service.cancelled == ["r1"])
    await eventually(lambda: pair.service.running == 0)
    assert pair.service.answered == []
    assert await pair.plane.call(pair.address, unary("r2"), b"x") == b"re:x"


async def test_a_caller_that_goes_away_cancels_its_unary_requests(pair: Pair) -> None:
    async with open_request_plane(options(), RealEnv()) as theirs, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call() -> None:
            with pytest.raises(DisconnectedError):
                await theirs.call(pair.address, unary("r1", "wait"), b"")

        await eventually(lambda: pair.service.running == 1)
        theirs._nursery.cancel_scope.cancel()
    await eventually(lambda: pair.service.running == 0)


async def test_what_is_larger_than_a_frame_is_refused_before_it_costs_the_connection() -> None:
    async with connected(data_bytes_max=1000, header_bytes_max=1000) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.plane.call, pair.address, unary("slow", "wait"), b"")
            await eventually(lambda: pair.service.running == 1)
            with pytest.raises(RequestError, match="payload of 1001 bytes"):
                await pair.plane.call(pair.address, unary("r1"), b"x" * 1001)
            with pytest.raises(RequestError, match="envelope of"):
                await pair.plane.call(pair.address, unary("r2", "x" * 1000), b"")
            with pytest.raises(EngineError, match="result of 1001 bytes"):
                await pair.plane.call(pair.address, unary("r3", "big"), b"1001")
            assert await pair.plane.call(pair.address, unary("r4", "big"), b"1000") == b"x" * 1000
            pair.service.release.set()
        assert pair.server.malformed_count == 0


async def test_more_unary_requests_than_the_bound_are_overloaded(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(1024):
            nursery.start_soon(pair.plane.call, pair.address, unary(f"r{number}", "wait"), b"")
        await eventually(lambda: pair.service.running == 1024)
        with pytest.raises(OverloadedError):
            await pair.plane.call(pair.address, unary("one more"), b"")
        pair.service.release.set()


NO_FRAMES = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 64,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\0\0\0\0\xff\xff\xff\xff",
]
NO_REQUESTS = [
    (encode_frame(b"", b"no envelope"), ""),
    (encode_frame(b"{}"), ""),
    (encode_frame(b"\xff\xfe"), ""),
    (encode_frame(b"[" * 50_000), ""),
    (encode_frame(b'{"cancel": 1}'), ""),
    (encode_frame(b'{"cancel":1}'), ""),
    (encode_frame(encode_envelope(stream(""))), ""),
    (encode_frame(encode_envelope(stream("x" * 129))), "x" * 129),
    (encode_frame(encode_envelope(stream("x" * 2000))), ""),
    (encode_frame(encode_envelope(Envelope(id="r1", endpoint="a/b/c"))), "r1"),
    (encode_frame(b'{"id":"r1","endpoint":7}'), "r1"),
    (encode_frame(b'{"id":"r1","endpoint":"a/b/c","kind":"poem"}'), "r1"),
]


@pytest.mark.parametrize(("garbage", "request_id"), NO_REQUESTS)
async def test_a_bad_envelope_is_answered_for_itself_and_costs_nobody_else_anything(
    pair: Pair, garbage: bytes, request_id: str
) -> None:
    async with raw_member(pair.address) as caller:
        await caller.say(encode_frame(encode_envelope(unary("slow", "wait"))), garbage)
        await eventually(lambda: pair.server.malformed_count == 1)
        pair.service.release.set()
        await caller.say(encode_frame(encode_envelope(unary("r2"))))
        received = b""
        while received.count(b'"id"') < 3:
            received += bytes(await caller.stream.receive_some())
        found = [decode_answer(header).ack for header, _ in FrameDecoder().feed(received)]
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
    async with raw_member(pair.address) as stranger:
        await stranger.say(garbage)
        (answer,) = await answers(stranger)
        assert (answer.id, answer.status) == ("", AckStatus.INVALID)
    assert pair.server.malformed_count == 1
    assert await pair.plane.call(pair.address, unary("r2"), b"x") == b"re:x"


async def answers(stranger: RawEnd) -> list[Answer]:
    """The ACKs and NACKs until the server hangs up."""
    received = b"".join([bytes(data) async for data in stranger.stream])
    return [decode_answer(header).ack for header, _ in FrameDecoder().feed(received)]


async def test_a_request_that_ends_after_its_caller_was_turned_away_harms_nobody(
    pair: Pair,
) -> None:
    """The answer is due while the connection already says goodbye."""
    async with raw_member(pair.address) as stranger:
        await stranger.say(encode_frame(encode_envelope(unary("r1", "wait"))))
        await eventually(lambda: pair.service.running == 1)
        await stranger.say(b"\xff" * 8)
        await eventually(lambda: pair.server.malformed_count == 1)
        pair.service.release.set()
        await eventually(lambda: pair.service.running == 0)
        await answers(stranger)
    assert await pair.plane.call(pair.address, unary("r2"), b"x") == b"re:x"


async def test_a_request_id_in_use_on_the_same_connection_is_refused(pair: Pair) -> None:
    async with raw_member(pair.address) as stranger:
        await stranger.say(encode_frame(encode_envelope(unary("r1", "wait"))) * 2)
        data = bytes(await stranger.stream.receive_some())
        ((header, _),) = FrameDecoder().feed(data)
        assert "in use" in decode_answer(header).message
        pair.service.release.set()
        await eventually(lambda: pair.service.answered == ["r1"])


async def test_a_cancel_for_a_request_nobody_knows_reaches_the_service_and_is_not_kept(
    pair: Pair,
) -> None:
    """A connection keeps order: who has not arrived before its cancel never will."""
    async with raw_member(pair.address) as stranger:
        await stranger.say(encode_frame(encode_cancel("r9")), encode_frame(b""))
        await eventually(lambda: pair.service.cancelled == ["r9"])
    assert pair.service.remembered == []


async def test_another_instance_than_was_meant_gets_nothing(pair: Pair) -> None:
    """The address was reused, or is another's in discovery: said before anything is sent."""
    other = msgspec.structs.replace(stream("r1"), instance_id="zz")
    for _ in range(2):
        with pytest.raises(ImpostorError, match="answers instance a1, not zz") as caught:
            await pair.plane.send(pair.address, other, b"")
        assert caught.value.definite
    with pytest.raises(ImpostorError):
        await pair.plane.call(
            pair.address, msgspec.structs.replace(other, kind=RequestKind.UNARY), b""
        )
    with pytest.raises(ImpostorError):
        await pair.plane.hold(pair.address, lambda: None, instance_id="zz")
    assert pair.service.admitted == []
    assert (await pair.plane.send(pair.address, probe("p1"), b"")).status is AckStatus.ACCEPTED
    assert pair.plane.connection_count == 1


async def test_a_caller_with_another_secret_sends_nothing_and_is_told_which_key(
    pair: Pair,
) -> None:
    async with open_request_plane(options(secret=bytes(16)), RealEnv()) as plane:
        with pytest.raises(ConnectError, match="secret_file") as caught:
            await plane.send(pair.address, stream("r1"), b"")
        assert caught.value.definite
    assert pair.service.admitted == []


async def test_a_port_that_says_nothing_is_no_connection() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    for timeouts in ({"connect_timeout_s": 0.05}, {"ack_timeout_s": 0.05}):
        async with open_request_plane(options(**timeouts), RealEnv()) as plane:
            with pytest.raises(ConnectError, match=r"within|greet"):
                await plane.send(address, stream("r1"), b"")
    await listener.aclose()


async def test_a_caller_that_goes_away_leaves_no_cancels_behind(pair: Pair) -> None:
    async with raw_member(pair.address) as stranger:
        words = [encode_frame(encode_envelope(unary(f"r{n}", "wait"))) for n in range(3)]
        await stranger.say(*words)
        await eventually(lambda: pair.service.running == 3)
    await eventually(lambda: pair.service.running == 0)
    assert sorted(pair.service.cancelled) == ["r0", "r1", "r2"]
    assert pair.service.remembered == []


async def test_a_bad_answer_fails_the_request_it_names_and_no_other() -> None:
    """As `test_a_bad_envelope...`, the other way round."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    bad, good = (
        encode_frame(b'{"id":"r1","status":"fine"}'),
        Answer(id="r2", status=AckStatus.ACCEPTED),
    )
    with trio.fail_after(PATIENCE_S):
        async with listener, open_request_plane(options(), RealEnv()) as plane:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def wronged() -> None:
                    with pytest.raises(RemoteProtocolError, match="malformed"):
                        await plane.send(address, stream("r1"), b"")

                @nursery.start_soon
                async def unharmed() -> None:
                    assert await plane.send(address, stream("r2"), b"") == good

                worker = await accept_member(listener)
                decoder, count = FrameDecoder(), 0
                while count < 2:
                    count += len(decoder.feed(bytes(await worker.stream.receive_some())))
                await worker.say(bad, encode_frame(encode_answer(good)))
            assert plane.connection_count == 1
            await worker.stream.aclose()


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
                await plane.send(address, stream(f"r{number}"), b"")
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
        encode_frame(b"{}"),
        encode_frame(b'{"id":"r1","status":"fine"}'),
        encode_frame(b'{"id":"r1"}'),
        encode_frame(encode_answer(Answer(id="", status=AckStatus.INVALID, message="what?"))),
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
            await plane.send(address, stream("r1"), b"")


async def test_the_answer_to_a_forgotten_request_is_ignored(pair: Pair) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.plane.call, pair.address, unary("r1", "wait"), b"")
            await eventually(lambda: pair.service.running == 1)
            pair.service.release.set()
            scope.cancel()
    assert await pair.plane.call(pair.address, unary("r2"), b"x") == b"re:x"
