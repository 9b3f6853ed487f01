"""The adapters of simulated hosts, and the links that they move blocks over.

A `MemoryFabric` is the adapters of all hosts. They move blocks by themselves, as events of the world
over the network's links: a paused process at the other end does not stop a transfer, a killed one
fails it, a cut link or a machine that is off leaves it hanging until the adapter gives up after
`give_up_s`. What a transfer is made of is in `transfer.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from trinamo.runtime.env import Env
from trinamo.runtime.errors import DisconnectedError, StaleMemoryError
from trinamo.runtime.protocol.transfer.description import MemoryDescription, draw_incarnation
from trinamo.transports.one_sided.region import HostRegion

from ...core.host import HostState, current_host_name
from ...core.world import World
from ...net.network import Network


class Adapter:
    """What the fabric knows of one process: whether it lives, and the memory it has registered."""

    backend = "simulated"

    def __init__(self, fabric: MemoryFabric, env: Env, incarnation: str = "") -> None:
        self.fabric = fabric
        self.host = fabric.world.host(current_host_name())
        self.incarnation = incarnation or draw_incarnation(env.rng)
        self.regions: dict[int, HostRegion] = {}
        self._generation = self.host.generation
        fabric.adapters[self.incarnation] = self

    @property
    def is_alive(self) -> bool:
        """Whether its process still is; paused is alive, for its memory."""
        is_running = self.host.state in (HostState.UP, HostState.PAUSED)
        return self.host.generation == self._generation and (is_running or self._generation == 0)


class MemoryFabric:
    """The adapters of a world's hosts.

    Args:
        network: Whose links the blocks take; a cut there cuts them off too.
        window: How many blocks of one transfer are on the way at once.
        give_up_s: How long an adapter repeats what is not answered.
        is_fenced: Whether the owner's side checks generation and ticket of every block.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        *,
        window: int = 4,
        give_up_s: float = 4.0,
        is_fenced: bool = True,
    ) -> None:
        self.world, self.network = world, network
        self.window, self.give_up_s = window, give_up_s
        self.is_fenced = is_fenced
        self.adapters: dict[str, Adapter] = {}

    def carry(
        self,
        source: str,
        destination: str,
        size: int,
        arrive: Callable[[], None],
        give_up: Callable[[], None],
        *,
        by: str = "",
        started_s: float | None = None,
    ) -> None:
        """Bring `size` bytes over; call `arrive` when they are there, or `give_up` in the end.

        `by` is the host that started it all.
        """
        world, links = self.world, self.network.links
        began_s = world.current_time() if started_s is None else started_s
        delay_s = links.delay_s(source, destination, size=size, has_jitter=False)
        is_lost = links.loses(source, destination) or not links.passes(source, destination)

        def land() -> None:
            if links.passes(source, destination) and not is_lost:
                arrive()
            elif world.current_time() - began_s >= self.give_up_s:
                give_up()
            else:
                # The adapter repeats what was not acknowledged.
                world.after(
                    self.give_up_s / 16,
                    lambda: self.carry(
                        source, destination, size, arrive, give_up, by=by, started_s=began_s
                    ),
                )

        world.after(delay_s, land)

    def find(self, described: MemoryDescription) -> HostRegion:
        """The memory that was described.

        `DisconnectedError` if its process is no more, `StaleMemoryError` if it is not registered.
        """
        adapter = self.adapters.get(described.incarnation)
        if adapter is None or not adapter.is_alive:
            raise DisconnectedError(f"the process of {described.incarnation} is gone")
        region = adapter.regions.get(described.region)
        if region is None:
            raise StaleMemoryError(f"there is no region {described.region}")
        return region
