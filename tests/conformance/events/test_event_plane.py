"""What every event plane promises, on the memory broker and on real NATS servers."""

from __future__ import annotations

import pytest
import trio

from tests.conformance.events.receiving import assert_nothing_pending, echo, payloads, receive
from tests.transports.nats.brokers import eventually
from trinamo.runtime.errors import DeadlineError, UnavailableError
from trinamo.runtime.planes import EventPlane, Message, Subscription


async def test_messages_arrive_in_the_order_they_were_published(
    plane: EventPlane, other: EventPlane, subject: str
) -> None:
    async with other.subscribe(subject) as subscription:
        for number in range(40):
            await plane.publish(subject, b"%d" % number)
        assert await payloads(subscription, 40) == [b"%d" % number for number in range(40)]


async def test_every_subscription_on_every_plane_gets_every_message(
    plane: EventPlane, other: EventPlane, subject: str
) -> None:
    async with (
        plane.subscribe(subject) as first,
        plane.subscribe(subject) as second,
        other.subscribe(subject) as third,
    ):
        await plane.publish(subject, b"1")
        await other.publish(subject, b"2")
        for subscription in (first, second, third):
            assert set(await payloads(subscription, 2)) == {b"1", b"2"}


async def test_a_message_carries_subject_payload_reply_and_headers(
    plane: EventPlane, subject: str
) -> None:
    async with plane.subscribe(subject) as subscription:
        await plane.publish(
            subject, bytes(range(256)), reply=f"{subject}.back", headers={"Trace": "a: b", "X": "é"}
        )
        message = await receive(subscription)
    assert message == Message(
        subject, bytes(range(256)), f"{subject}.back", {"Trace": "a: b", "X": "é"}
    )


async def test_a_message_without_extras_has_no_reply_and_no_headers(
    plane: EventPlane, subject: str
) -> None:
    async with plane.subscribe(subject) as subscription:
        await plane.publish(subject, b"")
        assert await receive(subscription) == Message(subject, b"")


@pytest.mark.parametrize(
    ("pattern", "hits", "misses"),
    [
        ("*", ["a", "b"], ["a.b"]),
        ("a.*", ["a.b", "a.bc"], ["a", "a.b.c", "b.b"]),
        ("a.*.c", ["a.b.c"], ["a.b", "a.b.d", "a.b.c.d"]),
        (">", ["a", "a.b.c"], []),
        ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
        ("*.b.>", ["a.b.c", "x.b.c.d"], ["a.b", "a.c.c"]),
    ],
)
async def test_wildcards_match_whole_tokens(
    plane: EventPlane, subject: str, pattern: str, hits: list[str], misses: list[str]
) -> None:
    async with plane.subscribe(f"{subject}.{pattern}") as subscription:
        for name in misses + hits:
            await plane.publish(f"{subject}.{name}", name.encode())
        assert await payloads(subscription, len(hits)) == [name.encode() for name in hits]


