"""Models appear and vanish as workers register and leave: the watch on `models/…`.

Each model's engine is a client of the endpoint its card names, so the HTTP edge neither knows nor
cares whether an answer comes from this process or across the network.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import attrs
import trio

from ...caller.client import Client
from ...caller.migration import MigrationPolicy, MigrationSeries
from ...errors import TrinamoError
from ...metrics.metrics import entries_refused
from ...nurseries import open_nursery
from ...planes import ControlPlane, Delete, Put, Resync, Snapshot, WatchEvent
from ...planes.retries import Retries
from ...protocol.discovery.instances import EndpointName
from ...protocol.discovery.model_cards import MODEL_PREFIX, ModelChange, ModelTable
from ...protocol.openai.generate import ModelCard
from ...protocol.undecodable import UNSIGNED_REMEDY
from .models import ModelManager, RoutedEngine

_log = logging.getLogger("trinamo.http")
_UNUSED_S: Final = 60.0
AWAY_S: Final = 1800.0
"""So long requests wait for a model whose workers are all gone, while another is served: no restart
of a pool takes longer, and what was taken out of service is asked for no more by then."""
C = TypeVar("C", bound=Client)


class ClientSource(Protocol[C]):
    """Opens clients and takes them back: a `Runtime`."""

    async def client(self, endpoint: EndpointName) -> C:
        """The client of an endpoint, to be released once."""
        ...

    def release(self, client: C) -> None:
        """Undo one call of `client`."""
        ...


async def watch_models(
    control: ControlPlane,
    clients: ClientSource[Any],
    manager: ModelManager,
    migration: MigrationPolicy | None = None,
    away_s: float = AWAY_S,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep `manager` equal to the published cards until cancelled.

    Started once the first snapshot is in, or refused: then it is asked for again and again. A card
    that does not decode, or contradicts another, is logged, counted and passed over; what an older
    value of its key said stays in force. A card that is deleted while its worker stays is kept
    until the worker goes, or says that it will, and for `router.stale_grace_s` at most. The client
    of an endpoint that no card names and that has no instance is released after a minute or so. A
    model that nobody serves any more is remembered for `away_s`.
    """
    async with open_nursery() as nursery:
        policy = migration or MigrationPolicy(series=MigrationSeries(manager.metrics.now))
        watch = _ModelWatch(clients, manager, nursery, policy, away_s)
        nursery.start_soon(watch.end_kept_cards)
        nursery.start_soon(watch.release_unused)

        async def follow(begun: Callable[[], None]) -> None:
            async with control.watch(MODEL_PREFIX) as events:
                async for event in events:
                    await watch.take(event)
                    begun()

        await Retries(_log, "models are not followed").run(follow, task_status=task_status)


@attrs.define(eq=False)
class _Followed:
    """An endpoint that some card names, or named a while ago."""

    client: Client
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    unused_at: float = math.inf
    """Since when no card names it and no instance is there; infinite while it is used."""


@attrs.define(eq=False)
class _ModelWatch:
    """The cards, and the routers that know whether those who published them are still there."""

    _clients: ClientSource[Any]
    _manager: ModelManager
    _nursery: trio.Nursery
    _migration: MigrationPolicy
    _away_s: float
    _table: ModelTable = attrs.field(init=False)
    _followed: dict[str, _Followed] = attrs.field(factory=dict)
    # Opening a client waits; the next change must find this one done.
    _turn: trio.Lock = attrs.field(factory=trio.Lock)
    _keeps: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self._table = ModelTable(self._removal_grace_s)

    def _removal_grace_s(self, endpoint: str, instance_id: str) -> float:
        followed = self._followed.get(endpoint)
        return 0.0 if followed is None else followed.client.router.removal_grace_s(instance_id)

    async def take(self, event: WatchEvent) -> None:
        async with self._turn:
            await self._apply(self._step(event))
        if self._table.review_at < math.inf:
            self._keeps.set()

    def _step(self, event: WatchEvent) -> ModelChange:
        now = trio.current_time()
        match event:
            case Snapshot(_, entries) | Resync(_, entries):
                return self._table.replace(((e.key, e.value) for e in entries), now)
            case Put(entry):
                return self._table.put(entry.key, entry.value)
            case Delete(key, _):
                return self._table.delete(key, now)

    async def _follow(self, followed: _Followed) -> None:
        """A worker that goes takes its cards along, whichever of the two watches tells first."""
        seen = -1
        with followed.scope:
            while True:
                seen = await followed.client.router.wait_change(seen)
                await self._review()

    async def release_unused(self) -> None:
        """Endpoints that are gone must not be watched for as long as the process lives."""
        while True:
            await trio.sleep(_UNUSED_S / 2)
            async with self._turn:
                now = trio.current_time()
                named = {card.endpoint for card in self._table.models.values()}
                for endpoint, followed in list(self._followed.items()):
                    router = followed.client.router
                    in_use = router.instance_count or router.in_flight or router.seeking_count
                    # The series that say that an instance is lost must not end with the last one.
                    in_use = in_use or any(router.gone())
                    if endpoint in named or in_use:
                        followed.unused_at = math.inf
                    elif now - followed.unused_at >= _UNUSED_S:
                        del self._followed[endpoint]
                        followed.scope.cancel()
                        self._clients.release(followed.client)
                        _log.info("endpoint %s is gone", endpoint)
                    else:
                        followed.unused_at = min(followed.unused_at, now)

    async def end_kept_cards(self) -> None:
        """Cards whose worker is there but does not publish them any more end with their time."""
        while True:
            await self._keeps.wait()
            self._keeps = trio.Event()
            while (due := self._table.review_at) < math.inf:
                await trio.sleep_until(due)
                await self._review()

    async def _review(self) -> None:
        async with self._turn:
            await self._apply(self._table.review(trio.current_time()))

    async def _apply(self, change: ModelChange) -> None:
        manager = self._manager
        for why in change.refused:
            # What no member has signed is told once for each key, where it is read.
            level = logging.DEBUG if UNSIGNED_REMEDY in why else logging.WARNING
            _log.log(level, "model card refused: %s", why)
            entries_refused(manager.metrics).tally("model").value += 1
        for card in (*change.added, *change.updated):
            await self._offer(card)
        for card in change.removed:
            if manager.has_model_any(card.name):
                manager.retire_model(card.name, self._away_s)
                _log.info("model %s is gone", card.name)
        manager.set_aliases(self._table.aliases.models)

    async def _offer(self, card: ModelCard) -> None:
        """Add or update one model; one that cannot be offered does not keep others from it."""
        manager = self._manager
        try:
            followed = self._followed.get(card.endpoint)
            if followed is None:
                client = await self._clients.client(EndpointName.parse(card.endpoint))
                followed = self._followed[card.endpoint] = _Followed(client)
                self._nursery.start_soon(self._follow, followed)
            engine = RoutedEngine(followed.client, self._table, card, self._migration)
            if manager.has_model_any(card.name):
                manager.update_model(card, engine)
            else:
                manager.add_model(card, engine)
        except TrinamoError as error:
            _log.warning("model %s cannot be offered: %s", card.name, error)
        except Exception:  # noqa: BLE001 -- one card must not take the others along
            _log.exception("model %s cannot be offered", card.name)
        else:
            _log.info("model %s is served by %s", card.name, card.endpoint)
