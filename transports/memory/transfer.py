"""The transfer plane in memory: planes of one process that know each other by a fabric.

It is the model of the plane, with everything that can go wrong at the push of a button
(`TransferFaults`): also what RDMA does and TCP does not, bytes that go on landing after an abort.
Blocks are moved by events, not by tasks: what a transfer does next follows from what has arrived.
`TransferFabric.carry` says when that is: at once here, in the simulator when its network brings it
(`sim/services/memory.py`). The conformance suites hold it to the same behaviour as the real backends.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import attrs
import msgspec
import trio

from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    CorruptedError,
    DeadlineError,
    DisconnectedError,
    StaleMemoryError,
    TrinamoError,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import Mover, Registrable, RemoteMemory, Transfer, TransferPlane
from trinamo.runtime.planes.regions import HostRegion
from trinamo.runtime.planes.settlement import InquiryReport, SettlementPlane
from trinamo.runtime.planes.transfer import open_plane
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    MemoryDescription,
    draw_incarnation,
)
from trinamo.runtime.protocol.transfer.settlement import InquiryResult


@attrs.define(kw_only=True)
class TransferFaults:
    """What goes wrong with the transfers and inquiries that one plane starts, from now on."""

    is_unreachable: bool = False
    """Peers cannot be reached, and transfers fail before a block has moved."""
    is_frozen: bool = False
    """Whoever asks this plane gets no answer, as of a process that was stopped."""
    breaks_after: int | None = None
    """The connection breaks after so many blocks of a transfer."""
    stalls_after: int | None = None
    """Nothing moves any more after so many blocks, as if the peer were stopped."""
    corrupts: int | None = None
    """A bit of this block of a transfer turns over on the way."""
    lands_late: bool = False
    """An aborted or failed transfer goes on moving, and is settled only when all has moved."""
    block_s: float = 0.0
    """How long one block takes."""


class TransferFabric:
    """The planes that can reach each other, and what brings blocks from one to another."""

    backend = "memory"
    path = "memory"
    window = 1
    """How many blocks of one transfer are on the way at once."""
    is_fenced = True
    """Whether the owner's side checks generation and ticket of every block. Else, as with RDMA, the
    owner's table is read from afar before and after every `window` blocks: what was withdrawn in
    between is not confirmed, but it lands."""
    lands_late = False
    """Whether what is on the way lands when its transfer is over, and settles it only then."""
    close_s = 0.0
    """How long a plane that closes waits for what is on the way."""

    def __init__(self) -> None:
        self.movers: dict[str, MemoryMover] = {}
        """By incarnation."""
        self.listeners: dict[str, MemoryMover] = {}
        """Who is found at an address, and answers inquiries there."""

    def join(self, mover: MemoryMover) -> None:
        """A plane is open; the last one at an address is found there."""
        self.movers[mover.incarnation] = self.listeners[mover.address] = mover

    def leave(self, mover: MemoryMover) -> None:
        self.movers.pop(mover.incarnation, None)
        if self.listeners.get(mover.address) is mover:
            del self.listeners[mover.address]

    def is_alive(self, mover: MemoryMover) -> bool:
        return mover.incarnation in self.movers

    def knows(self, address: str) -> bool:
        return address in self.listeners

    def living(self, address: str) -> list[str]:
        """The incarnations that answer at an address."""
        movers = self.movers.values()
        return [e.incarnation for e in movers if e.address == address and self.is_alive(e)]

    def find(self, described: MemoryDescription) -> HostRegion:
        """The memory that was described.

        `DisconnectedError` if its process is no more, `StaleMemoryError` if it is not registered.
        """
        mover = self.movers.get(described.incarnation)
        if mover is None or not self.is_alive(mover):
            raise DisconnectedError(f"the process of {described.incarnation} is gone")
        return mover.region(described.region)

    def carry(
        self,
        source: str,  # noqa: ARG002 -- for those who have a way between
        destination: str,  # noqa: ARG002 -- as above
        size: int,  # noqa: ARG002 -- as above
        arrive: Callable[[], None],
        give_up: Callable[[], None],  # noqa: ARG002 -- as above
        *,
        by: str = "",
        delay_s: float = 0.0,
    ) -> None:
        """Bring `size` bytes over; call `arrive` when they are there, or `give_up` in the end.

        `by` is the address of who started it all; with its plane everything ends that it started.
        """
        mover = self.listeners.get(by)
        if mover is not None:
            mover.nursery.start_soon(_after, delay_s, arrive)

    def landed(self, address: str, position: int, data: bytes) -> None:
        """A block of a transfer has been written at an address."""


async def _after(delay_s: float, arrive: Callable[[], None]) -> None:
    await trio.sleep(delay_s)
    arrive()


class MemoryMover(Mover[HostRegion], SettlementPlane):
    def __init__(
        self,
        fabric: TransferFabric,
        nursery: trio.Nursery,
        *,
        incarnation: str,
        backend: str,
        address: str | None,
    ) -> None:
        Mover.__init__(self, incarnation)
        SettlementPlane.__init__(self)
        self.backend, self.path = backend, fabric.path
        self.address = address or f"memory-{incarnation}"
        self.faults = TransferFaults()
        self.fabric, self.nursery = fabric, nursery
        fabric.join(self)

    async def register(
        self, memory: Registrable, draft: MemoryDescription, *, needs_ticket: bool
    ) -> HostRegion:
        await trio.lowlevel.checkpoint()
        described = msgspec.structs.replace(draft, address=self.address.encode())
        region = HostRegion(memory, described, needs_ticket=needs_ticket)
        region.is_fenced = self.fabric.is_fenced
        return region

    async def ask(self, described: MemoryDescription) -> RemoteMemory:
        await trio.lowlevel.checkpoint()
        there, fabric = described.address.decode(errors="replace"), self.fabric
        if self.faults.is_unreachable or not fabric.knows(there):
            raise ConnectError(f"nobody is reached at {there!r}")
        answered, living = trio.Event(), list[str]()

        def asked() -> None:
            living.extend(fabric.living(there))
            fabric.carry(there, self.address, 0, answered.set, answered.set, by=self.address)

        fabric.carry(self.address, there, 0, asked, answered.set, by=self.address)
        await answered.wait()
        if not living:
            raise ConnectError(f"{there} does not answer")
        if described.incarnation not in living:
            raise StaleMemoryError(f"{there} is not {described.incarnation} any more")
        return RemoteMemory(described)

    async def close(self, incarnation: str) -> None:  # noqa: ARG002 -- nothing is open to it
        await trio.lowlevel.checkpoint()

    def move(self, transfer: Transfer) -> None:
        assert isinstance(transfer.local, HostRegion), "memory of another plane"
        Moving(self, transfer).begin()

    # --- settlement ------------------------------------------------------------------------------

    async def inquire(
        self, address: str, incarnation: str, ticket: int, *, timeout_s: float
    ) -> InquiryReport:
        await trio.lowlevel.checkpoint()
        peer = self.fabric.listeners.get(address)
        if self.faults.is_unreachable:
            await trio.sleep(timeout_s)
            return InquiryReport(InquiryResult.UNREACHED)
        if peer is None:
            return InquiryReport(InquiryResult.REFUSED)
        if peer.faults.is_frozen:
            await trio.sleep(timeout_s)
            return InquiryReport(InquiryResult.SILENT, address)
        if peer.incarnation != incarnation:
            return InquiryReport(InquiryResult.REPLACED, address)
        is_settled = peer.is_settled(ticket)
        return InquiryReport(
            InquiryResult.SAYS_SETTLED if is_settled else InquiryResult.SAYS_MOVING, address
        )


class Moving:
    """One transfer of memory: which blocks are on the way, and what became of them. Synchronous."""

    def __init__(self, mover: MemoryMover, transfer: Transfer) -> None:
        self._mover, self._fabric, self._transfer = mover, mover.fabric, transfer
        self._faults = attrs.evolve(mover.faults)
        self._count = transfer.block_count
        self._here, self._there = mover.address, transfer.there.address.decode(errors="replace")
        self.next = 0
        """So many blocks have been let go of."""
        self._in_flight = self._landed = 0
        self._admitted = self._count if self._fabric.is_fenced else 0
        """So many blocks may go: all where each is checked when it lands, else up to a look."""
        transfer.was_admitted = self._admitted > 0
        transfer.let_go = self._let_go

    def begin(self) -> None:
        """Put the first blocks on their way."""
        if self._faults.is_unreachable:
            self.next = self._count
            self._transfer.fail(ConnectError("the fabric lets nobody through"))
        elif not self._count:
            # Nothing to move, but the peer is to be told, and must be there.
            self._in_flight = 1
            self._carry(self._here, self._there, 0, partial(self._answer, -1))
        elif not self._admitted:
            self._look(self._admit)
        else:
            self._launch()

    # --- the end ---------------------------------------------------------------------------------

    def _let_go(self) -> bool:
        return self._is_idle or not (self._fabric.lands_late or self._faults.lands_late)

    @property
    def _is_idle(self) -> bool:
        is_through = self.next == self._count or not self._faults.lands_late
        return self._in_flight == 0 and is_through

    def _settle_if_idle(self) -> None:
        if self._transfer.is_over and self._is_idle:
            self._transfer.settle()

    def _succeed(self) -> None:
        transfer = self._transfer
        try:
            if transfer.notify is not None:
                access = self._fabric.find(transfer.there).access
                access.complete(transfer.ticket, transfer.notify)
        except TrinamoError as error:
            transfer.fail(error)
        else:
            transfer.succeed(is_verified=True)

    # --- looks at the owner's table, where nothing is checked as it lands ----------------------------

    def _look(self, then: Callable[[], None]) -> None:
        """Read the owner's page; go on if it admits us."""
        transfer = self._transfer
        blocks = transfer.remote_blocks[self._landed : self._landed + self._fabric.window]

        def read() -> None:
            try:
                self._fabric.find(transfer.there).access.admit(
                    transfer.there.generation,
                    transfer.ticket,
                    blocks,
                    is_target=transfer.direction is Direction.WRITE,
                )
            except TrinamoError as error:
                self._refuse(error)
            else:
                self._carry(self._there, self._here, 0, seen)

        def seen() -> None:
            self._in_flight -= 1
            if transfer.is_over or not self._fabric.is_alive(self._mover):
                self._settle_if_idle()
            else:
                then()

        self._in_flight += 1
        self._carry(self._here, self._there, 0, read)

    def _admit(self) -> None:
        self._admitted = min(self._landed + self._fabric.window, self._count)
        self._transfer.was_admitted = True
        self._launch()

    def _count_landed(self) -> None:
        """What came while something was withdrawn may be anything: it counts after another look."""
        self._landed = self._admitted
        self._transfer.confirm(self._landed)
        if self._landed == self._count:
            self._succeed()
            self._settle_if_idle()
        else:
            self._look(self._admit)

    # --- blocks ----------------------------------------------------------------------------------

    def _carry(
        self,
        source: str,
        target: str,
        size: int,
        arrive: Callable[[], None],
        delay_s: float = 0.0,
    ) -> None:
        def land() -> None:
            if not self._transfer.is_settled:
                arrive()

        self._fabric.carry(source, target, size, land, self._lost, by=self._here, delay_s=delay_s)

    def _lost(self) -> None:
        self._in_flight -= 1
        self._transfer.fail(DisconnectedError(f"{self._there} does not answer"))
        self._settle_if_idle()

    def _launch(self) -> None:
        """Fill the window. A process that is gone has no queue any more; a paused one has."""
        transfer, faults = self._transfer, self._faults
        while (
            self.next < self._admitted
            and self._in_flight < self._fabric.window
            and (faults.lands_late or not transfer.is_over)
            and self._fabric.is_alive(self._mover)
        ):
            position = self.next
            if position == faults.stalls_after:
                self._stall()
                break
            if position == faults.breaks_after and not transfer.is_over:
                transfer.fail(DisconnectedError("the fabric broke the connection"))
                continue
            self.next += 1
            self._in_flight += 1
            data = b""
            arrive = partial(self._answer, position)
            if transfer.direction is Direction.WRITE:
                data = bytes(transfer.local.block(transfer.local_blocks[position]))
                arrive = partial(self._write, position, data)
            self._carry(self._here, self._there, len(data), arrive, faults.block_s)
        self._settle_if_idle()

    def _stall(self) -> None:
        """Hang; what lands late goes on when the time of the transfer is up, whatever came of it."""
        transfer = self._transfer

        def go_on() -> None:
            self._in_flight -= 1
            transfer.fail(DeadlineError("the fabric stalled"))
            self._launch()

        if self._faults.lands_late:
            self._faults.stalls_after = None
            self._in_flight += 1
            self._carry(self._here, self._there, 0, go_on, transfer.deadline_s)

    def _write(self, position: int, data: bytes) -> None:
        """At the peer: a block has come."""
        try:
            region = self._remote(position)
            self._put(region, self._transfer.remote_blocks[position], position, data)
        except TrinamoError as error:
            self._refuse(error)
        else:
            self._fabric.landed(self._there, position, data)
            self._carry(self._there, self._here, 0, partial(self._confirm, position))

    def _answer(self, position: int) -> None:
        """At the peer: a block is asked for."""
        transfer = self._transfer
        try:
            region = self._remote(position)
        except TrinamoError as error:
            self._refuse(error)
            return
        if position < 0:
            self._carry(self._there, self._here, 0, partial(self._confirm, -1))
            return
        data = bytes(region.block(transfer.remote_blocks[position]))

        def land() -> None:
            # Late or not: who brings it does not know that nobody wants it any more.
            if self._fabric.is_alive(self._mover):
                try:
                    self._put(transfer.local, transfer.local_blocks[position], position, data)
                except TrinamoError as error:
                    transfer.fail(error)
                self._fabric.landed(self._here, position, data)
            self._confirm(position)

        self._carry(self._there, self._here, len(data), land)

    def _put(self, region: HostRegion, block: int, position: int, data: bytes) -> None:
        target = region.block(block)
        target[:] = data
        if position == self._faults.corrupts:
            target[0] ^= 1
        if zlib.crc32(target) != zlib.crc32(data):
            raise CorruptedError(f"the checksum of block {position} of the transfer does not match")

    def _remote(self, position: int) -> HostRegion:
        """The peer's region, which admits the block at `position`; the first time, all of them."""
        transfer = self._transfer
        blocks = transfer.remote_blocks
        if position > 0:
            blocks = blocks[position : position + 1]
        region = self._fabric.find(transfer.there)
        if self._fabric.is_fenced:
            region.access.admit(
                transfer.there.generation,
                transfer.ticket,
                blocks,
                is_target=transfer.direction is Direction.WRITE,
            )
        elif region.access.is_withdrawn:
            raise StaleMemoryError("the region was deregistered")
        return region

    def _refuse(self, error: TrinamoError) -> None:
        def told() -> None:
            self._in_flight -= 1
            self.next = self._count  # Nothing of it goes any more, however late.
            self._transfer.fail(error)
            self._settle_if_idle()

        self._carry(self._there, self._here, 0, told)

    def _confirm(self, position: int) -> None:
        self._in_flight -= 1
        transfer = self._transfer
        if position >= 0 and not transfer.is_over:
            if self._fabric.is_fenced:
                transfer.confirm(transfer.confirmed_count + 1)
            elif self.next - self._in_flight == self._admitted:
                self._look(self._count_landed)
        if transfer.confirmed_count == self._count and not transfer.is_over:
            self._succeed()
        self._launch()


@asynccontextmanager
async def open_memory_transfer_plane(
    fabric: TransferFabric,
    env: Env | None = None,
    *,
    backend: str = "",
    address: str | None = None,
    incarnation: str = "",
) -> AsyncIterator[TransferPlane[MemoryMover]]:
    """A plane on `fabric`, until the block is left. `backend` lets a test make two kinds.

    `address` is where it is asked; None makes one up. The last to have opened one is found there.
    `incarnation` is the process's; empty: one is drawn.
    """
    async with open_nursery() as nursery:
        mover = MemoryMover(
            fabric,
            nursery,
            incarnation=incarnation or draw_incarnation((env or RealEnv()).rng),
            backend=backend or fabric.backend,
            address=address,
        )
        async with open_plane(mover, close_s=fabric.close_s) as plane:
            try:
                yield plane
            finally:
                fabric.leave(mover)
        nursery.cancel_scope.cancel()
