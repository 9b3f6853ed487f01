"""The request plane over subjects, on the memory broker and on a real NATS server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import attrs
import pytest
import trio

from tests.conformance.requests.service import Service, ack_of, probe, result_of, stream, unary
from tests.transports.nats.brokers import (
    Broker,
    MemoryBrokerUnderTest,
    NatsServerUnderTest,
    private_server,
    wait_away,
)
from trinamo.conformance.control import until
from trinamo.conformance.events import fresh_subject
from trinamo.runtime.context import Context
from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    EngineError,
    EventPlaneError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    UnavailableError,
)
from trinamo.runtime.planes import EventPlane, RequestPlane, RequestServer
from trinamo.runtime.protocol.streams.codec import decode_frame, encode_frame
from trinamo.runtime.protocol.streams.reasons import Reason
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Envelope,
    RequestAnswer,
    decode_answer,
    encode_answer,
    encode_cancel,
    encode_envelope,
)
from trinamo.transports.nats import NatsRequestPlane, NatsRequestServer
from trinamo.transports.servers.binaries import find_nats_server


@attrs.frozen
class Pair:
    """A worker and a caller, each with an event plane of its own."""

    service: Service
    server: NatsRequestServer
    plane: NatsRequestPlane
    events: EventPlane
    address: str
    nursery: trio.Nursery


@asynccontextmanager
async def connected(broker: Broker, *, requests_max: int = 64) -> AsyncIterator[Pair]:
    address = f"trinamo.requests.{fresh_subject()}"
    with trio.fail_after(50):
        async with (
            broker.connect() as mine,
            broker.connect() as theirs,
            trio.open_nursery() as nursery,
        ):
            server = NatsRequestServer(theirs, address, requests_max=requests_max)
            service = Service()
            await nursery.start(server.serve, service)
            yield Pair(service, server, NatsRequestPlane(mine, nursery), mine, address, nursery)
            nursery.cancel_scope.cancel()


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.services)])
def broker(request: pytest.FixtureRequest) -> Broker:
    if request.param == "memory":
        return MemoryBrokerUnderTest()
    return NatsServerUnderTest(request.getfixturevalue("nats_server").url)


@pytest.fixture
async def pair(broker: Broker) -> AsyncIterator[Pair]:
    async with connected(broker) as pair:
        yield pair


async def test_they_are_the_interfaces_of_the_runtime() -> None:
    events: EventPlane = MemoryBrokerUnderTest().open()
    server: RequestServer = NatsRequestServer(events, "a.b")
    async with trio.open_nursery() as nursery:
        plane: RequestPlane = NatsRequestPlane(events, nursery)
    assert server.transport == plane.transport == "nats"
    assert server.address == "a.b"


async def test_an_accepted_request_arrives_whole_and_is_acknowledged(pair: Pair) -> None:
    envelope = stream("r1")
    ack = await ack_of(pair.plane, pair.address, envelope, bytes(range(256)))
    assert ack == RequestAnswer(id="r1", status=AckStatus.ACCEPTED, message="it is accepted")
    assert pair.service.admitted == [(envelope, bytes(range(256)))]


@pytest.mark.parametrize("status", [each for each in AckStatus if each is not AckStatus.ACCEPTED])
async def test_every_nack_reaches_the_caller_as_itself(pair: Pair, status: AckStatus) -> None:
    ack = await ack_of(pair.plane, pair.address, stream("r1", status.value), b"")
    assert ack == RequestAnswer(id="r1", status=status, message=f"it is {status}")


async def test_a_probe_is_decided_like_a_request_that_streams_and_says_who_answers(
    pair: Pair,
) -> None:
    for status in (AckStatus.ACCEPTED, AckStatus.DRAINING):
        ack = await ack_of(pair.plane, pair.address, probe("p1", status.value), b"")
        assert ack == RequestAnswer(
            id="p1", status=status, message=f"it is {status}", instance_id="a1"
        )
    assert pair.service.answered == []


async def test_a_unary_request_gets_its_result(pair: Pair) -> None:
    assert await result_of(pair.plane, pair.address, unary("r1"), b"hello") == b"re:hello"
    assert pair.server.in_flight == 0


async def test_unary_requests_at_once_get_their_own_results(pair: Pair) -> None:
    results: dict[int, bytes] = {}

    async def call(number: int) -> None:
        envelope = unary(f"r{number}")
        results[number] = await result_of(pair.plane, pair.address, envelope, b"%d" % number)

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(call, number)
    assert results == {number: b"re:%d" % number for number in range(40)}


async def test_a_typed_error_of_the_handler_is_raised_at_the_caller(pair: Pair) -> None:
    with pytest.raises(EngineError, match="out of luck") as failed:
        await result_of(pair.plane, pair.address, unary("r1", "fail"), b"")
    assert not failed.value.definite
    with pytest.raises(UnavailableError, match="draining") as drained:
        await result_of(pair.plane, pair.address, unary("r2", "drain"), b"")
    assert drained.value.definite


async def test_an_address_nobody_serves_is_unavailable_at_once(pair: Pair) -> None:
    with pytest.raises(UnavailableError) as caught:
        await ack_of(pair.plane, f"{pair.address}.gone", stream("r1"), b"")
    assert caught.value.definite
    with pytest.raises(UnavailableError):
        await result_of(pair.plane, f"{pair.address}.gone", unary("r1"), b"")


async def test_an_address_that_is_no_subject_cannot_be_connected_to(pair: Pair) -> None:
    """Discovery says so, not the client: another instance is to be asked."""
    for address in ("not a subject", "a..b", "a.>", "", "x" * 2000):
        with pytest.raises(ConnectError):
            await ack_of(pair.plane, address, stream("r1"), b"")


async def test_a_worker_that_takes_a_request_and_does_not_acknowledge_it_is_lost(
    pair: Pair,
) -> None:
    """It hangs, so another may be asked: the same error as over TCP."""
    plane = NatsRequestPlane(pair.events, pair.nursery, ack_timeout_s=0.05)
    async with pair.events.subscribe(f"{pair.address}.hung"):
        with pytest.raises(DisconnectedError) as caught:
            await ack_of(plane, f"{pair.address}.hung", stream("r1"), b"")
    assert not caught.value.definite


async def test_an_ack_that_is_lost_ends_no_stream_that_has_begun(pair: Pair) -> None:
    """Whoever has begun has accepted: nothing of the request waits on, or tells the worker to end it."""
    address = f"{pair.address}.mute"
    async with pair.events.subscribe(address) as heard:
        async with trio.open_nursery() as nursery:
            plane = NatsRequestPlane(pair.events, nursery, ack_timeout_s=0.05)
            delivery = plane.post(address, stream("r1"), b"", lambda *_: None)
            assert b"r1" in (await anext(heard)).payload
            delivery.forget()
        await pair.events.publish(address, b"next")
        assert (await anext(heard)).payload == b"next"


async def test_a_request_beyond_the_bound_gets_overloaded(broker: Broker) -> None:
    async with connected(broker, requests_max=2) as pair, trio.open_nursery() as nursery:
        for number in range(2):
            envelope = unary(f"r{number}", "wait")
            nursery.start_soon(result_of, pair.plane, pair.address, envelope, b"")
        await until(lambda: pair.service.running == 2)
        with pytest.raises(OverloadedError) as caught:
            await result_of(pair.plane, pair.address, unary("r9"), b"")
        assert caught.value.definite
        pair.service.release.set()


async def test_a_caller_that_is_cancelled_tells_the_worker(pair: Pair) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            context = Context("r1")
            context.stop(Reason.CLIENT_DISCONNECT)
            call = partial(result_of, pair.plane, context=context)
            nursery.start_soon(call, pair.address, unary("r1", "wait"), b"")
            await until(lambda: pair.service.running == 1)
            scope.cancel()
    await until(lambda: pair.service.cancelled == ["r1"])
    assert pair.service.reasons == [Reason.CLIENT_DISCONNECT]
    await until(lambda: pair.service.running == 0 and pair.server.in_flight == 0)
    assert pair.service.answered == []


async def test_a_cancel_is_remembered_only_if_its_request_has_not_been_here(pair: Pair) -> None:
    await result_of(pair.plane, pair.address, unary("r1"), b"")
    for request_id in ("r1", "r2"):
        await pair.events.publish(pair.address, encode_frame(encode_cancel(request_id)))
    await until(lambda: pair.service.cancelled == ["r1", "r2"])
    assert pair.service.remembered == ["r2"]


async def test_a_caller_that_runs_out_of_time_tells_the_worker(pair: Pair) -> None:
    plane = NatsRequestPlane(pair.events, pair.nursery, answer_timeout_s=0.05)
    with pytest.raises(DeadlineError) as caught:
        await result_of(plane, pair.address, unary("r1", "wait"), b"")
    assert not caught.value.definite
    await until(lambda: pair.service.cancelled == ["r1"] and pair.service.running == 0)
    assert pair.service.reasons == [Reason.DEADLINE]


async def test_a_request_larger_than_a_message_is_refused_before_it_is_sent(pair: Pair) -> None:
    payload = b"x" * pair.events.message_bytes_max
    with pytest.raises(RequestError):
        await ack_of(pair.plane, pair.address, stream("r1"), payload)
    with pytest.raises(RequestError):
        await result_of(pair.plane, pair.address, unary("r1"), payload)
    assert pair.service.admitted == []


async def test_a_result_larger_than_a_message_is_a_typed_error(pair: Pair) -> None:
    size = str(pair.events.message_bytes_max).encode()
    with pytest.raises(EventPlaneError, match="bytes"):
        await result_of(pair.plane, pair.address, unary("r1", "big"), size)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"hello",
        b"\xff" * 64,
        encode_frame(b"", b"no header"),
        encode_frame(b"{}"),
        encode_frame(b"\xff\xfe"),
        encode_frame(b'{"cancel": 1}'),
        encode_frame(b'{"cancel":1}'),
        encode_frame(b"[" * 5000),
        encode_frame(encode_envelope(stream("r1"))) + b"more",
        encode_frame(encode_envelope(stream("r1")))[:-1],
        encode_frame(encode_envelope(stream(""))),
        encode_frame(encode_envelope(stream("x" * 129))),
        encode_frame(encode_envelope(Envelope(id="r1", endpoint="a/b/c"))),
    ],
)
async def test_garbage_is_answered_invalid_and_the_server_lives(pair: Pair, garbage: bytes) -> None:
    reply = await pair.events.request(pair.address, garbage, timeout_s=10)
    header, data = decode_frame(reply.payload)
    answer = decode_answer(header)
    assert (answer.id, answer.status, data) == ("", AckStatus.INVALID, b"")
    assert pair.server.malformed_count == 1
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"


async def test_garbage_without_a_reply_subject_is_counted_and_ignored(pair: Pair) -> None:
    await pair.events.publish(pair.address, b"hello")
    await pair.events.publish(pair.address, encode_frame(encode_envelope(stream("r1"))))
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"
    assert pair.server.malformed_count == 2
    assert pair.service.admitted == []


async def test_a_request_id_in_use_is_invalid_and_the_first_request_goes_on(pair: Pair) -> None:
    results: list[bytes] = []

    async def call() -> None:
        results.append(await result_of(pair.plane, pair.address, unary("r1", "wait"), b"x"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await until(lambda: pair.service.running == 1)
        with pytest.raises(RequestError, match="in use"):
            await result_of(pair.plane, pair.address, unary("r1", "wait"), b"y")
        pair.service.release.set()
    assert results == [b"re:x"]


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"thanks",
        encode_frame(b"{}"),
        encode_frame(b'{"id":"r1","status":"fine"}'),
        encode_frame(encode_answer(RequestAnswer(id="r2", status=AckStatus.ACCEPTED))),
    ],
)
async def test_an_answer_that_is_none_is_a_protocol_error(pair: Pair, reply: bytes) -> None:
    subject = fresh_subject()
    async with pair.events.subscribe(subject) as requests, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def answer() -> None:
            for _ in range(2):
                await pair.events.publish((await anext(requests)).reply, reply)

        with pytest.raises(RemoteProtocolError):
            await ack_of(pair.plane, subject, stream("r1"), b"")
        with pytest.raises(RemoteProtocolError):
            await result_of(pair.plane, subject, unary("r1"), b"")


async def test_a_server_that_stops_leaves_no_request_and_no_subscription(broker: Broker) -> None:
    async with connected(broker) as pair, trio.open_nursery() as nursery:
        server = NatsRequestServer(pair.events, f"{pair.address}.second")
        service = Service()
        async with trio.open_nursery() as serving:
            await serving.start(server.serve, service)
            nursery.start_soon(result_of, pair.plane, server.address, unary("r1", "wait"), b"")
            await until(lambda: service.running == 1)
            serving.cancel_scope.cancel()
        assert (service.running, server.in_flight) == (0, 0)
        with pytest.raises(UnavailableError):
            await result_of(pair.plane, server.address, unary("r2"), b"")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["memory", pytest.param("nats", marks=pytest.mark.services)])
async def test_a_request_that_cannot_leave_is_a_connect_error(kind: str) -> None:
    async def check(broker: Broker) -> None:
        async with connected(broker) as pair:
            assert pair.plane.is_usable
            await broker.stop()
            await wait_away(pair.events)
            plane = NatsRequestPlane(pair.events, pair.nursery, ack_timeout_s=0.02)
            # The memory broker counts nothing, so only trying tells.
            assert plane.is_usable is (kind == "memory")
            with pytest.raises(ConnectError) as caught:
                await ack_of(plane, pair.address, stream("r1"), b"")
            assert caught.value.definite

    if kind == "memory":
        await check(MemoryBrokerUnderTest())
        return
    with private_server(find_nats_server()) as server:
        await check(NatsServerUnderTest(server.url, server))
