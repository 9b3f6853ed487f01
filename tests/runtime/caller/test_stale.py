"""An instance that discovery has deleted, but that is reached: kept in grace, while it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.runtime.caller.requests import NAME, Request, SeededEnv, ToldPlane, instance, place
from trinamo.runtime.caller.instances import GONE_S
from trinamo.runtime.caller.record import InstanceStatus
from trinamo.runtime.caller.router import Router
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.protocol.discovery.instances import Instance, encode_instance
from trinamo.runtime.protocol.streams.request import AckStatus
from trinamo.transports.memory.control import MemoryControlPlane


class Reached:
    """One instance with a connection to it, and a request that waits for its first item."""

    def __init__(self, *, stale_grace_s: float | None = 10.0) -> None:
        self.tcp = ToldPlane("tcp")
        self.store = MemoryControlPlane()
        self.metrics = FrontendMetrics(RealEnv())
        self.router = Router(
            self.store,
            NAME,
            SeededEnv(),
            stale_grace_s=stale_grace_s,
            silence_grace_s=8.0,
            metrics=self.metrics,
            request_planes={"tcp": self.tcp},
        )
        self.waiting = Request(None, is_waiting=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Reached]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.router.run)
            await self.put()
            await self.router.wait_instances()
            with self.router.flight(instance("1"), self.waiting):
                # Until the connection stands; the clock then shows 1.
                await trio.sleep(1)
                yield self
            nursery.cancel_scope.cancel()

    @property
    def gone(self) -> list[float]:
        """When the request that waits for its first item was ended."""
        return self.waiting.ended_at

    async def put(self, *, incarnation: int = 1, draining: bool = False) -> None:
        one = Instance(
            endpoint=str(NAME),
            id="1",
            transports={"tcp": place("1")},
            incarnation=incarnation,
            draining=draining,
        )
        await self.store.put(one.key, encode_instance(one))
        await trio.testing.wait_all_tasks_blocked()

    async def delete(self) -> None:
        await self.store.delete(instance("1").key)
        await trio.testing.wait_all_tasks_blocked()

    @property
    def stale_count(self) -> float:
        return self.metrics.value("stale_instances", endpoint=str(NAME))

    @property
    def live_count(self) -> float:
        return self.metrics.value("live_instances", endpoint=str(NAME))


async def test_a_lost_lease_changes_nothing_if_the_worker_answers_and_registers_again(
    autojump_clock: MockClock,
) -> None:
    probed = 0
    async with Reached().running() as reached:
        for incarnation in (2, 3):
            await reached.delete()
            assert (reached.stale_count, reached.live_count) == (1, 1)
            ((_, status, _),) = reached.router.statuses()
            assert status is InstanceStatus.STALE
            await trio.sleep(9)
            assert "".join(reached.router.choose().id for _ in range(4)) == "1111"
            await reached.put(incarnation=incarnation)
            assert (reached.stale_count, reached.live_count) == (0, 1)
            probed = len(reached.tcp.asked_at)
            await trio.sleep(60)
            assert len(reached.tcp.asked_at) == probed
        assert probed >= 12
        assert reached.gone == []


async def test_who_does_not_register_again_within_the_grace_is_dropped(
    autojump_clock: MockClock,
) -> None:
    async with Reached().running() as reached:
        await reached.delete()
        await trio.sleep(60)
        assert reached.gone == [11.0]
        assert (reached.router.instances, reached.stale_count) == ([], 0)


async def test_a_stopped_process_s_connection_stands_but_it_is_dropped_after_one_probe(
    autojump_clock: MockClock,
) -> None:
    async with Reached().running() as reached:
        reached.tcp.status = None
        await reached.delete()
        await trio.sleep(60)
        assert (reached.gone, len(reached.tcp.asked_at)) == ([2.0], 1)


async def test_one_that_stops_while_it_is_stale_is_found_out(
    autojump_clock: MockClock,
) -> None:
    async with Reached().running() as reached:
        await reached.delete()
        await trio.sleep(4)
        reached.tcp.status = None
        await trio.sleep(4)
        assert len(reached.gone) == 1
        assert 5 < reached.gone[0] <= 8


@pytest.mark.parametrize("answer", [AckStatus.DRAINING, AckStatus.UNKNOWN_ENDPOINT])
async def test_one_that_says_it_leaves_or_is_another_is_dropped_at_once(
    answer: AckStatus, autojump_clock: MockClock
) -> None:
    async with Reached().running() as reached:
        reached.tcp.status = answer
        await reached.delete()
        assert reached.gone == [1.0]


async def test_the_end_of_the_connection_ends_its_grace(
    autojump_clock: MockClock,
) -> None:
    async with Reached().running() as reached:
        await reached.delete()
        await trio.sleep(2)
        reached.tcp.break_off()
        await trio.sleep(10)
        assert reached.gone == [3.0]
        await reached.put(incarnation=2)
        assert [each.incarnation for each in reached.router.instances] == [2]


@pytest.mark.parametrize("why", ["draining", "broken", "not wanted"])
async def test_who_drains_or_is_not_reached_is_dropped_as_soon_as_discovery_says(
    why: str, autojump_clock: MockClock
) -> None:
    async with Reached(stale_grace_s=None if why == "not wanted" else 10.0).running() as reached:
        if why == "draining":
            await reached.put(draining=True)
        if why == "broken":
            reached.tcp.break_off()
            await trio.testing.wait_all_tasks_blocked()
        await reached.delete()
        assert (reached.gone, len(reached.tcp.asked_at)) == ([1.0], 0)


async def test_a_stream_of_a_stale_one_must_not_be_silent_either(
    autojump_clock: MockClock,
) -> None:
    """The rule of silence counts from the deletion, also for what begins while it is stale."""
    async with Reached().running() as reached:
        await reached.delete()
        await trio.sleep(2)
        begun = Request()
        with reached.router.flight(instance("1"), begun):
            await trio.sleep(30)
        assert len(begun.ended) == 1
        assert 11 <= begun.ended_at[0] <= 15
        assert reached.gone == [11.0]


async def test_the_news_that_somebody_came_left_or_is_leaving_can_be_waited_for(
    autojump_clock: MockClock,
) -> None:
    async with Reached().running() as reached:
        seen = await reached.router.wait_change(-1)
        grace = [reached.router.removal_grace_s(each) for each in ("1", "2")]
        for news in (
            reached.delete,
            lambda: reached.put(incarnation=2),
            lambda: reached.put(incarnation=3),
        ):
            await news()
            with trio.move_on_after(0.1) as waiting:
                await reached.router.wait_change(seen)
            assert waiting.cancelled_caught
        grace.append(reached.router.removal_grace_s("1"))
        with trio.fail_after(120):
            await reached.put(draining=True)
            after = await reached.router.wait_change(seen)
            grace.append(reached.router.removal_grace_s("1"))
            await reached.delete()
            assert await reached.router.wait_change(after) > after > seen
        assert grace == [10.0, 0.0, 10.0, 0.0]


async def test_an_instance_that_left_without_draining_is_named_for_a_quarter_of_an_hour(
    autojump_clock: MockClock,
) -> None:
    """A worker that was killed or frozen is not forgotten with its lease."""
    async with Reached().running() as reached:
        reached.tcp.status = None
        await reached.delete()
        await trio.sleep(60)
        assert reached.live_count == 0
        assert [each.id for each, _ in reached.router.gone()] == ["1"]
        assert reached.metrics.value("instances", endpoint=str(NAME), state="gone") == 1
        await trio.sleep(900)
        assert list(reached.router.gone()) == []
        assert reached.metrics.value("instances", endpoint=str(NAME), state="gone") == 0


async def test_an_instance_that_drained_or_is_replaced_is_not_named_as_gone(
    autojump_clock: MockClock,
) -> None:
    async with Reached().running() as reached:
        await reached.put(draining=True)
        await reached.delete()
        await trio.sleep(60)
        assert list(reached.router.gone()) == []
        await reached.put(incarnation=2)
        reached.tcp.break_off()
        await reached.delete()
        assert [each.id for each, _ in reached.router.gone()] == ["1"]
        two = instance("2")
        await reached.store.put(two.key, encode_instance(two))
        await trio.testing.wait_all_tasks_blocked()
        assert list(reached.router.gone()) == []


async def test_one_that_joins_replaces_none_whose_time_is_over(autojump_clock: MockClock) -> None:
    """Also if nobody has looked since."""
    async with Reached().running() as reached:
        await reached.store.put(instance("2").key, encode_instance(instance("2")))
        await trio.testing.wait_all_tasks_blocked()
        reached.tcp.break_off()
        await trio.testing.wait_all_tasks_blocked()
        await reached.delete()
        await trio.sleep(GONE_S)
        await reached.store.delete(instance("2").key)
        await trio.testing.wait_all_tasks_blocked()
        await reached.store.put(instance("3").key, encode_instance(instance("3")))
        await trio.testing.wait_all_tasks_blocked()
        assert list(reached.router.gone()) == []
