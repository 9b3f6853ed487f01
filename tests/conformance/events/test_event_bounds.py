"""Event planes: bad names, full buffers, cancelled waits, brokers that are away."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio

from tests.conformance.events.receiving import NATS, assert_nothing_pending, echo, payloads, receive
from tests.conformance.simulated import SimulatedBroker
from tests.transports.nats.brokers import (
    Broker,
    MemoryBrokerUnderTest,
    NatsServerUnderTest,
    eventually,
    private_server,
    wait_away,
    wait_back,
)
from tests.worlds import in_world
from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from trinamo.runtime.planes import EventPlane, Subscription
from trinamo.transports.servers.binaries import find_nats_server


@pytest.fixture(params=["memory", "simulated", NATS])
def mortal_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker that the test may kill and start again at the same address."""
    if request.param == "memory":
        yield MemoryBrokerUnderTest()
        return
    if request.param == "simulated":
        simulated = SimulatedBroker()
        with in_world(simulated.world):
            yield simulated
        return
    with private_server(find_nats_server()) as server:
        yield NatsServerUnderTest(server.url, server)


async def test_a_slow_consumer_keeps_the_oldest_and_counts_the_rest(
    plane: EventPlane, subject: str
) -> None:
    async with plane.subscribe(subject, pending_max=10) as slow:
        for number in range(50):
            await plane.publish(subject, b"%d" % number)
        await eventually(lambda: slow.dropped == 40)
        assert await payloads(slow, 10) == [b"%d" % number for number in range(10)]
        await assert_nothing_pending(plane, slow, subject)
        assert slow.dropped == 40


async def test_a_slow_consumer_does_not_slow_its_neighbour(plane: EventPlane, subject: str) -> None:
    async with (
        plane.subscribe(subject, pending_max=1) as slow,
        plane.subscribe(subject) as quick,
    ):
        for number in range(50):
            await plane.publish(subject, b"%d" % number)
        assert len(await payloads(quick, 50)) == 50
        assert quick.dropped == 0
        await eventually(lambda: slow.dropped == 49)


async def test_a_message_of_the_largest_size_passes_and_one_more_byte_is_refused(
    plane: EventPlane, subject: str
) -> None:
    async with plane.subscribe(subject) as subscription:
        await plane.publish(subject, b"x" * plane.message_bytes_max)
        assert len((await receive(subscription)).payload) == plane.message_bytes_max
        with pytest.raises(RequestError) as caught:
            await plane.publish(subject, b"x" * (plane.message_bytes_max + 1))
        assert caught.value.definite
        with pytest.raises(RequestError):
            await plane.publish(subject, b"x" * plane.message_bytes_max, headers={"A": "b"})
        with pytest.raises(RequestError):
            await plane.request(subject, b"x" * (plane.message_bytes_max + 1), timeout_s=5)
        await assert_nothing_pending(plane, subscription, subject)


@pytest.mark.parametrize(
    "bad", ["", ".", "a.", ".a", "a..b", "a b", "a\r\nb", "a\tb", "a.*", ">", "a*", "x" * 1025]
)
async def test_a_bad_subject_is_refused_before_it_is_sent(plane: EventPlane, bad: str) -> None:
    with pytest.raises(RequestError):
        await plane.publish(bad, b"")
    with pytest.raises(RequestError):
        await plane.request(bad, b"", timeout_s=5)
    await plane.check_health()


@pytest.mark.parametrize("bad", ["", "a.", "a.>.b", "a b", "a*", "a.>b", "a\nb"])
async def test_a_bad_pattern_is_refused_before_it_is_sent(plane: EventPlane, bad: str) -> None:
    with pytest.raises(RequestError):
        async with plane.subscribe(bad):
            pass
    await plane.check_health()


@pytest.mark.parametrize("headers", [{"": "x"}, {"a b": "x"}, {"a:": "x"}, {"a": "x\r\ny: z"}])
async def test_a_bad_header_is_refused_before_it_is_sent(
    plane: EventPlane, subject: str, headers: dict[str, str]
) -> None:
    with pytest.raises(RequestError):
        await plane.publish(subject, b"", headers=headers)
    await plane.check_health()


async def test_leaving_a_subscription_removes_it(
    plane: EventPlane, other: EventPlane, subject: str
) -> None:
    async with plane.subscribe(subject):
        pass
    with trio.fail_after(10):
        while True:  # The server learns of it when the plane's next bytes arrive.
            try:
                await other.request(subject, b"x", timeout_s=0.05)
            except UnavailableError:
                break
            except DeadlineError:
                continue


async def test_a_reader_ends_when_its_subscription_is_left(plane: EventPlane, subject: str) -> None:
    got: list[bytes] = []

    async def consume(subscription: Subscription) -> None:
        async for message in subscription:
            got.append(message.payload)  # noqa: PERF401 -- the test looks while it grows

    async with trio.open_nursery() as nursery, plane.subscribe(subject) as subscription:
        nursery.start_soon(consume, subscription)
        await plane.publish(subject, b"x")
        await eventually(lambda: got == [b"x"])
    assert got == [b"x"]


