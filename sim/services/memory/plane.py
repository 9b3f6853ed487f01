"""One-sided memory between simulated hosts: `TransferPlane` as RDMA would do it (NIXL-like).

A `MemoryFabric` is the adapters of all hosts. They move blocks by themselves, as events of the world
over the network's links: a paused process at the other end does not stop a transfer, a killed one
fails it, a cut link or a machine that is off leaves it hanging until the adapter gives up after
`give_up_s`. Up to `window` blocks are on the way at once, and what is on the way lands, also after
an abort, a deadline or the death of the process that started it: only then is the transfer
settled. Blocks arrive in order, so a failed transfer has moved some and not others.

With `is_fenced` every block is checked against the owner's access table when it lands, as the tcp
backend does. Without, as with RDMA, the table is read from afar before and after every `window`
blocks: what was withdrawn in between is not confirmed, but it lands, and whoever has used the
blocks again is found out.

What this module does not do: corrupt or verify bytes, or move memory of devices.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio
from typing_extensions import Buffer

from trinamo.runtime.env import Env
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    KilledError,
    RequestError,
    StaleMemoryError,
)
from trinamo.runtime.planes import (
    DeviceMemory,
    MemoryRegion,
    RemoteMemory,
)
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    MemoryDescription,
    decode_description,
)
from trinamo.transports.one_sided.region import HostRegion, whole_blocks
from trinamo.transports.one_sided.state import plan_transfer

from ...core.host import HostState, current_host_name
from ...core.world import World
from ...net.network import Network
from .transfer import SimulatedTransfer, end_all

__all__ = ["MemoryFabric", "SimulatedMemoryPlane", "open_simulated_memory"]

BACKEND: Final = "simulated"
CLOSE_TIMEOUT_S: Final = 10.0


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
        self.planes: dict[str, SimulatedMemoryPlane] = {}

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

    def find(self, described: MemoryDescription) -> SimulatedMemoryPlane:
        """The plane that owns the memory; `DisconnectedError` if its process is no more."""
        plane = self.planes.get(described.incarnation)
        if plane is None or not plane.is_alive:
            raise DisconnectedError(f"the process of {described.incarnation} is gone")
        return plane


@attrs.frozen
class _Remote:
    """A peer's region. Implements `RemoteMemory`."""

    description: MemoryDescription


