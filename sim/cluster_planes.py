"""The planes of a simulated cluster: real TCP transports, and a store and a broker that can fail.

`StoreHost` and `BrokerHost` are processes of the world, so killing, pausing and restarting them is
what it is for any host. Each other host sees the store over a link of its own, which a cut of the
simulated network cuts too. `SimTransports` is what a host gives to `open_runtime`.

Everything the store does to a lease, and everything a watch delivers, becomes a note: the checkers
(`checks/`) compare what was promised with what was seen.

What this module does not do: put the calls to store and broker on simulated sockets; a call takes
the link's latency each way and either arrives or raises.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from typing_extensions import override

from trinamo.runtime.config import Config
from trinamo.runtime.env import Env
from trinamo.runtime.lifespan import DataPlane
from trinamo.runtime.planes import (
    ControlPlane,
    Delete,
    EventPlane,
    Lease,
    Put,
    RequestPlane,
    RequestServer,
    Resync,
    Snapshot,
    WatchEvent,
)
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.tcp import (
    TcpClient,
    TcpOptions,
    open_request_plane,
    open_request_server,
    open_stream_server,
)

from .host import HostState
from .world import World

if TYPE_CHECKING:
    from .network import Network

__all__ = ["BROKER", "STORE", "BrokerHost", "NotedStore", "SimTransports", "StoreHost", "StoreLink"]

STORE, BROKER = "store", "broker"


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


class StoreHost:
    """The process that holds the store: while it does not run, nothing answers or expires."""

    def __init__(self, world: World, network: Network) -> None:
        self.world, self.network = world, network
        self.store = NotedStore(world)
        self.store.halt()
        self._links: dict[str, StoreLink] = {}
        world.on_end.append(self._ended)

    async def run(self) -> None:
        """Expire leases when they are due, until killed."""
        self.store.restart(now=trio.current_time())
        changed = trio.Event()

        def wake() -> None:
            changed.set()

        with self.store.observe(wake):
            while True:
                changed = trio.Event()
                with trio.move_on_at(self.store.next_expiry):
                    await changed.wait()
                if self.store.is_up:
                    self.store.expire(trio.current_time())

    def _ended(self, host: Any) -> None:
        if host.name == STORE:
            self.store.halt()

    def link(self, name: str) -> StoreLink:
        """What lies between host `name` and the store."""
        if name not in self._links:
            self._links[name] = StoreLink(self.network, name)
        return self._links[name]

    def links_changed(self) -> None:
        """The network was cut or healed somewhere, or the store stopped or went on."""
        is_paused = self.world.host(STORE).state is HostState.PAUSED
        for link in self._links.values():
            link.follow(is_paused=is_paused)


class StoreLink(ControlFaults):
    """The way to the store from one host: as long, and as broken, as the simulated network's."""

    def __init__(self, network: Network, name: str) -> None:
        super().__init__()
        self._network, self._name = network, name
        self.delay_s = network.link(name, STORE).latency_s
        self.reply_delay_s = network.link(STORE, name).latency_s

    def follow(self, *, is_paused: bool) -> None:
        """Be cut or mended as the network's link is, in either direction."""
        out, back = self._network.link(self._name, STORE), self._network.link(STORE, self._name)
        if out.is_cut or back.is_cut or is_paused:
            self.cut_link()
        else:
            self.mend_link()


class BrokerHost:
    """The process that routes messages: while it does not run, publishers buffer."""

    def __init__(self, world: World) -> None:
        self.broker = MemoryBroker()
        self.broker.stop()
        world.on_end.append(self._ended)

    async def run(self) -> None:
        """Route until killed."""
        self.broker.start()
        await trio.sleep_forever()

    def _ended(self, host: Any) -> None:
        if host.name == BROKER:
            self.broker.stop()


