"""The ways to one peer, a backend each, and the memory that several backends have registered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import attrs
import msgspec
import trio

from ...errors import ConnectError, StaleMemoryError, TrinamoError
from ...planes import MemoryRegion, Registrable, RemoteMemory, TransferPlane
from ...protocol.transfer.access import OnComplete, unheard
from ...protocol.transfer.description import (
    MemoryDescription,
    decode_description,
    encode_descriptions,
)

_log = logging.getLogger("trinamo.transfer")
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""JSON has integers of any length, which no rate and no encoder takes."""


class RoutedMemory:
    """One piece of memory, registered with every backend that took it; granted as one is."""

    def __init__(self, regions: Mapping[str, MemoryRegion]) -> None:
        self.regions = dict(regions)
        """By backend, in the order of the chain."""

    @property
    def description(self) -> MemoryDescription:
        """That of the first backend: block size, count and fingerprint are the same in all."""
        return next(iter(self.regions.values())).description

    def describe(self) -> bytes:
        """What the peer's router connects to."""
        return encode_descriptions([region.describe() for region in self.regions.values()])

    @property
    def is_fenced(self) -> bool:
        """Whether all backends check on our side."""
        return all(region.is_fenced for region in self.regions.values())

    def grant(
        self,
        ticket: int,
        blocks: Sequence[int],
        on_complete: OnComplete = unheard,
        *,
        may_write: bool = True,
    ) -> None:
        """Let transfers that carry `ticket` move these blocks, by whichever backend."""
        for region in self.regions.values():
            region.grant(ticket, blocks, on_complete, may_write=may_write)

    def revoke(self, ticket: int) -> None:
        for region in self.regions.values():
            region.revoke(ticket)


async def register_with(
    planes: Iterable[TransferPlane], memory: Registrable, **how: Any
) -> tuple[RoutedMemory, dict[str, str]]:
    """Register with every plane that takes it, as `TransferPlane.register`; and why others do not, by backend."""
    regions: dict[str, MemoryRegion] = {}
    refused: dict[str, str] = {}
    for plane in planes:
        try:
            regions[plane.backend] = await plane.register(memory, **how)
        except TrinamoError as error:
            refused[plane.backend] = f"does not take the memory: {error.message}"
            _log.warning("%s does not take the memory: %s", plane.backend, error)
    return RoutedMemory(regions), refused


class Route:
    """One backend towards one peer's memory, and whether it works."""

    def __init__(self, plane: TransferPlane, description: bytes) -> None:
        self.plane = plane
        self.backend = plane.backend
        described = decode_description(description, backend=plane.backend)
        self.described = described
        self.incarnation = described.incarnation
        self.is_usable = False
        self.probing: trio.CancelScope | None = None
        """Round the task that probes it again and again, while there is one."""
        self.is_forgotten = False
        self.error: TrinamoError | None = None
        """Why it is not usable."""
        self._bytes = description
        self._remote: RemoteMemory | None = None

    @property
    def is_stale(self) -> bool:
        """Whether what was described is not there any more, so that probing is useless."""
        return isinstance(self.error, StaleMemoryError)

    def is_same_way(self, other: Route) -> bool:
        """Whether both lead to the same plane of a peer; a peer may have several regions."""
        return (self.backend, self.incarnation) == (other.backend, other.incarnation)

    def fail(self, error: TrinamoError) -> None:
        self.is_usable = False
        self.error = error

    def hang_up(self, silent_s: float) -> bool:
        """Close the connection if it brought nothing for `silent_s`; whether it was closed."""
        return self.plane.mover.hang_up(self.incarnation, silent_s)

    async def probe(self) -> None:
        """Connect if need be and ask for a sign of life; usable after that, else it raises."""
        await self.plane.probe(await self.connected())
        self.is_usable, self.error = True, None

    async def connected(self) -> RemoteMemory:
        if self.is_forgotten:
            raise ConnectError(f"peer {self.incarnation} was forgotten")
        if self._remote is None:
            self._remote = await self.plane.connect(self._bytes)
        return self._remote


class RoutedPeer:
    """One peer's memory, by every backend that both ends have."""

    def __init__(self, routes: Sequence[Route]) -> None:
        if not routes:
            raise ConnectError("no transfer backend in common with the peer")
        self.routes = list(routes)
        """In the order of our chain."""

    @property
    def description(self) -> MemoryDescription:
        return self.routes[0].described

    @property
    def usable(self) -> list[str]:
        """The backends that work, in order."""
        return [route.backend for route in self.routes if route.is_usable]

    def in_order(self, memory: RoutedMemory) -> list[Route]:
        """What to try: the routes that work, then the others, as the last hope."""
        routes = [route for route in self.routes if route.backend in memory.regions]
        return sorted(routes, key=lambda route: not route.is_usable)


@attrs.frozen(kw_only=True)
class BackendStatistics:
    backend: str = ""
    is_open: bool = True
    """Whether it can be used on this machine at all."""
    peers: Count = 0
    """Peers that we are connected to and that have it too."""
    usable_peers: Count = 0
    """Those of them that new transfers go to by it."""
    in_flight: Count = 0
    """Transfers under way."""
    done: Count = 0
    """Transfers that this process began and that are done, since the start."""
    done_bytes: Count = 0
    problem: str = ""
    """Why it is not open, does not take our memory, or lately failed with a peer."""


@attrs.frozen(kw_only=True)
class TransferStatistics:
    """The chain in its order, and what went on over it. `view/` decodes it from what strangers say."""

    chain: Sequence[BackendStatistics] = ()
    peers: Count = 0
    """Peers connected to."""
    fallbacks: Count = 0
    """Transfers that went on over another backend, since the start."""
    leased: Count = 0
    """Transfers and grants that hold blocks."""
    blocks_in_flight: Count = 0
    quarantined_blocks: Count = 0
    moved_bytes: Mapping[str, Count] = {}
    """By the engine id of a peer that is connected to, what we have read from it and written to it."""
