"""Models come and go with the cards under `models/…`; whatever else is written there harms nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.discovery import watch_models
from trinamo.runtime.http.models import DeploymentState, ModelManager
from trinamo.runtime.metrics import FrontendMetrics
from trinamo.runtime.protocol.generate import ModelCard
from trinamo.runtime.protocol.instances import EndpointName
from trinamo.runtime.protocol.model_cards import encode_card, model_key
from trinamo.transports.memory.control import MemoryControlPlane


@attrs.frozen
class Watched:
    """A store and the models a frontend makes of it."""

    store: MemoryControlPlane
    manager: ModelManager

    async def publish(self, name: str, worker: str, endpoint: str = "ns/backend/generate") -> str:
        key = model_key(name, worker)
        await self.store.put(key, encode_card(ModelCard(name=name, endpoint=endpoint)))
        return key

    async def wait_models(self, *names: str) -> None:
        with trio.fail_after(5):
            while sorted(self.manager.list_chat_completions_models()) != sorted(names):
                await trio.lowlevel.checkpoint()

    @property
    def refused(self) -> float:
        return self.manager.metrics().value("discovery_entries_refused_total", kind="model")


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    env, store = RealEnv(), MemoryControlPlane()
    manager = ModelManager(DeploymentState(env, FrontendMetrics(env)))

    async def open_client(_: EndpointName) -> Any:
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        await nursery.start(watch_models, store, open_client, manager)
        yield Watched(store, manager)
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
