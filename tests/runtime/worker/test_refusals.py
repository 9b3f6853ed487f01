"""A store or broker that refuses: processes serve on, say it once, and go on once they may."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tests.runtime.one_process import OneProcess, open_process
from trinamo.runtime.config.config import Config
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import ControlPlaneError, EventPlaneError, UnavailableError
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.models.discovery import watch_models
from trinamo.runtime.http.models.models import ModelManager
from trinamo.runtime.planes import ControlPlane, EventPlane, WatchEvent
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import ModelCard
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryEventPlane, MemorySubscription

NAME = EndpointName("test", "backend", "count")
INSTANCE = Instance(endpoint=str(NAME), id="a" * 16, transports={})
LONG_S = 600.0


class Permission:
    """Whether this user may read; taken away, it also ends what he is reading."""

    def __init__(self) -> None:
        self.asked = 0
        self._is_given = trio.Event()
        self._is_taken = trio.Event()
        self._is_taken.set()

    def give(self) -> None:
        self._is_given.set()
        self._is_taken = trio.Event()

    def take(self) -> None:
        self._is_given = trio.Event()
        self._is_taken.set()

    def ask(self) -> bool:
        self.asked += 1
        return self._is_given.is_set()

    async def wait_taken(self) -> None:
        await self._is_taken.wait()


class RefusingStore(MemoryControlPlane):
    def __init__(self, plane: MemoryControlPlane, permission: Permission) -> None:
        super().__init__(plane.store)
        self.permission = permission

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        if not self.permission.ask():
            raise ControlPlaneError("etcd: permission denied", definite=True)
        async with super().watch(prefix) as events:
            yield self._until_refused(events)

    async def _until_refused(self, events: AsyncIterator[WatchEvent]) -> AsyncIterator[WatchEvent]:
        while True:
            found: list[WatchEvent] = []
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:

                    async def end(scope: trio.CancelScope = scope) -> None:
                        await self.permission.wait_taken()
                        scope.cancel()

                    nursery.start_soon(end)
                    found.append(await anext(events))
                    nursery.cancel_scope.cancel()
            if not found:
                raise ControlPlaneError("etcd: permission denied", definite=True)
            yield found[0]


class RefusingBroker(MemoryEventPlane):
    def __init__(self, transports: OneProcess, permission: Permission) -> None:
        super().__init__(transports.broker)
        self.permission = permission

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AsyncIterator[MemorySubscription]:
        if not self.permission.ask():
            raise EventPlaneError("nats: permissions violation")
        async with super().subscribe(subject, group=group, pending_max=pending_max) as messages:
            yield messages


class Refusing(OneProcess):
    """The planes of a process whose user may read nothing, until it is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.store_permission, self.broker_permission = Permission(), Permission()

    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
        yield RefusingStore(MemoryControlPlane(self.store), self.store_permission)

    @asynccontextmanager
    async def open_events(self, config: Config, env: Env) -> AsyncIterator[EventPlane]:
        yield RefusingBroker(self, self.broker_permission)


async def register(transports: OneProcess) -> None:
    await MemoryControlPlane(transports.store).put(INSTANCE.key, encode_instance(INSTANCE))


async def test_a_caller_that_may_not_watch_is_told_so_and_finds_workers_once_it_may(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    transports = Refusing()
    async with open_process(transports, router__policy="kv") as caller:
        client = await caller.client(NAME)
        await register(transports)
        with pytest.raises(UnavailableError, match="permission denied"):
            async with client.stream(5, int):
                pass
        await trio.sleep(LONG_S)
        assert transports.store_permission.asked < LONG_S / 10, "asked again, and not hot"
        assert caplog.text.count("are not followed: etcd: permission denied") == 2
        assert caplog.text.count("is not followed: nats: permissions violation") == 4
        transports.store_permission.give()
        transports.broker_permission.give()
        await trio.sleep(60)
        assert client.router.instances == [INSTANCE]


async def test_a_watch_that_is_taken_away_keeps_what_is_known_and_goes_on_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transports = Refusing()
    transports.store_permission.give()
    transports.broker_permission.give()
    await register(transports)
    async with open_process(transports) as caller:
        client = await caller.client(NAME)
        transports.store_permission.take()
        await trio.sleep(LONG_S)
        assert client.router.instances == [INSTANCE]
        transports.store_permission.give()
        await trio.sleep(60)
        other = Instance(endpoint=str(NAME), id="b" * 16, transports={})
        await MemoryControlPlane(transports.store).put(other.key, encode_instance(other))
        await trio.testing.wait_all_tasks_blocked()
        assert client.router.instances == [INSTANCE, other]


async def test_a_frontend_that_may_not_watch_models_starts_and_offers_them_once_it_may(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transports = Refusing()
    env = RealEnv()
    manager = ModelManager(env, FrontendMetrics(env))
    async with open_process(transports) as caller, trio.open_nursery() as nursery:
        await nursery.start(watch_models, caller.control, caller, manager)
        card = encode_card(ModelCard(name="exact", endpoint=str(NAME)))
        await register(transports)
        await MemoryControlPlane(transports.store).put(model_key("exact", INSTANCE.id), card)
        await trio.sleep(LONG_S)
        assert not manager.models()
        transports.store_permission.give()
        await trio.sleep(60)
        assert manager.models() == ["exact"]
        nursery.cancel_scope.cancel()


async def test_a_worker_whose_reports_are_refused_serves_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transports = Refusing()
    transports.store_permission.give()
    async with open_process(transports, serving=True, router__policy="least_loaded") as worker:
        served = await worker.register(NAME)
        await trio.sleep(LONG_S)
        assert await worker.control.get(served.key) is not None
