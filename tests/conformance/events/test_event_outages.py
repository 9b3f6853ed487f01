"""Event planes whose broker is away: what waits, what is refused, what is sent when it is back."""

from __future__ import annotations

import pytest
import trio

from tests.transports.nats.brokers import Broker, wait_away, wait_back
from trinamo.conformance.events import assert_nothing_pending, echo, fresh_subject, payloads
from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    OverloadedError,
    UnavailableError,
)
from trinamo.runtime.planes import CountsEvents


@pytest.fixture
def subject() -> str:
    return fresh_subject()


async def test_what_is_published_while_the_broker_is_away_arrives_when_it_is_back(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(120):
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
                reply = await plane.request(f"{subject}.echo", b"!", timeout_s=60)
                assert reply.payload == b"re:!"
            nursery.cancel_scope.cancel()


async def test_a_subscription_made_while_the_broker_is_away_works_when_it_is_back(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(120):
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
                    await plane.request(f"{subject}.left", b"", timeout_s=60)


async def test_the_buffer_for_an_absent_broker_is_bounded_and_its_overflow_counted(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(120):
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
            if isinstance(plane, CountsEvents):
                assert plane.statistics().dropped_outgoing == 3
            else:
                assert getattr(plane, "dropped", None) == 3
            await mortal_broker.start()
            assert len(await payloads(subscription, 64)) == 64
            await assert_nothing_pending(plane, subscription, subject)


async def test_a_request_that_never_left_ends_definitely_and_is_not_sent_later(
    mortal_broker: Broker, subject: str
) -> None:
    with trio.fail_after(120):
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
    with trio.fail_after(120):
        async with mortal_broker.connect() as plane, trio.open_nursery() as nursery:
            await nursery.start(echo, plane, subject)
            await mortal_broker.stop()
            await wait_away(plane)

            @nursery.start_soon
            async def revive() -> None:
                await trio.sleep(0.02)
                await mortal_broker.start()

            reply = await plane.request(subject, b"x", timeout_s=60)
            assert reply.payload == b"re:x"
            nursery.cancel_scope.cancel()
