"""The request plane over subjects: in memory, on a simulated and a real NATS server; clear and sealed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
import trio
import trio.testing

from tests.conformance.requests.nats_pairs import SECRET, Pair, connected, member
from tests.conformance.requests.service import Service, ack_of, probe, result_of, stream, unary
from tests.conformance.simulated import unreal_broker
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
from trinamo.runtime.planes import EventPlane, Message, RequestPlane, RequestServer
from trinamo.runtime.protocol.streams.codec import decode_frame, encode_frame
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Envelope,
    Reason,
    RequestAnswer,
    RequestKind,
    decode_answer,
    encode_answer,
    encode_cancel,
    encode_envelope,
)
from trinamo.transports.nats import NatsRequestPlane, NatsRequestServer
from trinamo.transports.nats.requests import about_answer, about_request
from trinamo.transports.security.sealing import HEAD_BYTES
from trinamo.transports.servers.binaries import find_nats_server


# On a real broker these tests mostly wait, which `make test` has no time for.
@pytest.fixture(params=["memory", "simulated", pytest.param("nats", marks=pytest.mark.check)])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    if request.param == "nats":
        yield NatsServerUnderTest(request.getfixturevalue("nats_server").url)
    else:
        yield from unreal_broker(request.param)


def short_s(broker: Broker) -> float:
    """Timeout of a request that a test waits out; a real broker may stall before it forwards the request."""
    return 0.05 if isinstance(broker, MemoryBrokerUnderTest) else 3


@pytest.fixture(params=[b"", SECRET], ids=["clear", "sealed"])
async def pair(broker: Broker, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with connected(broker, request.param) as pair:
        yield pair


async def test_they_are_the_interfaces_of_the_runtime() -> None:
    events: EventPlane = MemoryBrokerUnderTest().open()
    server: RequestServer = NatsRequestServer(events, "a.b", sealer=member(b""))
    async with trio.open_nursery() as nursery:
        plane: RequestPlane = NatsRequestPlane(events, nursery, sealer=member(b""))
        nursery.cancel_scope.cancel()
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


async def test_an_address_nobody_serves_cannot_be_connected_to(pair: Pair) -> None:
    """At once in clear; sealed, when nobody has answered a probe either. It is no answer
    of a worker's, but as a refused connection: who is not there may be back in a moment."""
    with pytest.raises(ConnectError, match="nobody") as caught:
        await ack_of(pair.plane, f"{pair.address}.gone", stream("r1"), b"")
    assert caught.value.definite
    with pytest.raises(ConnectError):
        await result_of(pair.plane, f"{pair.address}.gone", unary("r1"), b"")


async def test_an_address_that_is_no_subject_cannot_be_connected_to(pair: Pair) -> None:
    """Discovery says so, not the client: another instance is to be asked."""
    for address in ("not a subject", "a..b", "a.>", "", "x" * 2000):
        with pytest.raises(ConnectError):
            await ack_of(pair.plane, address, stream("r1"), b"")


async def test_a_worker_that_takes_a_request_and_does_not_acknowledge_it_is_lost(
    broker: Broker, pair: Pair
) -> None:
    """It hangs, so another may be asked: the same error as over TCP."""
    address = f"{pair.address}.hung"
    async with pair.events.subscribe(address), trio.open_nursery() as nursery:
        plane = NatsRequestPlane(
            pair.events, nursery, sealer=pair.sealer, ack_timeout_s=short_s(broker)
        )
        nursery.start_soon(plane.hold, address, lambda: None)
        with pytest.raises(DisconnectedError) as caught:
            await ack_of(plane, address, stream("r1"), b"")
        nursery.cancel_scope.cancel()
    assert not caught.value.definite