async def test_one_member_of_a_queue_group_gets_each_message(
    plane: EventPlane, other: EventPlane, subject: str
) -> None:
    got: list[bytes] = []
    members: list[int] = []

    async def consume(member: int, subscription: Subscription) -> None:
        async for message in subscription:
            got.append(message.payload)
            members.append(member)

    async with (
        plane.subscribe(subject, group="g") as first,
        other.subscribe(subject, group="g") as second,
        plane.subscribe(subject) as outside,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(consume, 1, first)
        nursery.start_soon(consume, 2, second)
        for number in range(60):
            await plane.publish(subject, b"%d" % number)
        assert len(await payloads(outside, 60)) == 60
        await eventually(lambda: len(got) >= 60)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert sorted(got, key=int) == [b"%d" % number for number in range(60)]
    assert set(members) == {1, 2}


async def test_two_groups_each_get_the_message(plane: EventPlane, subject: str) -> None:
    async with (
        plane.subscribe(subject, group="a") as first,
        plane.subscribe(subject, group="b") as second,
    ):
        await plane.publish(subject, b"x")
        assert await payloads(first, 1) == await payloads(second, 1) == [b"x"]


async def test_a_group_is_one_across_the_patterns_of_its_members(
    plane: EventPlane, subject: str
) -> None:
    got: list[bytes] = []

    async def consume(subscription: Subscription) -> None:
        async for message in subscription:
            got.append(message.payload)  # noqa: PERF401 -- the test looks while it grows

    async with (
        plane.subscribe(f"{subject}.*", group="g") as first,
        plane.subscribe(f"{subject}.>", group="g") as second,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(consume, first)
        nursery.start_soon(consume, second)
        for number in range(30):
            await plane.publish(f"{subject}.a", b"%d" % number)
        await eventually(lambda: len(got) >= 30)
        await trio.testing.wait_all_tasks_blocked(0.02)
        nursery.cancel_scope.cancel()
    assert sorted(got, key=int) == [b"%d" % number for number in range(30)]


async def test_a_request_gets_its_own_reply(
    plane: EventPlane, other: EventPlane, subject: str
) -> None:
    replies: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        reply = await plane.request(subject, b"%d" % number, timeout_s=10)
        replies[number] = reply.payload

    async with trio.open_nursery() as nursery:
        await nursery.start(echo, other, subject)
        async with trio.open_nursery() as askers:
            for number in range(32):
                askers.start_soon(ask, number)
        nursery.cancel_scope.cancel()
    assert replies == {number: b"re:%d" % number for number in range(32)}


async def test_a_request_nobody_listens_to_fails_at_once_and_definitely(
    plane: EventPlane, subject: str
) -> None:
    with pytest.raises(UnavailableError) as caught:
        await plane.request(subject, b"x", timeout_s=3600)
    assert caught.value.definite


async def test_a_publish_with_a_reply_subject_learns_that_nobody_listens(
    plane: EventPlane, subject: str
) -> None:
    async with plane.subscribe(f"{subject}.back") as replies:
        await plane.publish(subject, b"x", reply=f"{subject}.back")
        message = await receive(replies)
    assert message.payload == b""
    assert message.headers["Status"] == "503"


async def test_a_request_without_a_reply_ends_at_its_deadline_indefinitely(
    plane: EventPlane, subject: str
) -> None:
    async with plane.subscribe(subject) as subscription:
        with pytest.raises(DeadlineError) as caught:
            await plane.request(subject, b"x", timeout_s=0.05)
        assert not caught.value.definite
        assert await payloads(subscription, 1) == [b"x"]


async def test_a_late_reply_reaches_nobody_and_harms_nothing(
    plane: EventPlane, subject: str
) -> None:
    async with plane.subscribe(subject) as subscription:
        with pytest.raises(DeadlineError):
            await plane.request(subject, b"x", timeout_s=0.02)
        late = await receive(subscription)
        await plane.publish(late.reply, b"late")
        async with trio.open_nursery() as nursery:

            async def answer() -> None:
                await plane.publish((await receive(subscription)).reply, b"in time")

            nursery.start_soon(answer)
            reply = await plane.request(subject, b"y", timeout_s=10)
    assert reply.payload == b"in time"


async def test_a_receive_that_is_cancelled_loses_nothing(plane: EventPlane, subject: str) -> None:
    async with plane.subscribe(subject) as subscription:
        for _ in range(5):
            with trio.move_on_after(0.005):
                await anext(subscription)
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(subscription)
        await plane.publish(subject, b"x")
        assert await payloads(subscription, 1) == [b"x"]


async def test_a_cancel_that_races_with_the_arrival_loses_nothing(
    plane: EventPlane, subject: str
) -> None:
    """Over 200 messages, each awaited by a receive that is cancelled some turns later."""
    got: list[bytes] = []
    cancelled_count = 0

    async def cancel_after(turns: int, scope: trio.CancelScope) -> None:
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async with plane.subscribe(subject) as subscription:
        for number in range(200):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(plane.publish, subject, b"%d" % number)
                with trio.CancelScope() as scope:
                    nursery.start_soon(cancel_after, number % 40, scope)
                    got.append((await anext(subscription)).payload)
                cancelled_count += scope.cancelled_caught
        got += await payloads(subscription, 200 - len(got))
        await assert_nothing_pending(plane, subscription, subject)
    assert got == [b"%d" % number for number in range(200)]
    assert cancelled_count > 0
