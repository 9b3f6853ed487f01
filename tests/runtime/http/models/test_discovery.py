"""Models come and go with the cards under `models/…`; whatever else is written there harms nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.runtime.caller.requests import Posted
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.router import Router
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.models.discovery import watch_models
from trinamo.runtime.http.models.models import ModelKind, ModelManager
from trinamo.runtime.planes import PostedRequest, RequestPlane, TakeAnswer
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import ModelCard
from trinamo.runtime.protocol.streams.request import AckStatus, Envelope, RequestAnswer
from trinamo.transports.memory.control import MemoryControlPlane

ENDPOINT = EndpointName("ns", "backend", "generate")


class Reachable:
    """A request plane to workers that are all there, and say so."""

    transport = "tcp"
    is_usable = True
    acknowledges = True

    async def hold(
        self, address: str, on_connected: Callable[[], None], *, instance_id: str = ""
    ) -> None:
        on_connected()
        await trio.sleep_forever()

    def post(
        self, address: str, envelope: Envelope, payload: bytes, take: TakeAnswer
    ) -> PostedRequest | None:
        async def accept() -> tuple[RequestAnswer, bytes]:
            await trio.lowlevel.checkpoint()
            return RequestAnswer(id=envelope.id, status=AckStatus.ACCEPTED), b""

        return Posted(accept, take)

    async def wait_room(self, address: str) -> None:
        raise AssertionError


@attrs.frozen
class Held:
    """Clients that are open, by endpoint; each is asked for once and released once."""

    store: MemoryControlPlane
    env: RealEnv
    nursery: trio.Nursery
    opened: dict[EndpointName, tuple[Client, trio.CancelScope]] = attrs.field(factory=dict)

    async def client(self, endpoint: EndpointName) -> Client:
        assert endpoint not in self.opened
        planes: dict[str, RequestPlane] = {"tcp": Reachable()}
        router = Router(self.store, endpoint, self.env, request_planes=planes)
        nobody: Any = None
        client, scope = Client(router, nobody, self.env), trio.CancelScope()
        await self.nursery.start(self._run, router, scope)
        self.opened[endpoint] = client, scope
        return client

    async def _run(
        self, router: Router, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]
    ) -> None:
        with scope:
            await router.run(task_status=task_status)

    def release(self, client: Client) -> None:
        _, scope = self.opened.pop(client.router.endpoint)
        scope.cancel()


@attrs.frozen
class Watched:
    """A store and the models a frontend makes of it."""

    store: MemoryControlPlane
    manager: ModelManager
    clients: Held

    async def register(self, worker: str, *, draining: bool = False) -> str:
        each = Instance(
            endpoint=str(ENDPOINT), id=worker, transports={"tcp": "host:1"}, draining=draining
        )
        await self.store.put(each.key, encode_instance(each))
        await trio.testing.wait_all_tasks_blocked()
        return each.key

    async def publish(self, name: str, worker: str, endpoint: str = "ns/backend/generate") -> str:
        key = model_key(name, worker)
        await self.store.put(key, encode_card(ModelCard(name=name, endpoint=endpoint)))
        return key

    async def wait_models(self, *names: str) -> None:
        # Counted, not timed: on a virtual clock no time passes while we look.
        for _ in range(1000):
            if sorted(self.manager.models(ModelKind.CHAT)) == sorted(names):
                return
            await trio.lowlevel.checkpoint()
        raise AssertionError(self.manager.models(ModelKind.CHAT))

    @property
    def refused(self) -> float:
        return self.manager.metrics.value("discovery_entries_refused_total", kind="model")


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    env, store = RealEnv(), MemoryControlPlane()
    manager = ModelManager(env, FrontendMetrics(env))

    async with trio.open_nursery() as nursery:
        clients = Held(store, env, nursery)
        await nursery.start(watch_models, store, clients, manager)
        yield Watched(store, manager, clients)
        nursery.cancel_scope.cancel()


async def test_a_model_is_there_while_one_worker_publishes_it() -> None:
    async with watched() as each:
        first = await each.publish("m", "1")
        second = await each.publish("m", "2")
        await each.wait_models("m")
        await each.store.delete(first)
        await each.publish("n", "1")
        await each.wait_models("m", "n")
        await each.store.delete(second)
        await each.wait_models("n")
        assert each.refused == 0


async def test_cards_that_make_no_sense_are_counted_and_the_watch_lives_on() -> None:
    """No card, nested too deep, another model's, no endpoint, outside the layout."""
    async with watched() as each:
        await each.publish("m", "0", endpoint="not an endpoint")
        other = encode_card(ModelCard(name="other", endpoint="ns/backend/generate"))
        for key, value in (
            (model_key("m", "1"), b"\xff"),
            (model_key("m", "2"), b'{"x":' + b"[" * 100_000),
            (model_key("m", "3"), other),
            ("models/", other),
            ("models/m", b"null"),
        ):
            await each.store.put(key, value)
        await each.publish("m", "4")
        await each.wait_models("m")
        assert each.refused == 6


