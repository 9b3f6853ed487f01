"""What every event plane must do, whatever carries it."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import pytest
import trio
import trio.testing

from trinamo.runtime.errors import DeadlineError, RequestError, UnavailableError
from trinamo.runtime.planes import EventPlane, Message, Subscription

from .control import async_fixture, until

OpenEvents = Callable[[], AbstractAsyncContextManager[EventPlane]]
_numbers: Final = itertools.count()


def fresh_subject() -> str:
    """A subject that no other test uses, on whatever server."""
    return f"test.{os.getpid()}.{next(_numbers)}"


async def receive(subscription: Subscription) -> Message:
    """The next message; fails if none comes."""
    with trio.fail_after(120):
        return await anext(subscription)


async def payloads(subscription: Subscription, count: int) -> list[bytes]:
    """Those of the next `count` messages."""
    return [(await receive(subscription)).payload for _ in range(count)]


async def assert_nothing_pending(
    plane: EventPlane, subscription: Subscription, subject: str
) -> None:
    """A mark published now is the next thing received, so nothing else was waiting."""
    await plane.publish(subject, b"mark")
    assert await payloads(subscription, 1) == [b"mark"]


async def echo(
    plane: EventPlane,
    subject: str,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer each request with its own payload."""
    async with plane.subscribe(subject) as requests:
        task_status.started()
        async for message in requests:
            await plane.publish(message.reply, b"re:" + message.payload)


