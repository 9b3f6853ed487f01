"""Blocks of ours given to one peer, and how it is proven that the peer has let go of them.

A grant ends when the peer has said that all is done, or when we want no more of it. In the second
case a backend that does not fence leaves one question: can the peer still write? It is asked, again
and again, until the answer proves that it cannot (`protocol/transfer/settlement.py`). Only then,
and a little later, are the blocks used again; `leases.py` keeps them until then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import attrs
import trio

from ...errors import StaleMemoryError
from ...planes import MemoryRegion
from ...planes.settlement import Finding, SettlementPlane
from ...protocol.transfer.settlement import PATHLESS, PROOFS, PeerCard, Sign, Standing, standing_of

if TYPE_CHECKING:
    from .leases import BlockLeases

__all__ = ["Grant", "Inquiries", "linger"]

_PAUSE_MIN_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0
_SLOW_PAUSE_MAX_S: Final = 30.0
_LINGER_S: Final = 0.5
_SILENCE_MAX_S: Final = 120.0
"""The longest that Linux pauses between two attempts to send a packet again (TCP_RTO_MAX)."""
_SLICES: Final = 10
_KNOWN_MAX: Final = 4096


class Grant:
    """Our blocks given to one peer's transfers, by a ticket that nobody else knows.

    It ends once, in one of two ways: `completed` returns, when the peer's transfer has said that all
    is done, or `withdraw`, when we want no more of it.
    """

    def __init__(
        self,
        leases: BlockLeases,
        region: MemoryRegion,
        blocks: tuple[int, ...],
        ticket: int,
        card: PeerCard | None = None,
    ) -> None:
        self.blocks = blocks
        """As the pool numbers them."""
        self.ticket = ticket
        """What the peer's transfers must carry."""
        self.card = card
        """Whom to ask whether it has let go of the blocks."""
        self.made_at = trio.current_time()
        self.is_proven = False
        """Whether the peer has proven that it stopped; what was on its way still has to land."""
        self._leases, self._region = leases, region
        self._has_ended = False
        self._settled, self._heard = trio.Event(), trio.Event()
        self._message: bytes | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the peer cannot touch the blocks any more."""
        return self._settled.is_set()

    async def wait_settled(self) -> None:
        """Return once `is_settled`."""
        await self._settled.wait()

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
        self.complete()
        return self._message

    def complete(self) -> None:
        """The peer has told us by another way, which we trust, that all is done.

        No effect on a grant that has ended. Prefer `completed`.
        """
        self._settled.set()
        self._end()

    def withdraw(self) -> None:
        """Refuse the peer from now on; the blocks stay leased until it is sure to have stopped.

        Where the backend fences (`MemoryRegion.is_fenced`), that is now. Otherwise it is when the
        peer on the `card` proves it, or when `acknowledge` is called; and until then they go into
        quarantine if it is not in time.
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
            self._heard.set()
            self._region.revoke(self.ticket)
            self._leases.end_grant(self, is_settled=self.is_settled)


async def _ignore(_: PeerCard) -> None:
    await trio.lowlevel.checkpoint()


@attrs.define
class _Calm:
    """From when on nothing of one grant can be on its way any more, once its peer has stopped.

    A link that was cut keeps packets back, and a kernel doubles the pauses after which it tries
    them again, up to 120 s: what was lost in a cut may come about as long after its end. So every
    time in which the path was not seen to work is waited for once more.
    """

    seen_at: float
    """When the path was last seen to work; at first when the grant was made, since before that
    nothing of it was sent."""
    at: float = 0.0

    def see(self, now: float) -> None:
        """The path works."""
        self.at = max(self.at, now + min(now - self.seen_at, _SILENCE_MAX_S))
        self.seen_at = now


@attrs.define(eq=False)
class Inquiries:
    """Asks peers about tickets. Owns no task; made once for one `BlockLeases`.

    The tasks that ask are one for each grant that was withdrawn, so they are bounded as grants are.
    Each question has a connection of its own; one life is asked one at a time, so that what many
    ask of a frozen process does not fill its queue.
    """

    plane: SettlementPlane
    timeout_s: float = 2.0
    """Of one question."""
    on_standing: Callable[[Standing], None] = lambda _: None
    """Told of every answer, for counting."""
    on_gone: Callable[[PeerCard], Awaitable[None]] = _ignore
    """Closes what we have open to a life that has ended. Must be bounded."""
    _known: OrderedDict[str, str] = attrs.field(factory=OrderedDict)
    """By life, where it has answered: there, and only there, a refusal speaks of it."""
    _turns: dict[str, trio.Lock] = attrs.field(factory=dict)
    """Of the lives that are being asked."""

    async def meet(self, card: PeerCard) -> bool:
        """Learn where this life answers; whether it has, now or before.

        A life that dies before it was met cannot be proven dead, and costs its blocks. Takes
        `timeout_s` and the questions that others are asking it.
        """
        await trio.lowlevel.checkpoint()
        if card.life not in self._known:
            async with self._turn(card.life):
                if card.life not in self._known:
                    await self._ask(card, 0)
        return card.life in self._known

    async def meet_in_passing(self, card: PeerCard) -> None:
        """As `meet`, unless the life is being asked by somebody else."""
        await trio.lowlevel.checkpoint()
        if card.life not in self._turns:
            await self.meet(card)

    async def prove(
        self, card: PeerCard, ticket: int, *, granted_at: float, soon_s: float
    ) -> float:
        """Return when the peer sends nothing more with `ticket`; may take for ever.

        What it has sent may still be on its way: the answer is how long to `linger` for it. The
        peer is asked at once, then at growing intervals, of 1 s at most for the first `soon_s`
        seconds and of 30 s at most after them. The ticket must have been revoked before. Cancelled,
        it leaves nothing behind.
        """
        began_at, calm = trio.current_time(), _Calm(granted_at)
        pause_s = _PAUSE_MIN_S
        while True:
            async with self._turn(card.life):
                asked_at = trio.current_time()
                finding = await self._ask(card, ticket)
            if finding.sign not in PATHLESS:
                calm.see(asked_at)
            standing = standing_of(finding.sign, is_known=card.life in self._known)
            self.on_standing(standing)
            if standing in PROOFS:
                break
            await trio.sleep(pause_s)
            is_soon = trio.current_time() - began_at < soon_s
            pause_s = min(2 * pause_s, _PAUSE_MAX_S if is_soon else _SLOW_PAUSE_MAX_S)
        if standing is Standing.GONE:
            await self.on_gone(card)
        return _LINGER_S + max(0.0, calm.at - trio.current_time())

    @asynccontextmanager
    async def _turn(self, life: str) -> AsyncIterator[None]:
        lock = self._turns.setdefault(life, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._turns.pop(life, None)

    async def _ask(self, card: PeerCard, ticket: int) -> Finding:
        where = self._known.get(card.life, card.address)
        finding = await self.plane.inquire(where, card.life, ticket, timeout_s=self.timeout_s)
        if finding.sign in (Sign.SAYS_SETTLED, Sign.SAYS_MOVING):
            self._known[card.life] = finding.reached
            self._known.move_to_end(card.life)
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        return finding


async def linger(linger_s: float) -> None:
    """Let land what has left the peer but not arrived: in a kernel's buffers, in our own threads.

    In slices: a process of ours that is frozen meanwhile must not find the whole of it over when it
    wakes, while its threads and buffers have had no time.
    """
    for _ in range(_SLICES):
        await trio.sleep(linger_s / _SLICES)
