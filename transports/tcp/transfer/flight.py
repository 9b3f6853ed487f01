"""One transfer of the tcp plane, from `start` to its end. Implements `planes.transfer.Transfer`.

All it touches of our memory goes through one `Flow`, which `abort` closes at once: so here a
transfer is settled as soon as it is over.
"""

from __future__ import annotations

import trio
from typing_extensions import override

from trinamo.runtime.env import Clock
from trinamo.runtime.errors import (
    DeadlineError,
    RemoteProtocolError,
    TrinamoError,
)
from trinamo.runtime.planes import TransferReport
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.runtime.protocol.transfer.stream import (
    Notify,
    Read,
    Write,
    pack_blocks,
)
from trinamo.transports.one_sided.state import TransferPlan, TransferState

from .checksum import NO_CHECKSUM
from .initiator import Exchange, InitiatorLink, TcpRemote
from .memory import Flow, TcpRegion


class TcpTransfer(TransferState):
    """One transfer under way or over."""

    def __init__(self, plan: TransferPlan[TcpRegion, TcpRemote], clock: Clock) -> None:
        super().__init__()
        self.peer = plan.remote.peer
        self._plan = plan
        self._clock = clock
        self._started_at = clock.now()
        self._flow: Flow | None = None
        self._scope = trio.CancelScope()

    @override
    def fail(self, error: TrinamoError) -> None:
        """End it now with this error, unless it is over; the peer is told."""
        super().fail(error)
        self._end()

    def _end(self) -> None:
        if not self.is_settled:
            if self._flow is not None:
                self._flow.close()
            self.settle()
            self._scope.cancel()

    # --- the task ------------------------------------------------------------------------------

    async def drive(self) -> None:
        """Do it. Run in the plane's nursery; raises nothing."""
        self._scope.deadline = trio.current_time() + self._plan.deadline_s
        with self._scope:
            try:
                link = await self.peer.reach()
                if self.is_over:
                    # Aborted before it began: nobody would close a flow that is opened now.
                    return
                await self._move(link)
            except TrinamoError as error:
                self.fail(error)
            else:
                self._succeed(is_verified=link.checksum is not NO_CHECKSUM)
        self.fail(
            DeadlineError(
                f"{self._confirmed} of {self._plan.block_count} blocks were moved within "
                f"{self._plan.deadline_s:g} s"
            )
        )

    def _succeed(self, *, is_verified: bool) -> None:
        if self.is_over:
            return
        plan = self._plan
        self._confirmed = plan.block_count
        self.succeed(
            TransferReport(
                backend="tcp",
                path="stream",
                direction=plan.direction,
                block_count=plan.block_count,
                byte_count=plan.byte_count,
                duration_s=self._clock.now() - self._started_at,
                is_verified=is_verified,
            )
        )
        self._end()

    async def _move(self, link: InitiatorLink) -> None:
        plan, is_read = self._plan, self._plan.direction is Direction.READ
        with link.exchange(self._confirm) as exchange:
            flow = self._open_flow(exchange, link)
            if is_read:
                if flow.blocks:
                    link.receiving[exchange.id] = flow
                link.put(Read(exchange.id, *self._where()), self._remote_list())
            else:
                link.put(Write(exchange.id, *self._where(), plan.notify), self._remote_list())
                if flow.blocks:
                    link.send_blocks(flow, lambda: None)
            await exchange.wait()
            self._check_complete(flow)
        if is_read and plan.notify is not None:
            with link.exchange() as exchange:
                link.put(Notify(exchange.id, plan.there.region, plan.ticket, plan.notify))
                await exchange.wait()

    # --- parts -----------------------------------------------------------------------------------

    def _where(self) -> tuple[int, int, int, int]:
        there = self._plan.there
        return there.region, there.generation, there.block_bytes, self._plan.ticket

    def _remote_list(self) -> bytes:
        return pack_blocks(self._plan.remote_blocks)

    def _confirm(self, count: int) -> None:
        if not self.is_over and self._confirmed < count <= self._plan.block_count:
            self._confirmed = count

    def _open_flow(self, exchange: Exchange, link: InitiatorLink) -> Flow:
        self._flow = Flow(
            exchange.id,
            self._plan.local,
            self._plan.local_blocks,
            link.checksum,
            on_fence=exchange.fail,
        )
        return self._flow

    def _check_complete(self, flow: Flow) -> None:
        if not flow.is_complete:
            raise RemoteProtocolError(
                f"finished, but only {flow.position} of {len(flow.blocks)} blocks have moved"
            )
        flow.close()
