"""The life of blocks that move: leased until their transfer is settled, in quarantine if that is late.

A transfer that was abandoned may go on touching memory, so its blocks are followed by a task of
their own, whoever asked for it and however that ended. Here nothing is moved or chosen: that is
`router.py`; what settled means is in `planes/transfer.py`, and how a peer proves it in
`settlement.py`.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import attrs
import trio

from ...errors import TrinamoError
from ...nurseries import open_nursery
from ...planes import MemoryRegion, Transfer
from ...protocol.transfer.settlement import PeerDescriptor
from ..pool import BlockPool
from .routes import RoutedMemory
from .settlement import Grant, Inquiries, Path, Tickets

_log = logging.getLogger("trinamo.transfer")


@attrs.define(eq=False)
class BlockLeases:
    """The blocks of one pool that transfers may touch. Made by `open_block_leases`."""

    _pool: BlockPool
    _nursery: trio.Nursery
    _drain_s: float
    _on_quarantine: Callable[[int], None]
    _on_readmit: Callable[[int], None]
    _rng: random.Random
    _block_of: Callable[[int], int]
    _inquiries: Inquiries | None
    tickets: Tickets = attrs.field(factory=Tickets, init=False)
    """Those of peers that transfers of ours carry."""
    in_flight_count: int = attrs.field(default=0, init=False)
    """How many transfers and grants hold blocks, those in quarantine left out."""
    _idle: trio.Event = attrs.field(factory=trio.Event, init=False)

    def start(
        self, start: Callable[[], Transfer], blocks: Sequence[int], ticket: int = 0
    ) -> Transfer:
        """Lease our `blocks`, `start` a transfer with them, and follow it until it is settled.

        Never waits; raises what `start` raises, and nothing is leased then. From before the start
        until the transfer is settled the peer's owner is told that we still move with its `ticket`
        (`settlement.py`). The blocks are as the plane numbers them. They go into quarantine if it is
        not settled `drain_s` seconds after it is over, and come back if it is settled later.
        """
        leased = self._enter(blocks)
        self.tickets.enter(ticket)
        try:
            transfer = start()
        except BaseException:
            self.tickets.leave(ticket)
            self._release(leased)
            raise
        self._nursery.start_soon(self._follow, transfer, leased, ticket)
        return transfer

    async def _follow(self, transfer: Transfer, blocks: tuple[int, ...], ticket: int) -> None:
        try:
            await self._hold(blocks, transfer, after=transfer.wait_over())
        finally:
            if transfer.is_settled:
                self.tickets.leave(ticket)

    def grant(
        self,
        region: MemoryRegion | RoutedMemory,
        blocks: Sequence[int],
        peer: PeerDescriptor | None = None,
        *,
        may_write: bool = True,
        ttl_s: float = math.inf,
    ) -> Grant:
        """Let one peer move our `blocks`, leased until the grant has ended. Never waits.

        `peer` says whom to ask whether it has let go, where it `may_write` and the region's backend
        does not fence; `meet` it before. It must come from the peer itself, with its request for the
        blocks. One that was looked up by an engine's id may be of that engine's last incarnation,
        whose death would free blocks that the next one writes. A peer that only reads does no harm
        to whoever gets the blocks next; it finds that its ticket was revoked, and throws away what
        it read. Raises what the region raises, such as when it has as many tickets as it can;
        nothing is leased or granted then.
        """
        leased = self._enter(blocks)
        ticket = self._rng.getrandbits(62) + 1

        def end(grant: Grant) -> None:
            region.revoke(ticket)
            if grant.is_settled:
                self._release(leased)

        needs_proof = may_write and not region.is_fenced
        grant = Grant(leased, ticket, end, needs_proof)
        try:
            region.grant(ticket, blocks, grant.hear, may_write=may_write)
        except TrinamoError:
            region.revoke(ticket)
            self._release(leased)
            raise
        path: AbstractContextManager[Path | None] = nullcontext()
        if needs_proof and peer is not None and self._inquiries is not None:
            path = self._inquiries.path_to(peer, trio.current_time())
        self._nursery.start_soon(self._attend, grant, path, ttl_s)
        return grant

    async def meet(self, peer: PeerDescriptor) -> bool:
        """Whether the peer answers where it says, or has; only so it can be proven dead."""
        if self._inquiries is None:
            await trio.lowlevel.checkpoint()
            return False
        return await self._inquiries.meet(peer)

    async def _attend(
        self, grant: Grant, path_to_peer: AbstractContextManager[Path | None], ttl_s: float
    ) -> None:
        """See one grant to its end, and its blocks back to the pool."""
        with path_to_peer as path:
            try:
                with trio.move_on_after(ttl_s):
                    await (grant.wait_ended() if path is None else path.watch(grant))
            finally:
                grant.withdraw()
                if not grant.is_settled:
                    async with open_nursery() as nursery:
                        if path is not None:
                            nursery.start_soon(self._inquire, grant, path)
                        await self._hold(grant.blocks, grant, is_sure=lambda: grant.is_proven)
                        nursery.cancel_scope.cancel()

    async def _inquire(self, grant: Grant, path: Path) -> None:
        await path.prove(grant.ticket, soon_s=self._drain_s)
        grant.is_proven = True
        await path.rest(grant.ticket)
        grant.settle()

    # --- blocks ----------------------------------------------------------------------------------

    async def _hold(
        self,
        blocks: tuple[int, ...],
        what: Transfer | Grant,
        *,
        after: Awaitable[None] | None = None,
        is_sure: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep leased blocks until `what` is settled; cancelled, in quarantine unless it is.

        What takes too long goes into quarantine, too, unless it `is_sure` to settle soon.
        """
        is_leased = True
        try:
            if after is not None:
                await after
            with trio.move_on_after(self._drain_s):
                await what.wait_settled()
            if is_sure():
                await what.wait_settled()
            if not what.is_settled:
                is_leased = False
                self._quarantine(blocks)
                await what.wait_settled()
        finally:
            if is_leased and what.is_settled:
                self._release(blocks)
            elif is_leased:
                self._quarantine(blocks)
            elif what.is_settled:
                count = self._pool.readmit(blocks)
                self._on_readmit(count)
                _log.warning("%d blocks leave quarantine: nothing touches them any more", count)

    def _enter(self, blocks: Sequence[int]) -> tuple[int, ...]:
        leased = tuple(dict.fromkeys(map(self._block_of, blocks)))
        self._pool.lease(leased)
        self.in_flight_count += 1
        return leased

    def _release(self, blocks: tuple[int, ...]) -> None:
        self._pool.release(blocks)
        self._leave()

    def _quarantine(self, blocks: tuple[int, ...]) -> None:
        count = self._pool.quarantine(blocks)
        self._on_quarantine(count)
        _log.error("%d blocks are quarantined: a transfer did not settle in time", count)
        self._leave()

    def _leave(self) -> None:
        self.in_flight_count -= 1
        if not self.in_flight_count:
            self._idle.set()

    async def drain(self) -> None:
        """Return once no transfer holds blocks; bounded by deadlines plus `drain_s` each.

        Grants must have been ended by their owners. What is in quarantine is not waited for.
        Cancelled, it leaves everything as it is.
        """
        while self.in_flight_count:
            self._idle = trio.Event()
            await self._idle.wait()


@asynccontextmanager
async def open_block_leases(
    pool: BlockPool,
    *,
    drain_s: float = 10.0,
    on_quarantine: Callable[[int], None] = lambda _: None,
    on_readmit: Callable[[int], None] = lambda _: None,
    rng: random.Random,
    block_of: Callable[[int], int] = lambda block: block,
    inquiries: Inquiries | None = None,
) -> AsyncIterator[BlockLeases]:
    """Follow the transfers of `pool` until the block is left.

    Whatever is not settled by then is quarantined; `drain` first to give it time. `rng` makes the
    tickets: `env.rng`. `block_of` says which block of the pool a plane's block is a part of, where
    a layout keeps the parts of a block apart (`KvMemory.block_of`). With `inquiries` peers are
    asked what became of their tickets, and answered what became of ours; its plane must be open
    longer.
    """
    async with open_nursery() as nursery:
        leases = BlockLeases(
            pool, nursery, drain_s, on_quarantine, on_readmit, rng, block_of, inquiries
        )
        with inquiries.plane.answering(leases.tickets.is_settled) if inquiries else nullcontext():
            try:
                yield leases
            finally:
                nursery.cancel_scope.cancel()
