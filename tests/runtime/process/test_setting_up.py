"""`client` and `serve` may be cancelled, raced and repeated; clients that nobody holds are closed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tests.runtime.one_process import OneProcess, open_process, task_count
from trinamo.runtime.caller.client import Client
from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context
from trinamo.runtime.env import Env
from trinamo.runtime.errors import UnavailableError
from trinamo.runtime.planes import ControlPlane
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane

NAME = EndpointName("test", "backend", "count")


class Faulty(OneProcess):
    """All processes reach the store over links that fail together."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = ControlFaults()

    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
        yield MemoryControlPlane(self.store, faults=self.faults)

    async def register(self, number: int) -> Instance:
        instance = Instance(endpoint=str(NAME), id=f"{number:016x}", transports={})
        await MemoryControlPlane(self.store).put(instance.key, encode_instance(instance))
        await trio.testing.wait_all_tasks_blocked()
        return instance


async def handler(request: int, context: Context) -> AsyncGenerator[int, None]:
    yield request


async def test_a_client_whose_opening_was_cancelled_is_opened_when_asked_for_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transports = Faulty()
    async with open_process(transports, router__policy="kv") as caller:
        await caller.settings.wait_loaded()
        before = task_count()
        with transports.faults.outage():
            with trio.move_on_after(1):
                await caller.client(NAME)
            await trio.testing.wait_all_tasks_blocked()
            assert task_count() == before
            assert caller.clients == []
        client = await caller.client(NAME)
        instance = await transports.register(1)
        assert client.router.instances == [instance]
        assert caller.clients == [client]


@pytest.mark.parametrize("is_first_cancelled", [False, True])
async def test_who_comes_second_waits_for_the_client_too(
    autojump_clock: trio.testing.MockClock, *, is_first_cancelled: bool
) -> None:
    """And opens it himself, should the first be cancelled: nobody gets one without a live set."""
    transports, opened = Faulty(), list[Client]()
    async with open_process(transports) as caller, trio.open_nursery() as nursery:
        await caller.settings.wait_loaded()
        instance = await transports.register(1)

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                client = await caller.client(NAME)
                assert client.router.instances == [instance]
                opened.append(client)

        with transports.faults.outage():
            first, second = trio.CancelScope(), trio.CancelScope()
            for scope in (first, second):
                nursery.start_soon(ask, scope)
                await trio.testing.wait_all_tasks_blocked()
            if is_first_cancelled:
                first.cancel()
            await trio.sleep(1)
            assert not opened
        await trio.testing.wait_all_tasks_blocked()
        assert opened == [*caller.clients] * (1 if is_first_cancelled else 2)


async def test_a_client_is_closed_with_its_last_holder_and_opened_anew_after_that(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transports = Faulty()
    await transports.register(1)
    async with open_process(transports, router__policy="kv") as caller:
        before = task_count()
        client = await caller.client(NAME)
        assert await caller.client(NAME) is client
        caller.release(client)
        assert caller.clients == [client]
        # It speaks no transport at all, so it is known, and accepts no request.
        counted = {"endpoint": str(NAME), "state": "no common transport"}
        assert caller.metrics.value("instances", **counted) == 1
        caller.release(client)
        await trio.testing.wait_all_tasks_blocked()
        assert (caller.clients, task_count()) == ([], before)
        exposed = caller.metrics.render().decode()
        assert str(NAME) not in exposed
        with pytest.raises(ValueError, match="not held"):
            caller.release(client)
        assert await caller.client(NAME) is not client


async def test_a_cancelled_serve_leaves_nothing_and_may_be_repeated(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transports = Faulty()
    store = MemoryControlPlane(transports.store)
    async with open_process(transports, serving=True) as worker:
        for delay_s in (0.1, 0.6, 0.9):
            # Before and after the write that makes it findable, whose answer takes a second.
            transports.faults.delay_s = transports.faults.reply_delay_s = 0.5
            with trio.move_on_after(delay_s) as scope:
                await worker.serve(NAME, handler)
            assert scope.cancelled_caught
            transports.faults.delay_s = transports.faults.reply_delay_s = 0.0
            await trio.sleep(5)
            assert not (await store.range("instances/")).entries
        await worker.serve(NAME, handler)
        (entry,) = (await store.range("instances/")).entries
        assert entry.lease_id == worker.registrar.state.lease_id


async def test_a_cancelled_card_is_not_published_and_an_old_one_stays(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transports = Faulty()
    store = MemoryControlPlane(transports.store)
    async with open_process(transports, serving=True) as worker:
        await worker.publish("models/old", b"old")
        with transports.faults.outage():
            for key in ("models/old", "models/new"):
                with trio.move_on_after(1):
                    await worker.publish(key, b"new")
        await trio.sleep(10)
        assert {e.key: e.value for e in (await store.range("models/")).entries} == {
            "models/old": b"new"
        }


async def test_a_shutdown_that_was_cancelled_is_finished_by_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transports = Faulty()
    store = MemoryControlPlane(transports.store)
    async with open_process(transports, serving=True) as worker:
        await worker.serve(NAME, handler)
        with transports.faults.outage(), trio.move_on_after(0.5) as scope:
            await worker.shutdown()
        assert scope.cancelled_caught
        await worker.shutdown()
        assert not (await store.range("")).entries
        with pytest.raises(UnavailableError):
            await worker.publish("models/late", b"")