class _NotedControlPlane(MemoryControlPlane):
    """One host's control plane; what its watches deliver is noted."""

    def __init__(self, store: MemoryStore, link: StoreLink, env: Env, name: str) -> None:
        super().__init__(store, faults=link)
        self._env, self._name = env, name
        self._watches = 0
        self.views: list[WatchView] = []
        """What each open watch has told its reader so far."""

    @override
    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        self._watches += 1
        view = WatchView(f"{self._name}#{self._watches}", prefix)
        self.views.append(view)
        try:
            async with super().watch(prefix) as events:
                yield self._noted(view, events)
        finally:
            self.views.remove(view)

    async def _noted(
        self, view: WatchView, events: AsyncIterator[WatchEvent]
    ) -> AsyncIterator[WatchEvent]:
        async for event in events:
            # Told in order, and as late as a message on this link is.
            await trio.sleep(self.faults.reply_delay_s)
            view.take(event)
            self._env.note(
                "watch.event",
                watch=view.name,
                prefix=view.prefix,
                what=type(event).__name__,
                revision=revision_of(event),
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


def revision_of(event: WatchEvent) -> int:
    """The store revision an event speaks of."""
    return event.entry.mod_revision if isinstance(event, Put) else event.revision


class SimTransports:
    """The planes of one host, as `open_runtime` asks for them.

    Implements `runtime.lifespan.Transports`. After `open_data` the TCP ends are in `home`, `calls`,
    `requests` and `server`, for whoever takes a census.
    """

    def __init__(self, name: str, store: StoreHost, broker: BrokerHost) -> None:
        self.name = name
        self.home: Any = None
        self.calls: TcpClient | None = None
        self.requests: Any = None
        self.server: Any = None
        self.control: _NotedControlPlane | None = None
        self._store, self._broker = store, broker

    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:  # noqa: ARG002 -- the interface's parameter
        """The store, over this host's link."""
        await trio.lowlevel.checkpoint()
        link = self._store.link(self.name)
        self.control = _NotedControlPlane(self._store.store, link, env, self.name)
        yield self.control

    @asynccontextmanager
    async def open_events(self, config: Config, env: Env) -> AsyncIterator[EventPlane]:  # noqa: ARG002 -- as above
        """The broker."""
        await trio.lowlevel.checkpoint()
        yield MemoryEventPlane(self._broker.broker)

    @asynccontextmanager
    async def open_data(
        self, config: Config, env: Env, events: EventPlane, *, serving: str | None
    ) -> AsyncIterator[DataPlane]:
        """The TCP planes, unmodified, on simulated sockets."""
        options = self._tcp_options(config)
        async with AsyncExitStack() as stack:
            self.home = await stack.enter_async_context(open_stream_server(options, env))
            self.requests = await stack.enter_async_context(open_request_plane(options))
            planes: dict[str, RequestPlane] = {self.requests.transport: self.requests}
            servers: list[RequestServer] = []
            if serving:
                self.server = await stack.enter_async_context(open_request_server(options))
                servers.append(self.server)
            if config.data_plane.requests == "nats":
                # nats-py brings asyncio along, which most worlds never need.
                from trinamo.transports.nats import (  # noqa: PLC0415
                    NatsRequestPlane,
                    NatsRequestServer,
                )

                nats = NatsRequestPlane(events, ack_timeout_s=config.data_plane.tcp.ack_timeout_s)
                planes = {nats.transport: nats, **planes}
                if serving:
                    servers.append(NatsRequestServer(events, f"trinamo.requests.{serving}"))
            self.calls = TcpClient(options)
            yield DataPlane(
                request_planes=planes,
                request_servers=servers,
                response_plane=self.home,
                call_home=self.calls,
            )

    def _tcp_options(self, config: Config) -> TcpOptions:
        section = config.data_plane.tcp
        values: dict[str, Any] = {n: getattr(section, n) for n in section.__struct_fields__}
        values |= {"host": "0.0.0.0", "port": 0, "advertise_host": self.name}  # noqa: S104 -- simulated
        return TcpOptions(**values)
