"""Numbered events over an event plane that loses some, and the load that travels by them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from trinamo.runtime.events.follower import EventFollower, ReportFollower
from trinamo.runtime.events.load import LoadReport, LoadSource
from trinamo.runtime.events.source import EventSource, topic_of
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.events.sequence import SequencedEvent, encode_event
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

ENDPOINT = EndpointName("ns", "comp.v1", "generate")


class Counting:
    """A publisher of numbers, whose state is all of them, and a follower of it."""

    def __init__(self, broker: MemoryBroker, *, incarnation: int = 1) -> None:
        self.broker = broker
        self.plane = MemoryEventPlane(broker, buffered_max=4)
        self.published: list[int] = []
        self.followed: list[int] = []
        self.source = self.new_source(incarnation)
        self.follower = EventFollower(
            MemoryEventPlane(broker),
            "numbers",
            on_event=lambda _, body: self.followed.append(body[0]),
            on_snapshot=lambda _, bodies: self.replace(bodies),
        )

    def new_source(self, incarnation: int) -> EventSource:
        return EventSource(
            self.plane,
            "numbers",
            publisher="p",
            incarnation=incarnation,
            snapshot=lambda _part, _parts: bytes(self.published),
        )

    def replace(self, bodies: tuple[bytes, ...]) -> None:
        self.followed = list(b"".join(bodies))

    async def publish(self, number: int) -> None:
        self.published.append(number)
        await self.source.publish(bytes([number]))


@asynccontextmanager
async def running(counting: Counting) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(counting.follower.run)
        await nursery.start(counting.source.run)
        yield
        nursery.cancel_scope.cancel()


async def test_without_loss_no_snapshot_is_asked_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    counting = Counting(MemoryBroker())
    async with running(counting):
        for number in range(10):
            await counting.publish(number)
        await trio.sleep(5)
    assert counting.followed == list(range(10))
    assert counting.follower.snapshot_count == 1  # The empty one that the first event stands for.


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_is_lost_the_follower_gets_there(
    seed: int, autojump_clock: trio.testing.MockClock
) -> None:
    counting, dice = Counting(MemoryBroker()), random.Random(seed)
    async with running(counting):
        for number in range(100):
            counting.broker.drop_next(dice.choice([0, 0, 1, 2]))
            await counting.publish(number)
            if dice.random() < 0.3:
                await trio.sleep(dice.random())
        counting.broker.drop_next(0)
        await trio.sleep(10)
    assert counting.followed == counting.published
    assert counting.follower.counts.gaps > 0


async def test_a_broker_that_was_away_costs_one_snapshot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    counting = Counting(MemoryBroker())
    async with running(counting):
        await counting.publish(0)
        await trio.sleep(0.1)
        counting.broker.stop()
        for number in range(1, 50):
            await counting.publish(number)
        assert counting.source.dropped > 0
        counting.broker.start()
        await trio.sleep(5)
        assert counting.followed == counting.published


async def test_followers_that_ask_together_cost_the_publisher_one_snapshot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker, made = MemoryBroker(), 0

    def snapshot(part: int, parts: int) -> bytes:
        nonlocal made
        made += 1
        return b"all"

    def follower() -> EventFollower:
        return EventFollower(
            MemoryEventPlane(broker),
            "numbers",
            on_event=lambda _, __: None,
            on_snapshot=lambda _, bodies: taken.append(bodies),
        )

    taken: list[tuple[bytes, ...]] = []
    source = EventSource(
        MemoryEventPlane(broker), "numbers", publisher="p", incarnation=1, snapshot=snapshot
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        await source.publish(b"1")
        for _ in range(20):
            await nursery.start(follower().run)
        await trio.sleep(2)
        assert taken == [(b"all",)] * 20
        assert made == 1
        await source.publish(b"2")
        await nursery.start(follower().run)
        await trio.sleep(2)
        assert made == 2
        nursery.cancel_scope.cancel()


async def test_a_publisher_that_starts_again_is_followed_from_its_snapshot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    counting = Counting(MemoryBroker())
    async with running(counting):
        await counting.publish(1)
        await counting.publish(2)
        await trio.sleep(0.1)
    counting.published.clear()
    counting.source = counting.new_source(2)
    async with running(counting):
        counting.broker.drop_next(1)
        await counting.publish(3)
        await counting.publish(4)
        await trio.sleep(5)
    assert counting.followed == [3, 4]


async def test_a_sequence_that_goes_back_is_counted_and_mended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    counting = Counting(MemoryBroker())
    async with running(counting):
        for number in range(5):
            await counting.publish(number)
        rogue = encode_event(SequencedEvent("p", 1, 2, b"\xff"))
        await counting.plane.publish("numbers.event.p", rogue)
        await trio.sleep(5)
    assert counting.follower.counts.backwards == 1
    assert counting.followed == counting.published


async def test_nonsense_is_counted_and_the_follower_lives_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    counting = Counting(MemoryBroker())
    async with running(counting):
        await counting.plane.publish("numbers.event.p", b"\xc1nonsense")
        stranger = encode_event(SequencedEvent("q", 1, 1, b"x"))
        await counting.plane.publish("numbers.event.p", stranger)
        await counting.publish(7)
        await trio.sleep(1)
    assert counting.follower.malformed == 2
    assert counting.followed == [7]


async def test_a_load_that_cannot_be_read_is_skipped_and_counted(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    active, skipped = 0, 0
    broker, reports = MemoryBroker(), dict[str, LoadReport]()

    def read() -> LoadReport:
        return LoadReport(active, 6 // active)

    def skip() -> None:
        nonlocal skipped
        skipped += 1

    plane = MemoryEventPlane(broker)
    source = LoadSource(plane, ENDPOINT, instance_id="a", incarnation=1, read=read, skipped=skip)
    loads = ReportFollower(
        MemoryEventPlane(broker),
        topic_of("load", ENDPOINT),
        LoadReport,
        follows={"a"}.__contains__,
        take=reports.__setitem__,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(loads.follower.run)
        await nursery.start(source.run)
        await trio.sleep(2.5)
        assert skipped >= 3
        active = 2
        await trio.sleep(1)
        assert reports["a"] == LoadReport(2, 3)
        nursery.cancel_scope.cancel()
    assert "a load report is skipped: ZeroDivisionError" in caplog.text


async def test_the_last_known_load_stays_while_the_broker_is_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker = MemoryBroker()
    active = 3
    source = LoadSource(
        MemoryEventPlane(broker),
        ENDPOINT,
        instance_id="a",
        incarnation=1,
        read=lambda: LoadReport(active, 5, 10),
    )
    known, reports = {"a"}, dict[str, LoadReport]()
    loads = ReportFollower(
        MemoryEventPlane(broker),
        topic_of("load", ENDPOINT),
        LoadReport,
        follows=known.__contains__,
        take=reports.__setitem__,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(loads.follower.run)
        assert reports == {}
        await nursery.start(source.run)
        await trio.sleep(0.5)
        assert reports["a"] == LoadReport(3, 5, 10)
        broker.stop()
        active = 9
        await trio.sleep(5)
        assert reports["a"].active == 3
        broker.start()
        await trio.sleep(2)
        assert reports["a"].active == 9
        known.clear()
        reports.clear()
        loads.follower.forget("a")
        # What it says on its way out is not believed, and leaves nothing behind.
        await trio.sleep(2)
        assert reports == {}
        assert loads.follower.unknown > 0
        nursery.cancel_scope.cancel()