class SimulatedMemoryPlane:
    """One process's adapter. Implements `TransferPlane`; made by `open_simulated_memory`."""

    def __init__(self, fabric: MemoryFabric, env: Env) -> None:
        self.backend: Final = BACKEND
        self.fabric = fabric
        self.host = fabric.world.host(current_host_name())
        self.incarnation = f"{env.rng.getrandbits(64):016x}"
        self._generation = self.host.generation
        self._regions: dict[int, HostRegion] = {}
        self._numbers = 0
        self._transfers: list[SimulatedTransfer] = []
        fabric.planes[self.incarnation] = self

    @property
    def is_alive(self) -> bool:
        """Whether its process still is; paused is alive, for its memory."""
        is_running = self.host.state in (HostState.UP, HostState.PAUSED)
        return self.host.generation == self._generation and (is_running or self._generation == 0)

    # --- memory ------------------------------------------------------------------------------------

    async def register(
        self,
        memory: Buffer | DeviceMemory,
        *,
        block_bytes: int,
        fingerprint: str = "",
        needs_ticket: bool = False,
    ) -> HostRegion:
        """See `TransferPlane.register`."""
        await trio.lowlevel.checkpoint()
        if isinstance(memory, DeviceMemory):
            raise RequestError("simulated memory is of the process, not of a device")
        view = whole_blocks(memory, block_bytes)
        self._numbers += 1
        description = MemoryDescription(
            backend=self.backend,
            incarnation=self.incarnation,
            region=self._numbers,
            generation=1,
            fingerprint=fingerprint,
            base=0,
            length=view.nbytes,
            block_bytes=block_bytes,
            address=self.host.name.encode(),
        )
        region = HostRegion(
            view, description, needs_ticket=needs_ticket, is_fenced=self.fabric.is_fenced
        )
        self._regions[self._numbers] = region
        return region

    async def deregister(self, region: MemoryRegion) -> None:
        """See `TransferPlane.deregister`."""
        await trio.lowlevel.checkpoint()
        known = self._regions.pop(region.description.region, None)
        if known is None:
            return
        known.withdraw()
        ours = [transfer for transfer in self._transfers if transfer.plan.local is known]
        await end_all(ours, StaleMemoryError("the region was deregistered"))

    def region(self, number: int) -> HostRegion:
        """A region that peers may reach; `StaleMemoryError` if it is not registered."""
        found = self._regions.get(number)
        if found is None:
            raise StaleMemoryError(f"there is no region {number}")
        return found

    # --- peers -------------------------------------------------------------------------------------

    async def connect(self, description: bytes) -> _Remote:
        """See `TransferPlane.connect`. Takes a round trip, or `give_up_s` if nobody answers."""
        described = decode_description(description, backend=self.backend)
        await self._greet(described)
        return _Remote(described)

    async def probe(self, remote: RemoteMemory) -> None:
        """See `TransferPlane.probe`."""
        await self._greet(remote.description)

    async def forget(self, incarnation: str) -> None:
        """See `TransferPlane.forget`."""
        await trio.lowlevel.checkpoint()
        theirs = [t for t in self._transfers if t.plan.remote.incarnation == incarnation]
        await end_all(theirs, DisconnectedError(f"peer {incarnation} was forgotten"))

    async def _greet(self, described: MemoryDescription) -> None:
        there, here = described.address.decode(errors="replace"), self.host.name
        if not self.fabric.world.knows(there):
            raise ConnectError(f"no host is called {there!r}")
        answered = trio.Event()
        living: list[str] = []

        def ask() -> None:
            living.extend(
                name
                for name, plane in self.fabric.planes.items()
                if plane.host.name == there and plane.is_alive
            )
            self.fabric.carry(there, here, 0, answered.set, answered.set, by=here)

        self.fabric.carry(here, there, 0, ask, answered.set, by=here)
        await answered.wait()
        if not living:
            raise ConnectError(f"{there} does not answer")
        if described.incarnation not in living:
            raise StaleMemoryError(f"{there} is not {described.incarnation} any more")

    # --- transfers -----------------------------------------------------------------------------

    def start(
        self,
        direction: Direction,
        local: MemoryRegion,
        local_blocks: Sequence[int],
        remote: RemoteMemory,
        remote_blocks: Sequence[int],
        *,
        deadline_s: float,
        notify: bytes | None = None,
        ticket: int = 0,
    ) -> SimulatedTransfer:
        """See `TransferPlane.start`."""
        assert isinstance(local, HostRegion), "memory of another plane"
        plan = plan_transfer(
            direction,
            local,
            local_blocks,
            remote.description,
            remote_blocks,
            deadline_s=deadline_s,
            notify=notify,
            ticket=ticket,
        )
        transfer = SimulatedTransfer(self, plan, self._transfers.remove)
        self._transfers.append(transfer)
        transfer.begin()
        return transfer

    async def close(self) -> None:
        """Withdraw all memory, abort what is under way and wait for it, `CLOSE_TIMEOUT_S` at most."""
        self.fabric.planes.pop(self.incarnation, None)
        for region in self._regions.values():
            region.withdraw()
        self._regions.clear()
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            await end_all(list(self._transfers), KilledError("the plane was closed"))


@asynccontextmanager
async def open_simulated_memory(
    fabric: MemoryFabric, env: Env
) -> AsyncIterator[SimulatedMemoryPlane]:
    """The adapter of the running task's host, until the block is left."""
    plane = SimulatedMemoryPlane(fabric, env)
    try:
        yield plane
    finally:
        await plane.close()