async def test_an_ack_that_is_lost_ends_no_stream_that_has_begun(pair: Pair) -> None:
    """Whoever has begun has accepted: nothing of the request waits on, or tells the worker to end it."""
    address = f"{pair.address}.mute"
    async with pair.events.subscribe(address) as heard:
        async with trio.open_nursery() as nursery:
            plane = NatsRequestPlane(pair.events, nursery, sealer=pair.sealer, ack_timeout_s=600)
            delivery = plane.post(address, stream("r1"), b"", lambda *_: None)
            assert b"r1" in pair.sealer.open((await anext(heard)).payload, about_request(address))
            delivery.forget()
            await until(lambda: len(nursery.child_tasks) == 1)
            nursery.cancel_scope.cancel()
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
        cancel = encode_frame(encode_cancel(request_id))
        await pair.events.publish(pair.address, pair.said(cancel))
    await until(lambda: pair.service.cancelled == ["r1", "r2"])
    assert pair.service.remembered == ["r2"]


async def test_a_caller_that_runs_out_of_time_tells_the_worker(broker: Broker, pair: Pair) -> None:
    plane = NatsRequestPlane(
        pair.events, pair.nursery, sealer=pair.sealer, answer_timeout_s=short_s(broker)
    )
    pair.nursery.start_soon(plane.hold, pair.address, lambda: None)
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
    said = pair.said(garbage)
    reply = await pair.events.request(pair.address, said, timeout_s=60)
    header, data = decode_frame(pair.sealer.open(reply.payload, about_answer(said)))
    answer = decode_answer(header)
    assert (answer.id, answer.status, data) == ("", AckStatus.INVALID, b"")
    assert pair.server.malformed_count == 1
    assert await result_of(pair.plane, pair.address, unary("r2"), b"x") == b"re:x"


async def test_garbage_without_a_reply_subject_is_counted_and_ignored(pair: Pair) -> None:
    for frame in (b"hello", encode_frame(encode_envelope(stream("r1")))):
        await pair.events.publish(pair.address, pair.said(frame))
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
                asked = await anext(requests)
                said = pair.sealer.seal(reply, about_answer(asked.payload))
                await pair.events.publish(asked.reply, said)

        with pytest.raises(RemoteProtocolError):
            await ack_of(pair.plane, subject, stream("r1"), b"")
        with pytest.raises(RemoteProtocolError):
            await result_of(pair.plane, subject, unary("r1"), b"")


async def test_a_server_that_stops_leaves_no_request_and_no_subscription(broker: Broker) -> None:
    async with connected(broker) as pair, trio.open_nursery() as nursery:
        address = f"{pair.address}.second"
        server = NatsRequestServer(pair.events, address, sealer=pair.sealer)
        service = Service()
        async with trio.open_nursery() as serving:
            await serving.start(server.serve, service)
            nursery.start_soon(result_of, pair.plane, server.address, unary("r1", "wait"), b"")
            await until(lambda: service.running == 1)
            serving.cancel_scope.cancel()
        assert (service.running, server.in_flight) == (0, 0)
        with pytest.raises(ConnectError):
            await result_of(pair.plane, server.address, unary("r2"), b"")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["memory", "nats"])
async def test_a_request_that_cannot_leave_is_a_connect_error(kind: str) -> None:
    async def check(broker: Broker) -> None:
        async with connected(broker) as pair:
            assert pair.plane.is_usable
            await broker.stop()
            await wait_away(pair.events)
            plane = NatsRequestPlane(
                pair.events, pair.nursery, sealer=pair.sealer, ack_timeout_s=0.02
            )
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


# Whoever has only the broker's token: he hears all, and says what he likes.


@pytest.fixture
async def closed(broker: Broker) -> AsyncIterator[Pair]:
    async with connected(broker, SECRET) as pair:
        yield pair


async def heard(tap: AsyncIterator[Message], subject: str) -> Message:
    """The next message on a subject."""
    with trio.fail_after(120):
        while (message := await anext(tap)).subject != subject:
            pass
    return message


