"""Holders and takers in one task tree, on memory planes and a wire that may break."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, DisconnectedError
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.kv.transfer.router import open_transfer_router
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.weights.files import manifest_of, open_partial
from trinamo.runtime.weights.lender import HeldFile, Lender, WeightsMetrics, register_window
from trinamo.runtime.weights.messages import (
    Ask,
    Item,
    Want,
    WeightsCard,
    encode_weights_card,
    weights_key,
)
from trinamo.runtime.weights.taker import MissingFile, Taker
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.transfer import (
    TransferFabric,
    TransferFaults,
    open_memory_transfer_plane,
)

CHUNK = 4096
MODEL, SPACE = "m", "trinamo"


async def inline(function: Callable[..., Any], *args: Any) -> Any:
    """A hop that is none: on a virtual clock no thread may keep us waiting."""
    await trio.lowlevel.checkpoint()
    return function(*args)


def configured(**weights: Any) -> Config:
    overrides = {f"weights.{key}": value for key, value in weights.items()}
    given = {"weights.chunk_bytes": CHUNK, "weights.patience_s": 20, **overrides}
    return load_config(environ={}, overrides=given)


@attrs.define(eq=False)
class Holder:
    """A worker that has the file, as its peers reach it."""

    id: str
    lender: Lender
    items_left: int | None = None
    """It is killed before it says more than so much; None: never."""
    says: Callable[[Item], Item] = lambda item: item
    """What it makes of what it should say."""


@attrs.define(eq=False)
class World:
    """A store, a fabric, holders; and what a taker sees of them."""

    config: Config
    nursery: trio.Nursery
    control: MemoryControlPlane = attrs.field(factory=MemoryControlPlane)
    fabric: TransferFabric = attrs.field(factory=TransferFabric)
    holders: dict[str, Holder] = attrs.field(factory=dict)
    registry: Registry = attrs.field(factory=Registry)
    metrics: WeightsMetrics = attrs.field(init=False)
    asked: list[str] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.metrics = WeightsMetrics(self.registry)

    @property
    def taken_bytes(self) -> float:
        name = "trinamo_weights_bytes_total"
        return self.registry.get_sample_value(name, {"direction": "taken"}) or 0.0

    async def add(self, path: Path, *, as_of: Path | None = None) -> Holder:
        """One more; `as_of` is the file that it says it has, if it has another by now."""
        section, env = self.config.weights, RealEnv()
        lender = Lender(section, WeightsMetrics(Registry()), env.rng, hop=inline)
        manifest = await manifest_of(as_of or path, section.chunk_bytes, inline)
        lender.add(HeldFile(path, MODEL), manifest)

        async def hold(*, task_status: trio.TaskStatus[None]) -> None:
            async with open_memory_transfer_plane(self.fabric) as plane:
                lender.open_with(*await register_window([plane], section))
                task_status.started()
                await trio.sleep_forever()

        await self.nursery.start(hold)
        holder = Holder(f"{len(self.holders) + 1:x}", lender)
        self.holders[holder.id] = holder
        for sha256, card in lender.cards(SPACE):
            await self.control.put(weights_key(sha256, holder.id), encode_weights_card(card))
        return holder

    async def client(self, _: Any) -> Any:
        """What a taker calls; this world is its `clients` and its client."""
        await trio.lowlevel.checkpoint()
        return self

    @asynccontextmanager
    async def exchange(self, ask: Ask, _: Any, *, instance_id: str) -> AsyncIterator[Exchange]:
        self.asked.append(instance_id)
        context = Context(f"{len(self.asked)}")
        holder = self.holders[instance_id]
        await trio.lowlevel.checkpoint()
        if holder.items_left == 0:
            raise ConnectError("nobody listens")
        sending, wants = trio.open_memory_channel[Want](8)
        items = holder.lender.lend(ask, context, wants)
        try:
            yield Exchange(holder, items, sending)
        finally:
            await items.aclose()

    @asynccontextmanager
    async def taker(self, faults: TransferFaults | None = None) -> AsyncIterator[Taker]:
        """One process that takes; its transfers have `faults`."""
        async with (
            open_memory_transfer_plane(self.fabric) as plane,
            open_transfer_router(
                [plane],
                metrics=TransferMetrics(Registry()),
                section=self.config.data_plane.transfer,
            ) as router,
        ):
            plane.mover.faults = faults or TransferFaults()
            clients: Any = self
            yield Taker(
                control=self.control,
                client=clients.client,
                router=router,
                config=self.config,
                metrics=self.metrics,
            )

    async def take(self, target: Path, sha256: str, faults: TransferFaults | None = None) -> None:
        """As `trinamo worker` does."""
        async with self.taker(faults) as taker, open_partial(target, sha256, inline) as partial:
            if partial is not None:
                await taker.take(MissingFile(MODEL, SPACE, sha256), partial)


@attrs.frozen
class Exchange:
    """One exchange over a wire that ends when the holder is killed."""

    holder: Holder
    items: Any
    sending: trio.MemorySendChannel[Want]

    def __aiter__(self) -> Exchange:
        return self

    async def __anext__(self) -> Item:
        left = self.holder.items_left
        if left == 0:
            raise DisconnectedError("the holder is gone")
        if left is not None:
            self.holder.items_left = left - 1
        item: Item = await self.items.__anext__()
        return self.holder.says(item)

    async def send(self, want: Want) -> None:
        with suppress(trio.BrokenResourceError):
            await self.sending.send(want)

    async def finish(self) -> None:
        await self.sending.aclose()


@asynccontextmanager
async def open_world(**weights: Any) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        yield World(configured(**weights), nursery)
        nursery.cancel_scope.cancel()


def card_of(byte_count: int) -> bytes:
    return encode_weights_card(WeightsCard(model=MODEL, byte_count=byte_count, namespace=SPACE))


def listed(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())
