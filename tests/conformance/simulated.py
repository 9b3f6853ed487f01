"""The simulated services as backends of the conformance suites; see `tests/worlds.py`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from tests.conformance.control.backends import Link, Server
from tests.transports.nats.brokers import Broker, MemoryBrokerUnderTest
from tests.worlds import in_world, on_host
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.planes import ControlPlane, EventPlane
from trinamo.sim import Network, SeedChoices, SimEnv, World
from trinamo.sim.services import (
    SimulatedEtcd,
    SimulatedNats,
    open_simulated_etcd,
)
from trinamo.transports.nats import open_nats
from trinamo.transports.security.sealing import Sealer


class SimulatedLink:
    """The link between one client's host and the store's."""

    def __init__(self, network: Network, client: str, server: str) -> None:
        self._network, self._ends = network, (client, server)

    async def cut(self) -> None:
        self._network.cut(*self._ends)
        self._network.reset(*self._ends)

    async def mend(self) -> None:
        self._network.heal(*self._ends)


class SimulatedEtcdServer:
    """A store host that may be killed and paused."""

    def __init__(self, backend: SimulatedEtcdBackend, etcd: SimulatedEtcd) -> None:
        self._backend, self._etcd = backend, etcd

    def open_plane(self) -> AbstractAsyncContextManager[ControlPlane]:
        return self._backend.open_plane_to(self._etcd.name, timeout_s=3)

    async def kill(self) -> None:
        self._etcd.kill()

    async def restart(self) -> None:
        self._etcd.restart()

    async def freeze(self) -> None:
        self._etcd.pause()

    async def thaw(self) -> None:
        self._etcd.resume()


class SimulatedEtcdBackend:
    """Planes on hosts of their own, over one store host of the world."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(SeedChoices(seed), steps_max=20_000_000, ambient="raise")
        self.network = Network(self.world, tear_one_in=8, short_one_in=16)
        self._numbers = itertools.count(1)
        self._shared: SimulatedEtcd | None = None

    def _store(self) -> SimulatedEtcd:
        if self._shared is None:
            self._shared = SimulatedEtcd(self.world)
            self._shared.boot()
        return self._shared

    def open_plane_to(
        self, server: str, *, timeout_s: float = 5.0, client: str = ""
    ) -> AbstractAsyncContextManager[ControlPlane]:
        name = client or self.fresh_name("client")
        rng = self.world.choices.stream(name)
        return on_host(
            self.world, name, partial(open_simulated_etcd, server, rng=rng, timeout_s=timeout_s)
        )

    def fresh_name(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"

    def open_plane(self) -> AbstractAsyncContextManager[ControlPlane]:
        return self.open_plane_to(self._store().name)

    @asynccontextmanager
    async def open_linked_plane(self) -> AsyncIterator[tuple[ControlPlane, Link]]:
        server, client = self._store().name, self.fresh_name("client")
        async with self.open_plane_to(server, client=client) as plane:
            yield plane, SimulatedLink(self.network, client, server)

    @asynccontextmanager
    async def open_server(self, data_dir: Path) -> AsyncIterator[Server]:
        etcd = SimulatedEtcd(self.world, name=self.fresh_name("etcd"))
        etcd.boot()
        yield SimulatedEtcdServer(self, etcd)

    def open_unreachable(self) -> AbstractAsyncContextManager[ControlPlane]:
        return self.open_plane_to("nowhere", timeout_s=0.4)

    async def compact(self) -> None:
        self._store().compact()


class SimulatedBroker:
    """Planes on hosts of their own, over one broker host of the world."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(SeedChoices(seed), steps_max=20_000_000, ambient="raise")
        self.network = Network(self.world, tear_one_in=8, short_one_in=16)
        self.nats = SimulatedNats(self.world)
        self._numbers = itertools.count(1)
        self._is_booted = False

    def connect(self, *secrets: bytes) -> AbstractAsyncContextManager[EventPlane]:
        if not self._is_booted:
            self._is_booted = True
            self.nats.boot()
        name = f"client-{next(self._numbers)}"
        section = NatsConfig(outgoing_messages_max=64)
        env = SimEnv(self.world, name)
        sealer = Sealer(secrets, env.rng)
        opening = partial(open_nats, self.nats.url, section, env=env, sealer=sealer)
        return on_host(self.world, name, opening)

    async def stop(self) -> None:
        self.nats.kill()

    async def start(self) -> None:
        self.nats.restart()


def unreal_broker(kind: str) -> Iterator[Broker]:
    """The one in memory, or one in a world that the test runs in."""
    if kind == "memory":
        yield MemoryBrokerUnderTest()
        return
    simulated = SimulatedBroker()
    with in_world(simulated.world):
        yield simulated
