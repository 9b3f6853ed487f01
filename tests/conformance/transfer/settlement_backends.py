"""What the settlement suite runs on: lives that open and close at one address, and can be hurt."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import trio

from tests.worlds import on_host
from trinamo.runtime.planes.settlement import InquiryReport, SettlementPlane
from trinamo.sim import Network, SeedChoices, SimEnv, World
from trinamo.sim.cluster.memory import SECRET
from trinamo.transports.memory.transfer import (
    TransferFabric,
    open_memory_transfer_plane,
)
from trinamo.transports.tcp import TcpOptions, TransferOptions, open_transfer_plane


class Place(Protocol):
    """One address of a peer's, and us elsewhere."""

    def asker(self) -> AbstractAsyncContextManager[SettlementPlane]:
        """Our end."""
        ...

    def life(self) -> AbstractAsyncContextManager[SettlementPlane]:
        """A life of the peer, at the same address each time; one at a time."""
        ...


@asynccontextmanager
async def the_mover(opening: AbstractAsyncContextManager[Any]) -> AsyncIterator[SettlementPlane]:
    """What asks and answers for a plane, while that is open."""
    async with opening as plane:
        yield plane.mover


class InMemory:
    """Memory planes on one fabric."""

    def __init__(self) -> None:
        self.fabric = TransferFabric()

    def asker(self) -> AbstractAsyncContextManager[SettlementPlane]:
        return the_mover(open_memory_transfer_plane(self.fabric))

    def life(self) -> AbstractAsyncContextManager[SettlementPlane]:
        return the_mover(open_memory_transfer_plane(self.fabric, address="the peer's"))


class OverTcp:
    """Real sockets on loopback."""

    def __init__(self) -> None:
        self._port = 0

    def asker(self) -> AbstractAsyncContextManager[SettlementPlane]:
        return the_mover(open_transfer_plane())

    @asynccontextmanager
    async def life(self) -> AsyncIterator[SettlementPlane]:
        options = TransferOptions(tcp=TcpOptions(port=self._port))
        async with open_transfer_plane(options) as plane:
            self._port = int(plane.mover.address.rpartition(":")[2])
            yield plane.mover


class _Remote(SettlementPlane):
    """A plane on a host of its own: it is asked from outside, and asks from there."""

    def __init__(self, plane: SettlementPlane) -> None:
        self.address, self.incarnation = plane.address, plane.incarnation
        self._plane = plane
        self._ask, self._asked = trio.open_memory_channel[tuple[Any, ...]](0)
        self._tell, self._told = trio.open_memory_channel[InquiryReport](0)

    def answering(self, is_settled: Any) -> Any:
        return self._plane.answering(is_settled)

    async def serve(self) -> None:
        async for address, life, ticket, timeout_s in self._asked:
            await self._tell.send(
                await self._plane.inquire(address, life, ticket, timeout_s=timeout_s)
            )

    async def inquire(
        self, address: str, incarnation: str, ticket: int, *, timeout_s: float
    ) -> InquiryReport:
        await self._ask.send((address, incarnation, ticket, timeout_s))
        return await self._told.receive()


class OverSimulatedTcp:
    """The same planes over the simulator's network, a host each."""

    def __init__(self) -> None:
        self.world = World(SeedChoices(1), ambient="raise")
        self.network = Network(self.world, tear_one_in=4, short_one_in=4)
        self._lives = itertools.count(1)

    def asker(self) -> AbstractAsyncContextManager[SettlementPlane]:
        return on_host(self.world, "ours", lambda: self._open("ours", 0))

    def life(self) -> AbstractAsyncContextManager[SettlementPlane]:
        return on_host(self.world, "theirs", lambda: self._open("theirs", 7000))

    @asynccontextmanager
    async def _open(self, host: str, port: int) -> AsyncIterator[SettlementPlane]:
        tcp = TcpOptions(host="0.0.0.0", port=port, advertise_host=host, secret=SECRET)
        env = SimEnv(self.world, f"{host}.{next(self._lives)}")
        async with (
            open_transfer_plane(TransferOptions(tcp=tcp), env) as plane,
            trio.open_nursery() as nursery,
        ):
            remote = _Remote(plane.mover)
            nursery.start_soon(remote.serve)
            yield remote
            nursery.cancel_scope.cancel()