async def test_a_tap_reads_neither_requests_nor_answers_nor_cancels(closed: Pair) -> None:
    said: list[bytes] = []
    async with closed.events.subscribe(">") as tap, trio.open_nursery() as nursery:
        waiting = partial(result_of, closed.plane, closed.address, unary("r2", "wait"), b"prompt")
        nursery.start_soon(waiting)
        await until(lambda: closed.service.running == 1)
        assert await result_of(closed.plane, closed.address, unary("r1"), b"prompt") == b"re:prompt"
        with pytest.raises(EngineError, match="out of luck"):
            await result_of(closed.plane, closed.address, unary("r3", "fail"), b"")
        nursery.cancel_scope.cancel()
        await until(lambda: closed.service.cancelled == ["r2"])
        while len(said) < 6:
            message = await anext(tap)
            said.append(message.subject.encode() + message.payload)
    for word in (b"prompt", b"re:", b"r1", b"r2", b"ns/c", b"luck", b"cancel", b"dropped"):
        assert not any(word in each for each in said), word


def forgeries(closed: Pair) -> list[bytes]:
    """What nobody but a member can say, said by others: a request, and the end of request r1."""
    frames = (encode_frame(encode_envelope(unary("r9")), b"x"), encode_frame(encode_cancel("r1")))
    stranger, about = member(bytes(32)), about_request(closed.address)
    found = [b"", b"x" * 200]
    for frame in frames:
        sealed = closed.said(frame)
        changed = [
            sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
            for at in (0, HEAD_BYTES - 17, HEAD_BYTES - 1, HEAD_BYTES, len(sealed) - 1)
        ]
        found += [
            frame,
            stranger.seal(frame, about),
            closed.sealer.seal(frame, about_request(f"{closed.address}.other")),
            closed.sealer.seal(frame, about_answer(sealed)),
            sealed[:-1],
            sealed[:HEAD_BYTES],
            *changed,
        ]
    return found


async def test_a_message_that_no_member_sealed_for_here_is_refused_and_counted(
    closed: Pair,
) -> None:
    async with trio.open_nursery() as nursery, closed.events.subscribe("answers.*") as answers:
        waiting = partial(result_of, closed.plane, closed.address, unary("r1", "wait"), b"x")
        nursery.start_soon(waiting)
        await until(lambda: closed.service.running == 1)
        forged = forgeries(closed)
        for number, message in enumerate(forged):
            await closed.events.publish(closed.address, message, reply=f"answers.{number}")
        await until(lambda: closed.server.malformed_count == len(forged))
        with trio.move_on_after(0.05):
            pytest.fail(f"answered: {await anext(answers)}")
        assert (closed.service.answered, closed.service.cancelled) == ([], [])
        closed.service.release.set()
    assert closed.service.answered == ["r1"]


async def test_a_message_that_comes_again_is_refused_and_counted(closed: Pair) -> None:
    async with closed.events.subscribe(closed.address) as tap:
        await result_of(closed.plane, closed.address, unary("r1"), b"x")
        asked = await anext(tap)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                call = partial(result_of, closed.plane, closed.address, unary("r2", "wait"), b"")
                nursery.start_soon(call)
                await until(lambda: closed.service.running == 1)
                scope.cancel()
        await until(lambda: closed.service.cancelled == ["r2"])
        await anext(tap)
        cancelled = await anext(tap)
        for message in (asked, cancelled, asked):
            await closed.events.publish(closed.address, message.payload, reply="answers")
        await until(lambda: closed.server.malformed_count == 3)
    assert (closed.service.answered, closed.service.cancelled) == (["r1"], ["r2"])


async def test_who_stands_still_and_is_said_to_be_gone_is_so_once_nobody_names_it(
    closed: Pair,
) -> None:
    """Two probes without an answer end nothing while discovery names the instance: it is held."""
    address = f"{closed.address}.still"
    errors: list[ConnectError] = []
    listed = trio.CancelScope()

    async def hold() -> None:
        with listed:
            await closed.plane.hold(address, lambda: None)

    async def call() -> None:
        try:
            await result_of(closed.plane, address, unary("r1"), b"x")
        except ConnectError as error:
            errors.append(error)

    async with closed.events.subscribe(address) as still, trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        nursery.start_soon(call)
        asked = await heard(still, address)
        await closed.events.publish(asked.reply, b"", headers={"Status": "503"})
        for _ in range(3):
            probe = await heard(still, address)
            await closed.events.publish(probe.reply, b"", headers={"Status": "503"})
        assert not errors
        listed.cancel()
        # What it may have heard all the same it is told to forget.
        with trio.fail_after(120):
            # One more probe may be on its way.
            while b"cancel" not in closed.sealer.open(
                (await heard(still, address)).payload, about_request(address)
            ):
                pass
    assert len(errors) == 1


