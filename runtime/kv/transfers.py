"""The life of blocks that move: leased until their transfer is settled, else quarantined.

A transfer that was abandoned may go on touching memory, so its blocks are followed by a task of
their own, whoever asked for it and however that ended. Here nothing is moved or chosen: that is
`transfer_router.py`; what settled means is in `planes/transfer.py`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import trio

from ..errors import TrinamoError
from ..planes import MemoryRegion, Transfer
from .pool import BlockPool

__all__ = ["BlockLeases", "Grant", "open_block_leases"]

_log = logging.getLogger("trinamo.transfer")


class BlockLeases:
    """The blocks of one pool that transfers may touch. Made by `open_block_leases`."""

    def __init__(
        self,
        pool: BlockPool,
        nursery: trio.Nursery,
        *,
        drain_s: float,
        on_quarantine: Callable[[int], None],
        dice: random.Random,
        block_of: Callable[[int], int],
    ) -> None:
        self._pool = pool
        self._block_of = block_of
        self._nursery = nursery
        self._drain_s = drain_s
        self._on_quarantine = on_quarantine
        self._dice = dice
        self._count = 0
        self._idle = trio.Event()

    @property
    def in_flight_count(self) -> int:
        """How many transfers and grants hold blocks."""
        return self._count

    def follow(self, transfer: Transfer, blocks: Sequence[int]) -> None:
        """Lease our `blocks` of a transfer that we started until it is settled. Never waits.

        The blocks are as the plane numbers them. They are quarantined if it is not settled
        `drain_s` seconds after it is over.
        """
        self._nursery.start_soon(self._follow, transfer, self._enter(blocks))

    async def _follow(self, transfer: Transfer, blocks: tuple[int, ...]) -> None:
        try:
            with suppress(TrinamoError):  # Whoever started it hears of it.
                await transfer.wait()
            with trio.move_on_after(self._drain_s):
                await transfer.wait_settled()
        finally:
            self._leave(blocks, is_settled=transfer.is_settled)

    def grant(self, region: MemoryRegion, blocks: Sequence[int]) -> Grant:
        """Let one peer move our `blocks`, leased until the grant ends. Never waits.

        Raises what the region raises, such as when it has as many tickets as it can; nothing is
        leased or granted then.
        """
        leased = self._enter(blocks)
        ticket = self._dice.getrandbits(62) + 1
        try:
            region.grant(ticket, blocks)
        except TrinamoError:
            region.revoke(ticket)
            self._leave(leased, is_settled=True)
            raise
        return Grant(self, region, leased, ticket)

    def end_grant(self, grant: Grant, *, is_settled: bool) -> None:
        """Give its blocks back, or see to it that they are quarantined unless it settles."""
        if is_settled:
            self._leave(grant.blocks, is_settled=True)
        else:
            self._nursery.start_soon(self._await_settled, grant)

    async def _await_settled(self, grant: Grant) -> None:
        try:
            with trio.move_on_after(self._drain_s):
                await grant.wait_settled()
        finally:
            self._leave(grant.blocks, is_settled=grant.is_settled)

    def _enter(self, blocks: Sequence[int]) -> tuple[int, ...]:
        leased = tuple(dict.fromkeys(map(self._block_of, blocks)))
        self._pool.lease(leased)
        self._count += 1
        return leased

    def _leave(self, blocks: tuple[int, ...], *, is_settled: bool) -> None:
        if is_settled:
            self._pool.release(blocks)
        else:
            count = self._pool.quarantine(blocks)
            self._on_quarantine(count)
            _log.error("%d blocks are quarantined: a transfer did not settle in time", count)
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def drain(self) -> None:
        """Return once no transfer holds blocks; bounded by deadlines plus `drain_s` each.

        Grants must have been ended by their owners. Cancelled, it leaves everything as it is.
        """
        while self._count:
            self._idle = trio.Event()
            await self._idle.wait()


class Grant:
    """Our blocks given to one peer's transfers, by a ticket that nobody else knows.

    It ends once, in one of two ways: `complete` when the peer has said that all is done, `withdraw`
    when we want no more of it.
    """

    def __init__(
        self, leases: BlockLeases, region: MemoryRegion, blocks: tuple[int, ...], ticket: int
    ) -> None:
        self.blocks = blocks
        """As the pool numbers them."""
        self.ticket = ticket
        """What the peer's transfers must carry."""
        self._leases, self._region = leases, region
        self._has_ended = False
        self._settled = trio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether the peer cannot touch the blocks any more."""
        return self._settled.is_set()

    async def wait_settled(self) -> None:
        """Return once `is_settled`."""
        await self._settled.wait()

    def complete(self) -> None:
        """The peer's transfer is done. No effect on a grant that has ended."""
        self._settled.set()
        self._end()

    def withdraw(self) -> None:
        """Refuse the peer from now on; the blocks stay leased until it is sure to have stopped.

        Where the backend fences (`MemoryRegion.is_fenced`), that is now. Otherwise it is when
        `acknowledge` is called, and in quarantine they go if it is not in time.
        """
        if self._region.is_fenced:
            self._settled.set()
        self._end()

    def acknowledge(self) -> None:
        """The writer has said that its transfers are settled, or it is known to be gone."""
        self._settled.set()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._region.revoke(self.ticket)
            self._leases.end_grant(self, is_settled=self.is_settled)


@asynccontextmanager
async def open_block_leases(
    pool: BlockPool,
    *,
    drain_s: float = 10.0,
    on_quarantine: Callable[[int], None] = lambda _: None,
    dice: random.Random,
    block_of: Callable[[int], int] = lambda block: block,
) -> AsyncIterator[BlockLeases]:
    """Follow the transfers of `pool` until the block is left.

    Whatever is not settled by then is quarantined; `drain` first to give it time. `dice` makes the
    tickets: `env.rng`. `block_of` says which block of the pool a plane's block is a part of, where
    a layout keeps the parts of a block apart (`KvMemory.block_of`).
    """
    async with trio.open_nursery() as nursery:
        try:
            yield BlockLeases(
                pool,
                nursery,
                drain_s=drain_s,
                on_quarantine=on_quarantine,
                dice=dice,
                block_of=block_of,
            )
        finally:
            nursery.cancel_scope.cancel()
