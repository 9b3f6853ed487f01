"""One-sided memory between simulated hosts: `TransferPlane` as RDMA would do it (NIXL-like).

Up to `window` blocks are on the way at once (`fabric.py` carries them), and what is on the way lands,
also after an abort, a deadline or the death of the process that started it: only then is the
transfer settled. Blocks arrive in order, so a failed transfer has moved some and not others.

With `is_fenced` every block is checked against the owner's access table when it lands, as the tcp
backend does. Without, as with RDMA, the table is read from afar before and after every `window`
blocks: what was withdrawn in between is not confirmed, but it lands, and whoever has used the
blocks again is found out.

What this module does not do: corrupt or verify bytes, or move memory of devices.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from trinamo.runtime.env import Env
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    KilledError,
    StaleMemoryError,
)
from trinamo.runtime.planes import (
    MemoryRegion,
    Registrable,
    RemoteMemory,
)
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    MemoryDescription,
    decode_description,
)
from trinamo.transports.one_sided.region import (
    HostRegion,
    RemoteRegion,
    check_parts,
    host_buffers,
)
from trinamo.transports.one_sided.state import plan_transfer

from .fabric import Adapter, MemoryFabric
from .transfer import SimulatedTransfer, end_all

CLOSE_TIMEOUT_S: Final = 10.0


class SimulatedMemoryPlane(Adapter):
    """One process's adapter. Implements `TransferPlane`; made by `open_simulated_memory`."""

    def __init__(self, fabric: MemoryFabric, env: Env, incarnation: str = "") -> None:
        super().__init__(fabric, env, incarnation)
        self._numbers = 0
        self._transfers: list[SimulatedTransfer] = []

    # --- memory ------------------------------------------------------------------------------------

    async def register(
        self,
        memory: Registrable,
        *,
        block_bytes: int,
        fingerprint: str = "",
        needs_ticket: bool = False,
        parts: int = 1,
    ) -> HostRegion:
        """See `TransferPlane.register`."""
        await trio.lowlevel.checkpoint()
        views = host_buffers(memory, block_bytes, backend="simulated memory")
        length = sum(view.nbytes for view in views)
        check_parts(length // block_bytes, parts)
        self._numbers += 1
        description = MemoryDescription(
            backend=self.backend,
            incarnation=self.incarnation,
            region=self._numbers,
            generation=1,
            fingerprint=fingerprint,
            length=length,
            block_bytes=block_bytes,
            parts=parts,
            address=self.host.name.encode(),
        )
        region = HostRegion(
            views, description, needs_ticket=needs_ticket, is_fenced=self.fabric.is_fenced
        )
        self.regions[self._numbers] = region
        return region

    async def deregister(self, region: MemoryRegion) -> None:
        """See `TransferPlane.deregister`."""
        await trio.lowlevel.checkpoint()
        known = self.regions.pop(region.description.region, None)
        if known is None:
            return
        known.withdraw()
        ours = [transfer for transfer in self._transfers if transfer.plan.local is known]
        await end_all(ours, StaleMemoryError("the region was deregistered"))

    # --- peers -------------------------------------------------------------------------------------

    async def connect(self, description: bytes) -> RemoteRegion:
        """See `TransferPlane.connect`. Takes a round trip, or `give_up_s` if nobody answers."""
        described = decode_description(description, backend=self.backend)
        await self._greet(described)
        return RemoteRegion(described)

    async def probe(self, remote: RemoteMemory) -> None:
        """See `TransferPlane.probe`."""
        await self._greet(remote.description)

    async def forget(self, incarnation: str) -> None:
        """See `TransferPlane.forget`."""
        await trio.lowlevel.checkpoint()
        theirs = [t for t in self._transfers if t.plan.there.incarnation == incarnation]
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
                for name, plane in self.fabric.adapters.items()
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
            remote,
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
        self.fabric.adapters.pop(self.incarnation, None)
        for region in self.regions.values():
            region.withdraw()
        self.regions.clear()
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            await end_all(list(self._transfers), KilledError("the plane was closed"))


@asynccontextmanager
async def open_simulated_memory(
    fabric: MemoryFabric, env: Env, *, incarnation: str = ""
) -> AsyncIterator[SimulatedMemoryPlane]:
    """The adapter of the running task's host, until the block is left."""
    plane = SimulatedMemoryPlane(fabric, env, incarnation)
    try:
        yield plane
    finally:
        await plane.close()