@pytest.mark.parametrize(("is_subscribed", "missed"), [(False, 0), (True, 0), (True, 1)])
async def test_who_was_away_and_answers_a_probe_never_got_the_request_before_it(
    pair: Pair, is_subscribed: bool, missed: int
) -> None:
    """Its ACK would have come first: another is asked long before the time for the ACK is over.

    So it is with a message that the broker has lost without a word, also if nobody is there for the
    first probe. In clear, the word that nobody is subscribed is believed of the request at once."""
    address = f"{pair.address}.late"
    sealer = member(SECRET if pair.sealer.seals else b"")
    server = NatsRequestServer(pair.events, address, sealer=sealer)

    async def ask(plane: NatsRequestPlane) -> None:
        with pytest.raises(ConnectError, match="nobody"):
            await ack_of(plane, address, stream("r1"), b"")

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            plane = NatsRequestPlane(pair.events, nursery, sealer=pair.sealer, ack_timeout_s=600)
            nursery.start_soon(plane.hold, address, lambda: None)
            async with trio.open_nursery() as asking:
                place = address if is_subscribed else f"{address}.other"
                async with pair.events.subscribe(place) as messages:
                    asking.start_soon(ask, plane)
                    if not is_subscribed:
                        # The broker gets this after the request, over the same connection.
                        await trio.testing.wait_all_tasks_blocked(0.01)
                        await pair.events.publish(place, b"")
                    await anext(messages)
                    for _ in range(missed):
                        probe = await anext(messages)
                        await pair.events.publish(probe.reply, b"", headers={"Status": "503"})
                await nursery.start(server.serve, pair.service)
            nursery.cancel_scope.cancel()
    # One that the worker answers late is followed by another.
    is_probed = is_subscribed or pair.sealer.seals
    kinds = {envelope.kind for envelope, _ in pair.service.admitted}
    assert kinds == ({RequestKind.PROBE} if is_probed else set())


async def test_answers_of_others_are_not_taken(closed: Pair) -> None:
    """Junk, the broker's word that nobody is there, an answer to another request: nothing ends."""
    results: list[bytes] = []

    async def call(request_id: str, endpoint: str) -> None:
        envelope = unary(request_id, endpoint)
        results.append(await result_of(closed.plane, closed.address, envelope, b"x"))

    async with closed.events.subscribe(">") as tap, trio.open_nursery() as nursery:
        await call("r1", "echo")
        old = await heard(tap, (await heard(tap, closed.address)).reply)
        nursery.start_soon(call, "r2", "wait")
        # Whoever stalled may have been probed about r1.
        while b"r2" not in closed.sealer.open(
            (asked := await heard(tap, closed.address)).payload, about_request(closed.address)
        ):
            pass
        accepted = encode_answer(RequestAnswer(id="r2", status=AckStatus.ACCEPTED))
        forged = encode_frame(accepted, b"another's text")
        for payload in (
            b"",
            forged,
            old.payload,
            asked.payload,
            member(bytes(32)).seal(forged, about_answer(asked.payload)),
            closed.sealer.seal(forged, about_answer(old.payload)),
        ):
            await closed.events.publish(asked.reply, payload)
        for _ in range(2):
            await closed.events.publish(asked.reply, b"", headers={"Status": "503"})
        # It is asked whether anybody is there, and somebody is.
        await until(lambda: RequestKind.PROBE in [each.kind for each, _ in closed.service.admitted])
        await trio.sleep(0.1)
        assert closed.service.running == 1
        closed.service.release.set()
    assert results == [b"re:x", b"re:x"]
    assert closed.sealer.refused == 6