async def test_every_wait_can_be_cancelled(plane: EventPlane, subject: str) -> None:
    async with plane.subscribe(subject) as subscription:
        operations: list[Callable[[], Awaitable[object]]] = [
            functools.partial(anext, subscription),
            functools.partial(plane.publish, subject, b"x"),
            functools.partial(plane.request, subject, b"x", timeout_s=60),
            plane.check_health,
        ]
        for operation in operations:
            with trio.CancelScope() as scope:
                scope.cancel()
                await operation()
            assert scope.cancelled_caught
        with trio.move_on_after(0.02) as scope:
            await plane.request(subject, b"x", timeout_s=60)
        assert scope.cancelled_caught
    with trio.CancelScope() as scope:
        scope.cancel()
        async with plane.subscribe(subject):
            pass
    assert scope.cancelled_caught


async def test_check_health_names_the_broker(plane: EventPlane) -> None:
    line = await plane.check_health()
    assert line
    assert "\n" not in line


async def test_what_is_published_while_the_broker_is_away_arrives_when_it_is_back(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(50):
        async with (
            mortal_broker.connect() as plane,
            mortal_broker.connect() as other,
            plane.subscribe(subject) as mine,
            plane.subscribe(f"{subject}.other.*") as theirs,
            trio.open_nursery() as nursery,
        ):
            await nursery.start(echo, other, f"{subject}.echo")
            for round_number in range(2):
                await mortal_broker.stop()
                await wait_away(plane)
                await wait_away(other)
                for number in range(20):
                    await plane.publish(subject, b"%d" % number)
                with pytest.raises(ConnectError):
                    await plane.check_health()
                await mortal_broker.start()
                await wait_back(plane)
                await wait_back(other)
                assert await payloads(mine, 20) == [b"%d" % number for number in range(20)]
                await other.publish(f"{subject}.other.x", b"%d" % round_number)
                assert await payloads(theirs, 1) == [b"%d" % round_number]
                reply = await plane.request(f"{subject}.echo", b"!", timeout_s=10)
                assert reply.payload == b"re:!"
            nursery.cancel_scope.cancel()


async def test_a_subscription_made_while_the_broker_is_away_works_when_it_is_back(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(50):
        async with mortal_broker.connect() as plane:
            await mortal_broker.stop()
            await wait_away(plane)
            async with plane.subscribe(f"{subject}.left"):
                pass
            async with plane.subscribe(subject) as subscription:
                await plane.publish(subject, b"x")
                await mortal_broker.start()
                assert await payloads(subscription, 1) == [b"x"]
                with pytest.raises(UnavailableError):
                    await plane.request(f"{subject}.left", b"", timeout_s=10)


async def test_the_buffer_for_an_absent_broker_is_bounded_and_its_overflow_counted(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(50):
        async with (
            mortal_broker.connect() as plane,
            plane.subscribe(subject) as subscription,
        ):
            await mortal_broker.stop()
            await wait_away(plane)
            for number in range(64):
                await plane.publish(subject, b"%d" % number)
            for _ in range(3):
                with pytest.raises(OverloadedError) as caught:
                    await plane.publish(subject, b"too many")
                assert caught.value.definite
                assert caught.value.value == 64
            assert getattr(plane, "dropped", None) == 3
            await mortal_broker.start()
            assert len(await payloads(subscription, 64)) == 64
            await assert_nothing_pending(plane, subscription, subject)


async def test_a_request_that_never_left_ends_definitely_and_is_not_sent_later(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(50):
        async with (
            mortal_broker.connect() as plane,
            plane.subscribe(subject) as subscription,
        ):
            await mortal_broker.stop()
            await wait_away(plane)
            with pytest.raises(DeadlineError) as caught:
                await plane.request(subject, b"x", timeout_s=0.02)
            assert caught.value.definite
            with trio.move_on_after(0.02):
                await plane.request(subject, b"x", timeout_s=60)
            await mortal_broker.start()
            await wait_back(plane)
            await assert_nothing_pending(plane, subscription, subject)


async def test_a_request_made_while_the_broker_is_away_is_answered_when_it_is_back(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(50):
        async with mortal_broker.connect() as plane, trio.open_nursery() as nursery:
            await nursery.start(echo, plane, subject)
            await mortal_broker.stop()
            await wait_away(plane)

            @nursery.start_soon
            async def revive() -> None:
                await trio.sleep(0.02)
                await mortal_broker.start()

            reply = await plane.request(subject, b"x", timeout_s=30)
            assert reply.payload == b"re:x"
            nursery.cancel_scope.cancel()
