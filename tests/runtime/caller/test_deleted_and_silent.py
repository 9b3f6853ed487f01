"""Streams of an instance that was deleted: which go on, and which are given up as silent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import trio
import trio.testing
from trio.testing import MockClock

from tests.runtime.caller.requests import NAME, Request, SeededEnv, instance
from trinamo.runtime.caller.router import Router
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.protocol.discovery.instances import encode_instance
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane


class Watched:
    """A router that runs on a store of its own, on a virtual clock."""

    def __init__(self, faults: ControlFaults | None = None, **settings: Any) -> None:
        self.store = MemoryControlPlane()
        self.metrics = FrontendMetrics(RealEnv())
        self.router = Router(
            MemoryControlPlane(self.store.store, faults=faults),
            NAME,
            SeededEnv(),
            metrics=self.metrics,
            silence_grace_s=8.0,
            **settings,
        )
        self.request = Request()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Watched]:
        async with trio.open_nursery() as nursery:
            await self.put()
            await nursery.start(self.router.run)
            yield self
            nursery.cancel_scope.cancel()

    async def put(self, incarnation: int = 1) -> None:
        each = instance("1", incarnation=incarnation)
        await self.store.put(each.key, encode_instance(each))

    async def delete(self) -> None:
        await self.store.delete(instance("1").key)

    def streaming(self) -> AbstractContextManager[None]:
        """A stream of the instance that has begun."""
        return self.router.flight(instance("1"), self.request)

    @property
    def given_up(self) -> list[float]:
        return self.request.ended_at

    @property
    def silent_count(self) -> float:
        return self.metrics.value("silent_requests_total", endpoint=str(NAME), reason="left")


async def test_a_deleted_and_silent_instance_s_stream_is_given_up_after_the_grace(
    autojump_clock: MockClock,
) -> None:
    async with Watched().running() as watched:
        with watched.streaming():
            await trio.sleep(100)
            assert watched.given_up == []
            await watched.delete()
            await trio.sleep(100)
            assert watched.given_up == [108.0]
            assert watched.silent_count == 1


async def test_items_begin_the_grace_anew_and_a_slow_consumer_is_nobody_s_silence(
    autojump_clock: MockClock,
) -> None:
    async with Watched().running() as watched:
        with watched.streaming():
            await watched.delete()
            for watched.request.came in range(2, 12):
                await trio.sleep(6)
            watched.request.came = None
            await trio.sleep(60)
            assert watched.given_up == []
            watched.request.came = 12
            await trio.sleep(60)
            assert len(watched.given_up) == 1


async def test_an_instance_that_registers_again_keeps_its_streams(
    autojump_clock: MockClock,
) -> None:
    """It lost its lease in an outage; its silence is a long prefill. A second loss counts anew."""
    async with Watched().running() as watched:
        with watched.streaming():
            for incarnation in (2, 3):
                await watched.delete()
                await trio.sleep(7)
                await watched.put(incarnation)
                await trio.sleep(50)
            assert watched.given_up == []
            await watched.delete()
            await trio.sleep(20)
            assert len(watched.given_up) == 1


async def test_a_store_that_is_away_gives_nobody_up(
    autojump_clock: MockClock,
) -> None:
    faults = ControlFaults()
    async with Watched(faults).running() as watched:
        with watched.streaming():
            with faults.outage():
                await watched.delete()
                await trio.sleep(100)
                assert watched.given_up == []
            await trio.sleep(20)
            assert len(watched.given_up) == 1


async def test_a_draining_instance_gives_nobody_up(
    autojump_clock: MockClock,
) -> None:
    async with Watched().running() as watched:
        with watched.streaming():
            each = instance("1", draining=True)
            await watched.store.put(each.key, encode_instance(each))
            await trio.sleep(100)
            assert watched.given_up == []


async def test_nothing_is_left_of_an_instance_after_its_last_request(
    autojump_clock: MockClock,
) -> None:
    async with Watched().running() as watched:
        await trio.testing.wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living
        with watched.streaming():
            await watched.delete()
            await trio.sleep(1)
            assert trio.lowlevel.current_statistics().tasks_living >= before
        await trio.sleep(10)
        assert trio.lowlevel.current_statistics().tasks_living < before + 1
        assert watched.given_up == []
