"""Blocks of ours that one peer may move, until it has, or we want no more of it, or time is up.

A grant says who may touch which blocks. That they are not used again too early is seen to in
`leases.py`; how a peer proves that it has let go of them is in `settlement.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from ...errors import StaleMemoryError


class Grant:
    """Our blocks lent to one peer, by a ticket that nobody else knows.

    It ends once: when the peer is done, or by `withdraw`, which its time to live calls, too.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        ticket: int,
        on_end: Callable[[Grant], None],
        *,
        needs_proof: bool,
    ) -> None:
        self.blocks = blocks
        """As the pool numbers them."""
        self.ticket = ticket
        """What the peer's transfers must carry."""
        self.is_proven = False
        """Whether the peer has proven that it stopped; what was on its way still has to land."""
        self._on_end = on_end
        self._needs_proof = needs_proof
        self._heard, self._ended, self._settled = trio.Event(), trio.Event(), trio.Event()
        self._message: bytes | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the blocks may be used again, for all that this peer can do."""
        return self._settled.is_set()

    async def wait_settled(self) -> None:
        """Return once `is_settled`."""
        await self._settled.wait()

    async def wait_ended(self) -> None:
        """Return once the ticket is refused."""
        await self._ended.wait()

    def hear(self, message: bytes) -> None:
        """A transfer that showed our ticket says that it is done. Again, it changes nothing."""
        if self._message is None:
            self._message = message
            self._heard.set()

    async def completed(self) -> bytes:
        """Return the peer's `notify` once its transfer is done; the grant has ended then.

        Nobody can say so but who was given the ticket. Raises `StaleMemoryError` if the grant ends
        otherwise. Cancelled, it changes nothing, and hears the word later.
        """
        await self._heard.wait()
        if self._message is None:
            raise StaleMemoryError("the grant has ended before the peer was done")
        self.withdraw()
        return self._message

    def withdraw(self) -> None:
        """Let the peer begin nothing more. No effect on a grant that has ended; never waits.

        What it may still write keeps the blocks until it is proven that it does not.
        """
        if not self._ended.is_set():
            if self._message is not None or not self._needs_proof:
                self._settled.set()
            self._ended.set()
            self._heard.set()
            self._on_end(self)

    def settle(self) -> None:
        """It is proven that the peer has let go, and what it had sent has landed."""
        self._settled.set()
