"""Models appear and vanish as workers register and leave: the watch on `models/…`.

Each model's engine is a client of the endpoint its card names, so the HTTP edge neither knows nor
cares whether an answer comes from this process or across the network.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import trio

from ..client import Client
from ..context import Context
from ..errors import TrinamoError
from ..planes import ControlPlane, Delete, Put, Resync, Snapshot, WatchEvent
from ..protocol.generate import Delta, GenerateRequest, ModelCard
from ..protocol.instances import EndpointName
from ..protocol.model_cards import MODEL_PREFIX, ModelChange, ModelTable
from .models import ModelManager

__all__ = ["RoutedEngine", "watch_models"]

_log = logging.getLogger("trinamo.http")


class RoutedEngine:
    """An engine that is somewhere else: one request becomes one response stream."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer of whichever worker the router chooses."""
        async with self.client.stream(request, Delta, context=context) as deltas:
            async for delta in deltas:
                yield delta


async def watch_models(
    control: ControlPlane,
    open_client: Callable[[EndpointName], Awaitable[Client]],
    manager: ModelManager,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep `manager` equal to the published cards until cancelled.

    Started once the first snapshot is in. A card that does not decode, or contradicts another, is
    logged, counted and passed over; what an older value of its key said stays in force.
    """
    table = ModelTable()
    started = False
    async with control.watch(MODEL_PREFIX) as events:
        async for event in events:
            await _apply(_step(table, event), open_client, manager)
            if not started:
                started = True
                task_status.started()


def _step(table: ModelTable, event: WatchEvent) -> ModelChange:
    match event:
        case Snapshot(_, entries) | Resync(_, entries):
            return table.replace((e.key, e.value) for e in entries)
        case Put(entry):
            return table.put(entry.key, entry.value)
        case Delete(key, _):
            return table.delete(key)


async def _apply(
    change: ModelChange,
    open_client: Callable[[EndpointName], Awaitable[Client]],
    manager: ModelManager,
) -> None:
    for why in change.refused:
        _log.warning("model card refused: %s", why)
        manager.metrics().entry_refused("model")
    for card in change.removed:
        if manager.has_model_any(card.name):
            manager.remove_model(card.name)
            _log.info("model %s is gone", card.name)
    for card in change.added:
        await _add(card, open_client, manager)


async def _add(
    card: ModelCard,
    open_client: Callable[[EndpointName], Awaitable[Client]],
    manager: ModelManager,
) -> None:
    try:
        client = await open_client(EndpointName.parse(card.endpoint))
        manager.add_model(card, RoutedEngine(client))
    except TrinamoError as error:
        _log.warning("model %s cannot be offered: %s", card.name, error)
    else:
        _log.info("model %s is served by %s", card.name, card.endpoint)
