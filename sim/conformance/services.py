"""Store and broker of a cluster in real time: the simulated store on loopback, and a broker in memory.

The broker is called and not connected to, as nats-py dials by itself, past the sockets of a host; it is
no part of what is compared. What this module does not do: serve the simulator (`cluster/services.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from typing_extensions import override

from trinamo.runtime.config.config import Config
from trinamo.runtime.env import Env
from trinamo.runtime.planes import EventPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

from ..cluster.services import BROKER, NetworkServices
from ..core.host import Host
from ..core.world import World
from ..net.network import Network


class LoopbackServices(NetworkServices):
    """Both processes. The broker's life is its host's."""

    def __init__(self, world: World, network: Network) -> None:
        super().__init__(world, network)
        self.broker = MemoryBroker()
        self.broker.stop()
        world.on_end.append(self._ended)

    @override
    def boot(self, name: str) -> None:
        if name == BROKER:
            self.world.boot(name, self._run_broker)
        else:
            super().boot(name)

    async def _run_broker(self) -> None:
        self.broker.start()
        await trio.sleep_forever()

    def _ended(self, host: Host) -> None:
        if host.name == BROKER:
            self.broker.stop()

    @override
    @asynccontextmanager
    async def open_events(self, config: Config, env: Env) -> AsyncIterator[EventPlane]:
        del config, env
        await trio.lowlevel.checkpoint()
        yield MemoryEventPlane(self.broker)