async def test_a_card_that_contradicts_its_model_is_refused() -> None:
    async with watched() as each:
        await each.publish("m", "1")
        await each.publish("m", "2", endpoint="ns/elsewhere/generate")
        await each.publish("n", "1")
        await each.wait_models("m", "n")
        assert each.refused == 1


async def test_junk_over_a_good_card_leaves_the_good_one_in_force() -> None:
    async with watched() as each:
        key = await each.publish("m", "1")
        await each.wait_models("m")
        await each.store.put(key, b"junk")
        await each.publish("n", "1")
        await each.wait_models("m", "n")
        assert each.refused == 1


# --- cards whose workers stay --------------------------------------------------------------------


@pytest.mark.parametrize("first", ["instance", "card"])
async def test_a_store_that_forgets_workers_and_cards_takes_no_model_away(
    first: str, autojump_clock: trio.testing.MockClock
) -> None:
    """All leases end in one moment; whichever of the two watches hears of it first."""
    async with watched() as each:
        card = await each.publish("m", "1")
        await each.wait_models("m")
        for _ in range(2):
            instance = await each.register("1")
            for key in (instance, card) if first == "instance" else (card, instance):
                await each.store.delete(key)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(8)
            await each.wait_models("m")
            await each.register("1")
            await each.publish("m", "1")
        await trio.sleep(60)
        await each.wait_models("m")


async def test_a_worker_that_never_comes_back_takes_its_model_along(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with watched() as each:
        card = await each.publish("m", "1")
        await each.wait_models("m")
        instance = await each.register("1")
        await each.store.delete(card)
        await trio.sleep(1)
        await each.store.delete(instance)
        await trio.sleep(8)
        await each.wait_models("m")
        await trio.sleep(2.1)
        assert each.manager.models(ModelKind.CHAT) == []


@pytest.mark.parametrize("first", ["instance", "card"])
async def test_a_worker_that_leaves_in_order_takes_its_model_along_at_once(
    first: str, autojump_clock: trio.testing.MockClock
) -> None:
    """It says so before it withdraws its card, but the two watches race."""
    async with watched() as each:
        card = await each.publish("m", "1")
        await each.wait_models("m")
        await each.register("1")
        if first == "instance":
            await each.register("1", draining=True)
        await each.store.delete(card)
        if first == "card":
            await trio.testing.wait_all_tasks_blocked()
            await each.wait_models("m")
            await each.register("1", draining=True)
        await trio.testing.wait_all_tasks_blocked()
        assert each.manager.models(ModelKind.CHAT) == []


async def test_a_card_that_goes_while_its_worker_stays_is_kept_for_the_grace_only(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with watched() as each:
        cards = [await each.publish(name, "1") for name in ("m", "n")]
        await each.wait_models("m", "n")
        await each.register("1")
        await each.store.delete(cards[0])
        await trio.sleep(5)
        await each.store.delete(cards[1])
        await trio.sleep(4.9)
        await each.wait_models("m", "n")
        await trio.sleep(0.2)
        assert each.manager.models(ModelKind.CHAT) == ["n"]
        await trio.sleep(5)
        assert each.manager.models(ModelKind.CHAT) == []


async def test_the_clients_of_endpoints_that_are_gone_are_released(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Whoever may write cards could otherwise open clients and watches without end."""
    async with watched() as each:
        for number in range(50):
            key = await each.publish(f"m{number}", "1", endpoint=f"ns/backend/e{number}")
            await each.wait_models(f"m{number}")
            await each.store.delete(key)
            await each.wait_models()
            await trio.sleep(10)
            assert len(each.clients.opened) <= 12
        await trio.sleep(200)
        assert not each.clients.opened
        await each.publish("m1", "1", endpoint="ns/backend/e1")
        await each.wait_models("m1")
        assert [str(name) for name in each.clients.opened] == ["ns/backend/e1"]


async def test_the_client_of_an_endpoint_is_kept_while_a_card_names_it_or_a_worker_is_there(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with watched() as each:
        card = await each.publish("m", "1")
        await each.wait_models("m")
        await trio.sleep(600)
        assert each.clients.opened, "a card names it"
        instance = await each.register("1")
        await each.store.delete(card)
        await trio.sleep(600)
        assert each.clients.opened, "its worker is there, and may publish the model again"
        await each.store.delete(instance)
        await trio.sleep(600)
        assert each.clients.opened, "its worker left without draining, and is named as gone"
        await trio.sleep(600)
        assert not each.clients.opened
