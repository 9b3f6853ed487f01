"""Store and broker of a cluster in real time: the memory ones, called and not connected to.

`world.py` plays a cluster on loopback sockets to hold the simulated network to the kernel's.
Store and broker are no part of that comparison, so they need no network there: a call takes the
link's latency each way and either arrives or raises. What this module does not do: serve the
simulator, where they are on hosts of their own (`cluster/services.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.env import Env
from trinamo.runtime.planes import ControlPlane, EventPlane
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

from ..cluster.services import BROKER, STORE, NotedStore
from ..core.world import World

if TYPE_CHECKING:
    from ..net.network import Network


class MemoryServices:
    """Both processes, and what lies between them and each host. Implements `Services`."""

    def __init__(self, world: World, network: Network) -> None:
        self.world, self.network = world, network
        self.store = NotedStore(world)
        self.store.halt()
        self.broker = MemoryBroker()
        self.broker.stop()
        self._links: dict[str, ControlFaults] = {}
        world.on_end.append(self._ended)

    def boot(self, name: str) -> None:
        """See `Services`."""
        self.world.boot(name, self._run_store if name == STORE else self._run_broker)

    async def _run_store(self) -> None:
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

    async def _run_broker(self) -> None:
        self.broker.start()
        await trio.sleep_forever()

    def _ended(self, host: Any) -> None:
        if host.name == STORE:
            self.store.halt()
        elif host.name == BROKER:
            self.broker.stop()

    def _link(self, name: str) -> ControlFaults:
        if name not in self._links:
            link = self._links[name] = ControlFaults()
            link.delay_s = self.network.link(name, STORE).latency_s
            link.reply_delay_s = self.network.link(STORE, name).latency_s
        return self._links[name]

    def cut_off(self, name: str) -> None:
        """Host `name` was killed: nothing of its present life reaches the store any more."""
        self._link(name).cut_link()
        # The next life gets a link of its own.
        del self._links[name]

    def is_reachable(self, name: str) -> bool:
        """See `Services`."""
        return self.store.is_up and self._link(name).is_link_up

    def lose_replies(self, name: str, count: int) -> None:
        """See `Services`."""
        self._link(name).lose_replies(count)

    def compact(self) -> None:
        """See `Services`."""
        self.store.compact()

    def forge(self, *, is_on: bool) -> None:
        """See `Services`. Nobody else is in this process."""

    @asynccontextmanager
    async def open_control(
        self,
        name: str,
        config: Config,  # noqa: ARG002 -- the interface's parameter
        env: Env,  # noqa: ARG002 -- as above
    ) -> AsyncIterator[ControlPlane]:
        """See `Services`."""
        await trio.lowlevel.checkpoint()
        yield MemoryControlPlane(self.store, faults=self._link(name))

    @asynccontextmanager
    async def open_events(
        self,
        name: str,  # noqa: ARG002 -- the interface's parameter
        config: Config,  # noqa: ARG002 -- as above
        env: Env,  # noqa: ARG002 -- as above
    ) -> AsyncIterator[EventPlane]:
        """See `Services`."""
        await trio.lowlevel.checkpoint()
        yield MemoryEventPlane(self.broker)
