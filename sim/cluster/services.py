"""Store and broker of a simulated cluster, and how each host reaches them.

`NetworkServices` puts the simulated servers of `services/` under the cluster: two hosts, reached over
simulated TCP, so cuts, resets, frozen and killed servers, latency and torn reads harm the control and
the event plane as they harm everything else. `conformance/services.py` has them in real time.

Everything the store does to a lease, and everything a watch delivers, becomes a note: the checkers
(`checks/`) compare what was promised with what was seen.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from trinamo.runtime.config.config import Config
from trinamo.runtime.env import Env
from trinamo.runtime.errors import ConnectError
from trinamo.runtime.planes import (
    ControlPlane,
    Delete,
    EventPlane,
    Lease,
    Put,
    Resync,
    Snapshot,
    WatchEvent,
)
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.nats import open_nats

from ..core.host import HostState
from ..core.world import World
from ..services import SimulatedEtcd, SimulatedNats, open_simulated_etcd
from ..services.etcd.server import WRITES
from .memory import sealer_of

if TYPE_CHECKING:
    from ..net.network import Network


STORE: Final = "store"
BROKER: Final = "broker"


class NotedStore(MemoryStore):
    """A store that notes what becomes of every lease and of every key under one."""

    def __init__(self, world: World, **bounds: int) -> None:
        super().__init__(**bounds)
        self._world = world

    @override
    def grant_lease(self, ttl_s: float, *, now: float) -> Lease:
        lease = super().grant_lease(ttl_s, now=now)
        self._world.note("store.grant", lease=lease.id, ttl_s=lease.ttl_s)
        return lease

    @override
    def keep_alive(self, lease_id: int, *, now: float) -> float:
        remaining_s = super().keep_alive(lease_id, now=now)
        self._world.note("store.renew", lease=lease_id)
        return remaining_s

    @override
    def revoke_lease(self, lease_id: int, *, now: float) -> None:
        super().revoke_lease(lease_id, now=now)
        self._world.note("store.revoke", lease=lease_id)

    @override
    def expire(self, now: float) -> None:
        before = set(self._leases)
        super().expire(now)
        for lease_id in sorted(before - set(self._leases)):
            self._world.note("store.expire", lease=lease_id)

    @override
    def restart(self, *, now: float) -> None:
        self._world.note("store.restart", leases=sorted(self._leases))
        super().restart(now=now)

    @override
    def load(self, backup: MemoryStore) -> None:
        super().load(backup)
        self._world.note("store.load", leases=sorted(self._leases))

    def holders(self) -> dict[str, int]:
        """The keys now, and the lease of each; what is due and not removed yet included."""
        return {key: entry.lease_id for key, entry in sorted(self._entries.items())}

    def live_leases(self) -> list[int]:
        """The leases now, without looking at the clock."""
        return sorted(self._leases)

    def values(self, prefix: str) -> dict[str, tuple[int, bytes]]:
        """The entries under `prefix` now: modification revision and value."""
        return {
            key: (entry.mod_revision, entry.value)
            for key, entry in sorted(self._entries.items())
            if key.startswith(prefix)
        }


class NetworkServices:
    """The simulated servers on hosts `store` and `broker`."""

    def __init__(self, world: World, network: Network) -> None:
        self.world, self.network = world, network
        self.etcd = SimulatedEtcd(world, name=STORE, new_store=lambda: NotedStore(world))
        self.nats = SimulatedNats(world, name=BROKER)

    @property
    def store(self) -> NotedStore:
        """The store's data now."""
        store = self.etcd.store
        assert isinstance(store, NotedStore)
        return store

    def boot(self, name: str) -> None:
        """Start the process of `STORE` or `BROKER`; what was on the disk is there again."""
        if name == STORE:
            self.etcd.boot()
        else:
            self.nats.boot()

    def is_reachable(self, name: str, server: str = STORE) -> bool:
        """Whether the server runs, and messages pass between it and host `name`, both ways."""
        there, back = self.network.link(name, server), self.network.link(server, name)
        is_up = self.world.host(server).state is HostState.UP
        return is_up and not (there.is_cut or back.is_cut)

    def lose_replies(self, name: str, count: int) -> None:
        """The next `count` writes of host `name` take effect, and it is not told."""
        self.etcd.interceptor.lose_replies(count, WRITES, to=name)

    def open_control(self, config: Config, env: Env) -> AbstractAsyncContextManager[ControlPlane]:
        """The control plane of the running task's host; waits for nobody."""
        section = config.control_plane.etcd
        return open_simulated_etcd(
            STORE,
            rng=env.rng,
            timeout_s=section.request_timeout_s,
            per_try_timeout_s=section.attempt_timeout_s,
            silence_s=section.silence_s,
        )

    @asynccontextmanager
    async def open_events(self, config: Config, env: Env) -> AsyncIterator[EventPlane]:
        """The event plane of the running task's host. A broker that is away is waited for.

        A real process ends then and is started again by whoever supervises it, with the same effect.
        """
        async with AsyncExitStack() as stack:
            plane: EventPlane | None = None
            while plane is None:
                opening = open_nats(
                    self.nats.url, config.event_plane.nats, env=env, sealer=sealer_of(config, env)
                )
                try:
                    plane = await stack.enter_async_context(opening)
                except ConnectError:
                    env.note("broker.away")
            yield plane


class NotedControlPlane:
    """The control plane of one process: what its watches deliver is noted; everything else is the plane's."""

    def __init__(self, plane: ControlPlane, env: Env, name: str) -> None:
        self._plane, self._env, self._name = plane, env, name
        self._watches = 0
        self.views: list[WatchView] = []
        """What each open watch has told its reader so far."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """See `ControlPlane.watch`."""
        self._watches += 1
        view = WatchView(f"{self._name}#{self._watches}", prefix)
        self.views.append(view)
        try:
            async with (
                self._plane.watch(prefix) as events,
                aclosing(self._noted(view, events)) as noted,
            ):
                yield noted
        finally:
            self.views.remove(view)

    async def _noted(
        self, view: WatchView, events: AsyncIterator[WatchEvent]
    ) -> AsyncGenerator[WatchEvent, None]:
        async for event in events:
            view.take(event)
            self._env.note(
                "watch.event",
                watch=view.name,
                prefix=view.prefix,
                what=type(event).__name__,
                revision=event.entry.mod_revision if isinstance(event, Put) else event.revision,
            )
            yield event


class WatchView:
    """What somebody who believed every event of one watch would believe now."""

    def __init__(self, name: str, prefix: str) -> None:
        self.name, self.prefix = name, prefix
        self.known: dict[str, tuple[int, bytes]] = {}

    def take(self, event: WatchEvent) -> None:
        """Apply one event as any reader would."""
        match event:
            case Snapshot(_, entries) | Resync(_, entries):
                self.known = {e.key: (e.mod_revision, e.value) for e in entries}
            case Put(entry):
                self.known[entry.key] = (entry.mod_revision, entry.value)
            case Delete(key, _):
                self.known.pop(key, None)
