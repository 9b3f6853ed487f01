"""Blocks lent to a peer, and whether it has let go of them: we ask those that we lent to, and answer those who lent to us.

Needed only where a peer may write and the backend does not fence: there a grant that ends leaves
one question, whether the peer can still write. It is asked, again and again, until the answer
proves that it cannot (`protocol/transfer/settlement.py`). `leases.py` keeps the blocks until then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from ...errors import StaleMemoryError
from ...planes.settlement import InquiryReport, SettlementPlane
from ...protocol.transfer.settlement import (
    PATHLESS,
    PROOFS,
    InquiryResult,
    PeerDescriptor,
    PeerStatus,
    status_of,
)


@attrs.define(eq=False)
class Grant:
    """Our blocks lent to one peer, by a ticket that nobody else knows.

    It ends once: when the peer is done, or by `withdraw`, which its time to live calls, too.
    """

    blocks: tuple[int, ...]
    """As the pool numbers them."""
    ticket: int
    """What the peer's transfers must carry."""
    _on_end: Callable[[Grant], None]
    _needs_proof: bool
    is_proven: bool = attrs.field(default=False, init=False)
    """Whether the peer has proven that it stopped; what was on its way still has to land."""
    _heard: trio.Event = attrs.field(factory=trio.Event, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    _settled: trio.Event = attrs.field(factory=trio.Event, init=False)
    _message: bytes | None = attrs.field(default=None, init=False)

    @property
    def is_settled(self) -> bool:
        """Whether the blocks may be used again, for all that this peer can do."""
        return self._settled.is_set()

    async def wait_settled(self) -> None:
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


_PAUSE_MIN_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0
_SLOW_PAUSE_MAX_S: Final = 30.0
_LOOK_S: Final = 2.0
"""How often the path to a peer is looked at while it may write blocks of ours."""
_QUIESCE_S: Final = 0.5
_SILENCE_MAX_S: Final = 120.0
"""The longest that Linux pauses between two attempts to send a packet again (TCP_RTO_MAX)."""
_SLICES: Final = 10
_KNOWN_MAX: Final = 4096


async def _ignore(_: PeerDescriptor) -> None:
    await trio.lowlevel.checkpoint()


@attrs.define(eq=False)
class Inquiries:
    """Asks peers about tickets. Owns no task; made once for one `BlockLeases`.

    Who asks are the grants that a peer may write to without a fence, so they are bounded as grants
    are. Each question has a connection of its own; one peer is asked one at a time, so that what
    many ask of a frozen process does not fill its queue.
    """

    plane: SettlementPlane
    timeout_s: float = 2.0
    """Of one question."""
    on_status: Callable[[PeerStatus], None] = lambda _: None
    """Told of every answer, for counting."""
    on_gone: Callable[[PeerDescriptor], Awaitable[None]] = _ignore
    """Closes what we have open to a peer that has ended. Must be bounded."""
    _known: OrderedDict[str, str] = attrs.field(factory=OrderedDict)
    """By incarnation, where it has answered: there, and only there, a refusal speaks of it."""
    _paths: dict[str, Path] = attrs.field(factory=dict)
    """To the peers that somebody asks, or lends to."""

    async def meet(self, peer: PeerDescriptor) -> bool:
        """Learn where this peer answers; whether it has, now or before.

        One that dies before it was met cannot be proven dead, and costs its blocks. Takes
        `timeout_s` and the questions that others are asking it.
        """
        await trio.lowlevel.checkpoint()
        with self.path_to(peer, trio.current_time()) as path:
            if peer.incarnation not in self._known:
                await path.ask(0, unless=lambda: peer.incarnation in self._known)
        return peer.incarnation in self._known

    @contextmanager
    def path_to(self, peer: PeerDescriptor, since: float) -> Iterator[Path]:
        """The way to a peer, as all who lend to it `since` then see it; kept while anybody does."""
        path = self._paths.setdefault(peer.incarnation, Path(self, peer, since))
        path.users += 1
        try:
            yield path
        finally:
            path.users -= 1
            if not path.users:
                del self._paths[peer.incarnation]

    async def inquire(self, peer: PeerDescriptor, ticket: int) -> tuple[InquiryReport, PeerStatus]:
        """Ask once, and read the result."""
        where = self._known.get(peer.incarnation, peer.address)
        found = await self.plane.inquire(where, peer.incarnation, ticket, timeout_s=self.timeout_s)
        if found.result in (InquiryResult.SAYS_SETTLED, InquiryResult.SAYS_MOVING):
            self._known[peer.incarnation] = found.reached
            self._known.move_to_end(peer.incarnation)
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        return found, status_of(found.result, is_known=peer.incarnation in self._known)


@attrs.define(eq=False)
class Path:
    """The way to one peer, and from when on nothing that it has sent can be on it any more.

    A link that was cut keeps packets back, and a kernel doubles the pauses after which it tries
    them again, up to 120 s: what was lost in a cut may come about as long after its end. So every
    time in which the path was not seen to work is waited for once more. It is looked at while
    blocks are lent, so where it works that time is short.
    """

    _inquiries: Inquiries
    _peer: PeerDescriptor
    seen_at: float
    """When the path was last seen to work; at first when the first blocks are lent, since before
    that nothing of them was sent."""
    users: int = 0
    _quiet_at: float = 0.0
    _turn: trio.Lock = attrs.field(factory=trio.Lock)

    async def ask(
        self, ticket: int, *, unless: Callable[[], bool] = lambda: False
    ) -> PeerStatus | None:
        """Ask once, when it is our turn; None if by then there was no need to."""
        async with self._turn:
            if unless():
                return None
            asked_at = trio.current_time()
            found, status = await self._inquiries.inquire(self._peer, ticket)
        if found.result not in PATHLESS:
            gap_s = min(asked_at - self.seen_at, _SILENCE_MAX_S)
            self._quiet_at = max(self._quiet_at, asked_at + gap_s)
            self.seen_at = max(self.seen_at, asked_at)
        return status

    async def watch(self, grant: Grant) -> None:
        """Look at the path while the blocks are lent; return once the grant or the peer has ended."""
        status: PeerStatus | None = None
        while status is not PeerStatus.GONE:
            due_s = self.seen_at + _LOOK_S - trio.current_time()
            with trio.move_on_after(max(_PAUSE_MAX_S, due_s)):
                await grant.wait_ended()
                return
            status = await self.ask(
                grant.ticket, unless=lambda: trio.current_time() < self.seen_at + _PAUSE_MAX_S
            )

    async def prove(self, ticket: int, *, soon_s: float) -> None:
        """Return when the peer sends nothing more with `ticket`; may take for ever.

        What it has sent may still be on its way: `rest` waits for that. The peer is
        asked at once, then at growing intervals, of 1 s at most for the first `soon_s` seconds and
        of 30 s at most after them. The ticket must have been revoked before. Cancelled, it leaves
        nothing behind.
        """
        began_at, pause_s = trio.current_time(), _PAUSE_MIN_S
        while True:
            status = await self.ask(ticket)
            assert status is not None
            self._inquiries.on_status(status)
            if status in PROOFS:
                break
            await trio.sleep(pause_s)
            is_soon = trio.current_time() - began_at < soon_s
            pause_s = min(2 * pause_s, _PAUSE_MAX_S if is_soon else _SLOW_PAUSE_MAX_S)
        if status is PeerStatus.GONE:
            await self._inquiries.on_gone(self._peer)

    async def rest(self, ticket: int) -> None:
        """Let land what the peer has sent: what is on the path, in a kernel's buffers, in our own threads.

        A path that was cut may be cut again before what it kept back has come, which is later then. So
        it is looked at while much is left to wait for, or while it is not seen to work. The last of it
        is waited for in slices: a process of ours that is frozen meanwhile must not find the whole of
        it over when it wakes, while its threads and buffers have had no time.
        """
        # Each look at a peer that is frozen takes as much.
        brief_s = _LOOK_S + self._inquiries.timeout_s
        looked_at = self.seen_at

        def is_seen() -> bool:
            return self.seen_at >= looked_at

        while (left_s := max(0.0, self._quiet_at - trio.current_time())) > 0:
            if left_s <= brief_s and is_seen():
                break
            await trio.sleep(min(left_s, _PAUSE_MAX_S))
            looked_at = trio.current_time()
            await self.ask(ticket, unless=is_seen)
        for _ in range(_SLICES):
            await trio.sleep((_QUIESCE_S + left_s) / _SLICES)


class Tickets:
    """How many transfers of ours with each ticket are not settled: our answer. Never waits.

    Why SETTLED is the truth: an owner revokes the ticket, then asks. We count a transfer in the same
    synchronous stretch that starts it, so, seen by whoever asks, before it looks at the owner's
    access page. Each side writes before it reads, and so one of them sees the other: either the
    question finds the transfer counted, or the transfer looks at the page after the answer, which
    is after the revocation, and is refused. It stays counted between its later looks, until it is
    settled; one that never settles says MOVING for the life of the process.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def enter(self, ticket: int) -> None:
        """A transfer with this ticket starts; 0 is none."""
        if ticket:
            self._counts[ticket] = self._counts.get(ticket, 0) + 1

    def leave(self, ticket: int) -> None:
        """One that entered is settled."""
        if ticket:
            self._counts[ticket] -= 1
            if not self._counts[ticket]:
                del self._counts[ticket]

    def is_settled(self, ticket: int) -> bool:
        """Whether nothing of ours moves with it."""
        return ticket not in self._counts
