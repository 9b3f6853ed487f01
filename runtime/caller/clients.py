"""The clients of one process, one per endpoint: opened once, shared, closed when nobody holds them.

Each runs as a task of its own, with its router's watch, its connections and what it knows of loads
and blocks, so it can be closed without touching the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import trio
from msgspec.structs import replace

from ..config.config import Config
from ..config.router import RouterConfig
from ..env import Env
from ..kv.events import share_names
from ..metrics.metrics import Metrics
from ..nurseries import open_nursery
from ..planes import ControlPlane, EventPlane
from ..planes.transports import DataPlane
from ..protocol.discovery.candidates import Policy
from ..protocol.discovery.instances import EndpointName
from ..traces.ring import Traces
from .client import Client
from .kv.routing import KvRouting, showing
from .router import Router
from .upstreams import UpstreamClient

_Opened = tuple[Client, trio.CancelScope]


@attrs.define(eq=False)
class _Slot:
    """One endpoint: its client once it is open, and how many hold it or wait for it."""

    chooses: bool | None
    """None: as `router.policy` says."""
    opening: trio.Lock = attrs.field(factory=trio.Lock)
    holders: int = 0
    client: Client | None = None
    scope: trio.CancelScope | None = None
    """Of its task."""


class Clients:
    """Opens clients into `nursery`, which owns them."""

    def __init__(
        self,
        config: Config,
        env: Env,
        control: ControlPlane,
        events: EventPlane,
        data: DataPlane,
        *,
        metrics: Metrics,
        traces: Traces,
        nursery: trio.Nursery,
    ) -> None:
        self._config = config
        self._found = config
        """What is in force."""
        self._env = env
        self._control = control
        self._events = events
        self._data = data
        self._metrics = metrics
        self._traces = traces
        self._nursery = nursery
        self._slots: dict[str, _Slot] = {}

    def tune(self, found: Config) -> None:
        """Choose as `found` says from now on, in the clients that are open and in new ones."""
        self._found = found
        for slot in self._slots.values():
            self._tune(slot)

    def _tune(self, slot: _Slot) -> None:
        if slot.client is not None:
            slot.client.tune(self._section(slot))
            if self._follows_load(slot):
                slot.client.router.follow_load()

    def _section(self, slot: _Slot) -> RouterConfig:
        section = self._found.router
        if slot.chooses is False:
            return replace(section, policy=Policy.DIRECT.value)
        if slot.chooses and section.policy == Policy.DIRECT.value:
            return replace(section, policy=Policy.ROUND_ROBIN.value)
        return section

    def _follows_load(self, slot: _Slot) -> bool:
        return slot.chooses is not False and self._found.http.sheds_load

    def __iter__(self) -> Iterator[Client]:
        """Those that are open, in the order in which they were asked for."""
        return (slot.client for slot in self._slots.values() if slot.client is not None)

    async def hold(self, endpoint: EndpointName, *, chooses: bool | None = None) -> Client:
        """The client of an endpoint, held once more; returns once it is open.

        One that does not choose, as who held it first says, learns nothing that would help with that;
        one that does takes turns where `router.policy` is `direct`.
        Who comes second waits for the first, and opens it himself if that one is cancelled or
        fails. Cancelled, it leaves nothing that others do not hold.
        """
        slot = self._slots.setdefault(str(endpoint), _Slot(chooses))
        slot.holders += 1
        try:
            async with slot.opening:
                if slot.client is None:
                    before = self._found
                    opened: _Opened = await self._nursery.start(self._run, endpoint, slot)
                    slot.client, slot.scope = opened
                    if self._found is not before:
                        # Changed while it was being opened, when nobody could tell it.
                        self._tune(slot)
            return slot.client
        except BaseException:
            self._let_go(str(endpoint), slot)
            raise

    def release(self, client: Client) -> None:
        """Hold it no more; the last one to do so closes it. Synchronous.

        It closes at once: requests under way go on, but nobody watches over their instances.
        """
        key = str(client.router.endpoint)
        slot = self._slots.get(key)
        if slot is None or slot.client is not client:
            raise ValueError(f"the client of {key} is not held")
        self._let_go(key, slot)

    def _let_go(self, key: str, slot: _Slot) -> None:
        slot.holders -= 1
        if not slot.holders:
            del self._slots[key]
            if slot.scope is not None:
                slot.scope.cancel()

    async def _run(
        self,
        endpoint: EndpointName,
        slot: _Slot,
        *,
        task_status: trio.TaskStatus[_Opened],
    ) -> None:
        """Open a client, and run what it needs until the scope that comes with it is cancelled."""
        config = self._section(slot)
        kv: KvRouting | None = None
        if slot.chooses is not False and Policy(self._config.router.policy) is Policy.KV:
            env, secret = self._env, self._data.secret
            names = await share_names(self._control, env, secret, endpoint.namespace)
            kv = KvRouting(self._events, endpoint, config.kv, env.rng, names)
        data = self._data
        asks_workers = data.response_plane is not None
        router = Router(
            self._control,
            endpoint,
            self._env,
            policy=Policy(config.policy),
            inhibit_s=config.inhibit_s,
            errors_max=config.errors_max,
            silence_grace_s=config.silence_grace_s,
            stale_grace_s=config.stale_grace_s,
            metrics=self._metrics,
            request_planes=data.request_planes if asks_workers else None,
            events=self._events if asks_workers else None,
            follows_load=self._follows_load(slot),
            kv=kv,
            wait_s=config.wait_s,
        )
        client = (
            Client(
                router,
                data.response_plane,
                self._env,
                attempts_max=config.attempts_max,
                opening_timeout_s=self._config.data_plane.tcp.ack_timeout_s,
                traces=self._traces,
            )
            if asks_workers
            else UpstreamClient(router, data.upstreams, self._env, attempts_max=config.attempts_max)
        )
        with showing(self._metrics, str(endpoint), kv):
            async with open_nursery() as nursery:
                if kv is not None:
                    await nursery.start(kv.run)
                await nursery.start(router.run)
                nursery.start_soon(client.run)
                task_status.started((client, nursery.cancel_scope))
