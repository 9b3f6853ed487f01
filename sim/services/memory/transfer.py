"""One transfer of simulated one-sided memory: which blocks are on the way, and what became of it.

Synchronous: the fabric's events drive it. Read `plane.py` and `fabric.py` first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from zlib import crc32

from typing_extensions import override

from trinamo.runtime.errors import (
    DeadlineError,
    DisconnectedError,
    StaleMemoryError,
    TrinamoError,
)
from trinamo.runtime.planes import RemoteMemory, TransferReport
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.one_sided.region import HostRegion
from trinamo.transports.one_sided.state import TransferPlan, TransferState

from .fabric import Adapter


class SimulatedTransfer(TransferState):
    """Implements `Transfer`. `forget` is called once it is settled."""

    def __init__(
        self,
        adapter: Adapter,
        plan: TransferPlan[HostRegion, RemoteMemory],
        forget: Callable[[SimulatedTransfer], None],
    ) -> None:
        super().__init__()
        self.plan = plan
        self._adapter, self._fabric = adapter, adapter.fabric
        self._forget = forget
        self._here = adapter.host.name
        self._there = plan.there.address.decode(errors="replace")
        self._next = self._in_flight = self._landed = 0
        self._admitted = len(plan.local_blocks) if self._fabric.is_fenced else 0
        """So many blocks may go: all where each is checked when it lands, else up to a look."""
        self._began_s = self._fabric.world.current_time()

    @property
    def was_admitted(self) -> bool:
        """Whether any block was let go: before, it has touched nothing yet."""
        return self._admitted > 0

    def begin(self) -> None:
        """Put the first blocks on their way."""
        self._fabric.world.after(self.plan.deadline_s, self._time_is_up)
        if not self.plan.local_blocks:
            # Nothing to move, but the peer is to be told, and must be there.
            self._in_flight = 1
            self._carry(self._here, self._there, 0, partial(self._answer, -1))
        elif not self._admitted:
            self._look(self._admit)
        self._launch()

    @override
    def fail(self, error: TrinamoError) -> None:
        """End it with this error, unless it is over; what is on its way still lands."""
        super().fail(error)
        self._settle_if_landed()

    def _time_is_up(self) -> None:
        self.fail(DeadlineError(f"no more than {self._confirmed} blocks were moved in time"))

    def _look(self, then: Callable[[], None]) -> None:
        """Read the owner's page, where nothing is checked as it lands; go on if it admits us."""
        plan = self.plan
        blocks = plan.remote_blocks[self._landed : self._landed + self._fabric.window]
        is_target = plan.direction is Direction.WRITE

        def read() -> None:
            try:
                access = self._remote(-1).access
                access.admit(plan.there.generation, plan.ticket, blocks, is_target=is_target)
            except TrinamoError as error:
                self._refuse(error)
            else:
                self._carry(self._there, self._here, 0, seen)

        def seen() -> None:
            self._in_flight -= 1
            if self.is_over or not self._adapter.is_alive:
                self._settle_if_landed()
            else:
                then()

        self._in_flight += 1
        self._carry(self._here, self._there, 0, read)

    def _admit(self) -> None:
        self._admitted = min(self._landed + self._fabric.window, len(self.plan.local_blocks))
        self._launch()

    def _launch(self) -> None:
        """Fill the window. A process that is gone has no queue any more; a paused one has."""
        plan = self.plan
        while (
            self._next < self._admitted
            and self._in_flight < self._fabric.window
            and not self.is_over
            and self._adapter.is_alive
        ):
            position = self._next
            self._next += 1
            self._in_flight += 1
            if plan.direction is Direction.WRITE:
                data = bytes(plan.local.block(plan.local_blocks[position]))
                self._carry(
                    self._here, self._there, len(data), partial(self._write, position, data)
                )
            else:
                self._carry(self._here, self._there, 0, partial(self._answer, position))
        self._settle_if_landed()

    def _carry(self, source: str, target: str, size: int, arrive: Callable[[], None]) -> None:
        self._fabric.carry(source, target, size, arrive, self._lost, by=self._here)

    def _lost(self) -> None:
        self._in_flight -= 1
        self.fail(DisconnectedError(f"{self._there} does not answer"))

    def _write(self, position: int, data: bytes) -> None:
        """At the peer's adapter: a block has come."""
        try:
            self._remote(position).block(self.plan.remote_blocks[position])[:] = data
        except TrinamoError as error:
            self._refuse(error)
        else:
            self._tell(self._there, position, data)
            self._carry(self._there, self._here, 0, partial(self._confirm, position))

    def _tell(self, host: str, position: int, data: bytes) -> None:
        self._fabric.world.add_row("block", target=host, position=position, crc=crc32(data))

    def _answer(self, position: int) -> None:
        """At the peer's adapter: a block is asked for."""
        try:
            region = self._remote(position)
        except TrinamoError as error:
            self._refuse(error)
            return
        if position < 0:
            self._carry(self._there, self._here, 0, partial(self._confirm, -1))
            return
        data = bytes(region.block(self.plan.remote_blocks[position]))

        def land() -> None:
            # Late or not: the adapter does not know that nobody wants it any more.
            if self._adapter.is_alive:
                self.plan.local.block(self.plan.local_blocks[position])[:] = data
                self._tell(self._here, position, data)
            self._confirm(position)

        self._carry(self._there, self._here, len(data), land)

    def _remote(self, position: int) -> HostRegion:
        """The peer's region, which admits the block at `position`; the first time, all of them."""
        plan = self.plan
        blocks = plan.remote_blocks[position : position + 1] if position > 0 else plan.remote_blocks
        region = self._fabric.find(plan.there)
        if self._fabric.is_fenced:
            is_target = plan.direction is Direction.WRITE
            region.access.admit(plan.there.generation, plan.ticket, blocks, is_target=is_target)
        elif region.access.is_withdrawn:
            raise StaleMemoryError("the region was deregistered")
        return region

    def _refuse(self, error: TrinamoError) -> None:
        def told() -> None:
            self._in_flight -= 1
            self.fail(error)

        self._carry(self._there, self._here, 0, told)

    def _confirm(self, position: int) -> None:
        self._in_flight -= 1
        if position >= 0 and not self.is_over:
            if self._fabric.is_fenced:
                self._confirmed += 1
            else:
                self._land()
        if self._confirmed == len(self.plan.local_blocks) and not self.is_over:
            self._succeed()
        self._launch()

    def _land(self) -> None:
        """What came while something was withdrawn may be anything: it counts after another look."""
        arrived = self._next - self._in_flight
        if arrived == self._admitted:
            self._look(self._count)

    def _count(self) -> None:
        self._confirmed = self._landed = self._admitted
        if self._confirmed == len(self.plan.local_blocks):
            self._succeed()
            self._settle_if_landed()
        else:
            self._look(self._admit)

    def _succeed(self) -> None:
        plan = self.plan
        try:
            if plan.notify is not None:
                region = self._fabric.find(plan.there)
                region.access.complete(plan.ticket, plan.notify)
        except TrinamoError as error:
            self.fail(error)
            return
        self.succeed(
            TransferReport(
                backend=self._adapter.backend,
                path="fabric",
                direction=plan.direction,
                block_count=plan.block_count,
                byte_count=plan.byte_count,
                duration_s=self._fabric.world.current_time() - self._began_s,
                is_verified=False,
            )
        )

    def _settle_if_landed(self) -> None:
        if self._in_flight == 0 and self.is_over and not self.is_settled:
            self.settle()
            self._forget(self)


async def end_all(transfers: list[SimulatedTransfer], error: TrinamoError) -> None:
    """Fail them all, and return when they are settled."""
    for transfer in transfers:
        transfer.fail(error)
    for transfer in transfers:
        await transfer.wait_settled()
