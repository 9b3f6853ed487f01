"""The memory broker's own doings: its matching, its fairness and its faults."""

from __future__ import annotations

import re

import pytest
import trio
from hypothesis import given, settings, strategies as st

from trinamo.runtime.errors import ConnectError, DeadlineError, OverloadedError, UnavailableError
from trinamo.runtime.planes import EventPlane
from trinamo.runtime.planes.events import check_pattern, check_subject
from trinamo.transports.memory.events import (
    MemoryBroker,
    MemoryEventPlane,
    MemorySubscription,
    matches,
)

TOKEN = st.text(alphabet="ab", min_size=1, max_size=2)
SUBJECT = st.lists(TOKEN, min_size=1, max_size=4).map(".".join)
PATTERN = st.builds(
    lambda head, tail: ".".join([*head, tail]),
    st.lists(TOKEN | st.just("*"), max_size=3),
    TOKEN | st.sampled_from("*>"),
)


@settings(max_examples=60, deadline=None)
@given(PATTERN, SUBJECT)
def test_matching_is_that_of_the_equivalent_regular_expression(pattern: str, subject: str) -> None:
    """`*` is one token, a final `>` one or more, anything else itself."""
    check_pattern(pattern)
    check_subject(subject)
    words = {"*": r"[^.]+", ">": r".+"}
    expression = r"\.".join(words.get(token, token) for token in pattern.split("."))
    assert matches(pattern, subject) == (re.fullmatch(expression, subject) is not None)


@settings(max_examples=60, deadline=None)
@given(SUBJECT)
def test_a_subject_matches_itself_and_everything(subject: str) -> None:
    """Without wildcards a pattern matches exactly one subject; `>` matches all."""
    assert matches(subject, subject)
    assert matches(">", subject)
    assert not matches(f"{subject}.>", subject)


async def test_it_is_an_event_plane() -> None:
    plane: EventPlane = MemoryEventPlane(MemoryBroker(message_bytes_max=7))
    assert plane.message_bytes_max == 7
    assert "memory broker" in await plane.check_health()


async def test_members_of_a_group_take_turns() -> None:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    async with (
        plane.subscribe("a", group="g") as first,
        plane.subscribe("a", group="g") as second,
        MemoryEventPlane(broker).subscribe("a", group="g") as third,
    ):
        for number in range(6):
            await plane.publish("a", b"%d" % number)
        for member, expected in zip((first, second, third), (b"03", b"14", b"25"), strict=True):
            assert b"".join([(await anext(member)).payload for _ in range(2)]) == expected


async def test_every_message_travels_for_the_delay(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    async with plane.subscribe("a") as subscription:
        start = trio.current_time()
        broker.delay_s = 2.0
        await plane.publish("a", b"1")
        broker.delay_s = 0.0
        await plane.publish("a", b"2")
        assert (await anext(subscription)).payload == b"1"
        assert trio.current_time() - start == pytest.approx(2.0)
        assert (await anext(subscription)).payload == b"2"


async def test_a_receive_cancelled_during_the_delay_loses_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    broker.delay_s = 2.0
    async with plane.subscribe("a") as subscription:
        await plane.publish("a", b"1")
        with trio.move_on_after(1) as scope:
            await anext(subscription)
        assert scope.cancelled_caught
        assert (await anext(subscription)).payload == b"1"


async def test_a_delayed_reply_may_come_after_the_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    broker.delay_s = 2.0

    async def echo(*, task_status: trio.TaskStatus[None]) -> None:
        async with plane.subscribe("a") as requests:
            task_status.started()
            async for request in requests:
                await plane.publish(request.reply, request.payload)

    async with trio.open_nursery() as nursery:
        await nursery.start(echo)
        assert (await plane.request("a", b"x", timeout_s=4.5)).payload == b"x"
        with pytest.raises(DeadlineError):
            await plane.request("a", b"x", timeout_s=3.5)
        nursery.cancel_scope.cancel()
    assert broker.subscription_count == 0


async def test_dropped_messages_are_lost_in_silence() -> None:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    async with plane.subscribe("a") as subscription:
        broker.drop_next(2)
        for number in range(4):
            await plane.publish("a", b"%d" % number)
        assert (await anext(subscription)).payload == b"2"
        assert subscription.dropped == 0


async def test_a_dropped_request_runs_into_its_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    broker.drop_next(1)
    with pytest.raises(DeadlineError) as caught:
        await plane.request("a", b"x", timeout_s=3)
    assert not caught.value.definite
    with pytest.raises(UnavailableError):
        await plane.request("a", b"x", timeout_s=3)


async def test_an_outage_is_seen_by_every_plane_and_each_has_its_own_buffer() -> None:
    broker = MemoryBroker()
    first, second = (MemoryEventPlane(broker, buffered_max=2) for _ in range(2))
    async with first.subscribe("a") as subscription:
        broker.stop()
        for plane in (first, second, first, second):
            with pytest.raises(ConnectError):
                await plane.check_health()
            await plane.publish("a", b"x")
        with pytest.raises(OverloadedError) as caught:
            await first.publish("a", b"y")
        assert (caught.value.bound, caught.value.value) == ("buffered_max", 2)
        assert (first.buffered, first.dropped, second.dropped) == (2, 1, 0)
        broker.start()
        assert [(await anext(subscription)).payload for _ in range(4)] == [b"x"] * 4
        assert (first.buffered, second.buffered) == (0, 0)


async def test_readers_of_one_subscription_share_its_messages() -> None:
    plane = MemoryEventPlane(MemoryBroker())
    got: list[bytes] = []

    async def consume(subscription: MemorySubscription) -> None:
        async for message in subscription:
            got.append(message.payload)  # noqa: PERF401 -- it grows while others look

    async with trio.open_nursery() as nursery, plane.subscribe("a") as subscription:
        nursery.start_soon(consume, subscription)
        nursery.start_soon(consume, subscription)
        for number in range(10):
            await plane.publish("a", b"%d" % number)
        await trio.testing.wait_all_tasks_blocked()
    assert sorted(got) == [b"%d" % number for number in range(10)]


async def test_nothing_is_left_at_the_end() -> None:
    broker = MemoryBroker()
    plane = MemoryEventPlane(broker)
    async with plane.subscribe("a"), plane.subscribe("a.*", group="g"):
        assert broker.subscription_count == 2
        await plane.publish("a.b", b"x")
        with pytest.raises(UnavailableError):
            await plane.request("nobody", b"x", timeout_s=1)
    assert broker.subscription_count == 0
    assert broker._turns == {}
    assert broker._exact == {}