@pytest.mark.trio
class EventPlaneConformance:
    """What every `EventPlane` promises but for its work queues; `open_plane` is one more process's."""

    @async_fixture
    async def plane(self, open_plane: OpenEvents) -> AsyncIterator[EventPlane]:
        """One process's plane."""
        with trio.fail_after(120):
            async with open_plane() as plane:
                yield plane

    @async_fixture
    async def other(self, open_plane: OpenEvents) -> AsyncIterator[EventPlane]:
        """Another process's plane on the same broker."""
        with trio.fail_after(120):
            async with open_plane() as plane:
                yield plane

    @pytest.fixture
    def subject(self) -> str:
        """One that no other test uses."""
        return fresh_subject()

    async def test_messages_arrive_in_the_order_they_were_published(
        self, plane: EventPlane, other: EventPlane, subject: str
    ) -> None:
        async with other.subscribe(subject) as subscription:
            for number in range(40):
                await plane.publish(subject, b"%d" % number)
            assert await payloads(subscription, 40) == [b"%d" % number for number in range(40)]

    async def test_every_subscription_on_every_plane_gets_every_message(
        self, plane: EventPlane, other: EventPlane, subject: str
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
        self, plane: EventPlane, subject: str
    ) -> None:
        async with plane.subscribe(subject) as subscription:
            await plane.publish(
                subject,
                bytes(range(256)),
                reply=f"{subject}.back",
                headers={"Trace": "a: b", "X": "é"},
            )
            message = await receive(subscription)
        assert message == Message(
            subject, bytes(range(256)), f"{subject}.back", {"Trace": "a: b", "X": "é"}
        )

    async def test_a_message_without_extras_has_no_reply_and_no_headers(
        self, plane: EventPlane, subject: str
    ) -> None:
        async with plane.subscribe(subject) as subscription:
            await plane.publish(subject, b"")
            assert await receive(subscription) == Message(subject, b"")

    @pytest.mark.parametrize(
        ("pattern", "matched", "missed"),
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
        self, plane: EventPlane, subject: str, pattern: str, matched: list[str], missed: list[str]
    ) -> None:
        async with plane.subscribe(f"{subject}.{pattern}") as subscription:
            for name in missed + matched:
                await plane.publish(f"{subject}.{name}", name.encode())
            assert await payloads(subscription, len(matched)) == [name.encode() for name in matched]

    async def test_one_member_of_a_queue_group_gets_each_message(
        self, plane: EventPlane, other: EventPlane, subject: str
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
            await until(lambda: len(got) >= 60)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert sorted(got, key=int) == [b"%d" % number for number in range(60)]
        assert set(members) == {1, 2}

    async def test_two_groups_each_get_the_message(self, plane: EventPlane, subject: str) -> None:
        async with (
            plane.subscribe(subject, group="a") as first,
            plane.subscribe(subject, group="b") as second,
        ):
            await plane.publish(subject, b"x")
            assert await payloads(first, 1) == await payloads(second, 1) == [b"x"]

    async def test_a_group_is_one_across_the_patterns_of_its_members(
        self, plane: EventPlane, subject: str
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
            await until(lambda: len(got) >= 30)
            await trio.testing.wait_all_tasks_blocked(0.02)
            nursery.cancel_scope.cancel()
        assert sorted(got, key=int) == [b"%d" % number for number in range(30)]

    async def test_a_request_gets_its_own_reply(
        self, plane: EventPlane, other: EventPlane, subject: str
    ) -> None:
        replies: dict[int, bytes] = {}

        async def ask(number: int) -> None:
            reply = await plane.request(subject, b"%d" % number, timeout_s=60)
            replies[number] = reply.payload

        async with trio.open_nursery() as nursery:
            await nursery.start(echo, other, subject)
            async with trio.open_nursery() as askers:
                for number in range(32):
                    askers.start_soon(ask, number)
            nursery.cancel_scope.cancel()
        assert replies == {number: b"re:%d" % number for number in range(32)}

    async def test_a_request_nobody_listens_to_fails_at_once_and_definitely(
        self, plane: EventPlane, subject: str
    ) -> None:
        with pytest.raises(UnavailableError) as caught:
            await plane.request(subject, b"x", timeout_s=3600)
        assert caught.value.definite

    async def test_a_publish_with_a_reply_subject_learns_that_nobody_listens(
        self, plane: EventPlane, subject: str
    ) -> None:
        async with plane.subscribe(f"{subject}.back") as replies:
            await plane.publish(subject, b"x", reply=f"{subject}.back")
            message = await receive(replies)
        assert message.payload == b""
        assert message.headers["Status"] == "503"

    async def test_a_request_without_a_reply_ends_at_its_deadline_indefinitely(
        self, plane: EventPlane, subject: str
    ) -> None:
        async with plane.subscribe(subject) as subscription:
            with pytest.raises(DeadlineError) as caught:
                await plane.request(subject, b"x", timeout_s=3)
            assert not caught.value.definite
            assert await payloads(subscription, 1) == [b"x"]

    async def test_a_late_reply_reaches_nobody_and_harms_nothing(
        self, plane: EventPlane, subject: str
    ) -> None:
        async with plane.subscribe(subject) as subscription:
            with pytest.raises(DeadlineError):
                await plane.request(subject, b"x", timeout_s=3)
            late = await receive(subscription)
            await plane.publish(late.reply, b"late")
            async with trio.open_nursery() as nursery:

                async def answer() -> None:
                    await plane.publish((await receive(subscription)).reply, b"in time")

                nursery.start_soon(answer)
                reply = await plane.request(subject, b"y", timeout_s=60)
        assert reply.payload == b"in time"

    async def test_a_request_waits_for_a_reply_that_is_accepted(
        self, plane: EventPlane, other: EventPlane, subject: str
    ) -> None:
        seen: list[bytes] = []

        def accept(reply: Message) -> bool:
            seen.append(reply.payload)
            return reply.payload == b"right"

        async def answer(subscription: Subscription) -> None:
            asked = await receive(subscription)
            for payload in (b"", b"wrong", b"right", b"late"):
                await other.publish(asked.reply, payload)

        async with other.subscribe(subject) as subscription, trio.open_nursery() as nursery:
            nursery.start_soon(answer, subscription)
            reply = await plane.request(subject, b"x", timeout_s=60, accept=accept)
        assert reply.payload == b"right"
        assert seen == [b"", b"wrong", b"right"]

    async def test_nobody_is_a_reply_that_may_be_refused(
        self, plane: EventPlane, subject: str
    ) -> None:
        seen: list[bool] = []

        def refuse(reply: Message) -> bool:
            seen.append(reply.says_nobody)
            return False

        with pytest.raises(DeadlineError):
            await plane.request(subject, b"x", timeout_s=3, accept=refuse)
        assert seen == [True]

    async def test_a_receive_that_is_cancelled_loses_nothing(
        self, plane: EventPlane, subject: str
    ) -> None:
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
        self, plane: EventPlane, subject: str
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

    async def test_a_slow_consumer_keeps_the_oldest_and_counts_the_rest(
        self, plane: EventPlane, subject: str
    ) -> None:
        async with plane.subscribe(subject, pending_max=10) as slow:
            for number in range(50):
                await plane.publish(subject, b"%d" % number)
            await until(lambda: slow.dropped == 40)
            assert await payloads(slow, 10) == [b"%d" % number for number in range(10)]
            await assert_nothing_pending(plane, slow, subject)
            assert slow.dropped == 40

    async def test_a_slow_consumer_does_not_slow_its_neighbour(
        self, plane: EventPlane, subject: str
    ) -> None:
        async with (
            plane.subscribe(subject, pending_max=1) as slow,
            plane.subscribe(subject) as quick,
        ):
            for number in range(50):
                await plane.publish(subject, b"%d" % number)
            assert len(await payloads(quick, 50)) == 50
            assert quick.dropped == 0
            await until(lambda: slow.dropped == 49)

    async def test_a_message_of_the_largest_size_passes_and_one_more_byte_is_refused(
        self, plane: EventPlane, subject: str
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
    async def test_a_bad_subject_is_refused_before_it_is_sent(
        self, plane: EventPlane, bad: str
    ) -> None:
        with pytest.raises(RequestError):
            await plane.publish(bad, b"")
        with pytest.raises(RequestError):
            await plane.request(bad, b"", timeout_s=5)
        await plane.check_health()

    @pytest.mark.parametrize("bad", ["", "a.", "a.>.b", "a b", "a*", "a.>b", "a\nb"])
    async def test_a_bad_pattern_is_refused_before_it_is_sent(
        self, plane: EventPlane, bad: str
    ) -> None:
        with pytest.raises(RequestError):
            async with plane.subscribe(bad):
                pass
        await plane.check_health()

    @pytest.mark.parametrize("headers", [{"": "x"}, {"a b": "x"}, {"a:": "x"}, {"a": "x\r\ny: z"}])
    async def test_a_bad_header_is_refused_before_it_is_sent(
        self, plane: EventPlane, subject: str, headers: dict[str, str]
    ) -> None:
        with pytest.raises(RequestError):
            await plane.publish(subject, b"", headers=headers)
        await plane.check_health()

    async def test_leaving_a_subscription_removes_it(
        self, plane: EventPlane, other: EventPlane, subject: str
    ) -> None:
        async with plane.subscribe(subject):
            pass
        with trio.fail_after(120):
            while True:  # The server learns of it when the plane's next bytes arrive.
                try:
                    await other.request(subject, b"x", timeout_s=0.05)
                except UnavailableError:
                    break
                except DeadlineError:
                    continue

    async def test_a_reader_ends_when_its_subscription_is_left(
        self, plane: EventPlane, subject: str
    ) -> None:
        got: list[bytes] = []

        async def consume(subscription: Subscription) -> None:
            async for message in subscription:
                got.append(message.payload)  # noqa: PERF401 -- the test looks while it grows

        async with trio.open_nursery() as nursery, plane.subscribe(subject) as subscription:
            nursery.start_soon(consume, subscription)
            await plane.publish(subject, b"x")
            await until(lambda: got == [b"x"])
        assert got == [b"x"]

    async def test_every_wait_can_be_cancelled(self, plane: EventPlane, subject: str) -> None:
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

    async def test_check_health_names_the_broker(self, plane: EventPlane) -> None:
        line = await plane.check_health()
        assert line
        assert "\n" not in line
