"""Blocks granted to peers that answer, freeze, die, wake and are cut off are never freed too early."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import attrs
import trio
import trio.testing
from hypothesis import example, given, settings, strategies as st

from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.leases import BlockLeases, open_block_leases
from trinamo.runtime.kv.transfer.settlement import Grant, Inquiries
from trinamo.runtime.planes.settlement import InquiryReport, SettlementPlane
from trinamo.runtime.protocol.transfer.settlement import InquiryResult, PeerDescriptor

BLOCKS = 6
DEEDS = ("freeze", "thaw", "finish", "die", "restart", "cut", "heal", "withdraw", "trip")
LATE_S = 0.3
"""How long bytes are on their way over a path that works."""


@attrs.define
class Move:
    """One transfer of a peer into blocks of ours."""

    ticket: int
    lands_until: float = math.inf
    """When its last byte is there; unknown while it is under way."""


@attrs.define(eq=False)
class Peer:
    """A host with one process at a time, and the link to it. Time is trio's."""

    incarnation: str
    is_frozen: bool = False
    is_dead: bool = False
    is_cut: bool = False
    cut_at: float = 0.0
    trips: int = 0
    """So many of the next connections break in the middle."""
    moves: dict[int, Move] = attrs.Factory(dict)
    wants_finish: bool = False

    def may_write(self, ticket: int) -> bool:
        """Whether a byte may still arrive with this ticket."""
        move = self.moves.get(ticket)
        return move is not None and trio.current_time() < move.lands_until

    def do(self, deed: str) -> None:
        now = trio.current_time()
        if deed == "cut" and not self.is_cut:
            self.is_cut, self.cut_at = True, now
        elif deed == "heal" and self.is_cut:
            self.is_cut = False
            # What could not be sent is tried again after about as long as it has been tried for.
            again = min(now - self.cut_at, 100)
            for move in self.moves.values():
                if now < move.lands_until < math.inf:
                    move.lands_until = now + again
        elif deed == "trip":
            self.trips += 1
        elif self.is_dead:
            if deed == "restart":
                self.incarnation, self.is_dead, self.is_frozen = (
                    self.incarnation + "x",
                    False,
                    False,
                )
                self.wants_finish = False
        elif deed == "freeze":
            self.is_frozen = True
        elif deed == "thaw":
            self.is_frozen = False
        elif deed == "finish":
            self.wants_finish = True
        elif deed == "die":
            self.is_dead = True
            self._end()
        if self.wants_finish and not self.is_frozen and not self.is_dead:
            self._end()

    def _end(self) -> None:
        """Nothing is under way any more; the last bytes are on the link, or wait for it."""
        at = math.nextafter(math.inf, 0) if self.is_cut else trio.current_time() + LATE_S
        for move in self.moves.values():
            if move.lands_until == math.inf:
                move.lands_until = at

    def answer(self, incarnation: str, ticket: int) -> InquiryResult | None:
        """As the kernel and the process at the address would; None for silence."""
        if self.is_dead:
            return InquiryResult.REFUSED
        if self.trips:
            self.trips -= 1
            return InquiryResult.BROKEN
        if self.is_frozen:
            return None
        if incarnation != self.incarnation:
            return InquiryResult.REPLACED
        move = self.moves.get(ticket)
        is_settled = move is None or move.lands_until < math.inf
        return InquiryResult.SAYS_SETTLED if is_settled else InquiryResult.SAYS_MOVING


@attrs.define
class World(SettlementPlane):
    """Asks for us."""

    peers: dict[str, Peer]
    address: str = "ours"
    incarnation: str = "0"

    def __attrs_post_init__(self) -> None:
        SettlementPlane.__init__(self)

    async def inquire(
        self, address: str, incarnation: str, ticket: int, *, timeout_s: float
    ) -> InquiryReport:
        peer = self.peers[address]
        await trio.sleep(0.001)
        if peer.is_cut:
            await trio.sleep(timeout_s)
            return InquiryReport(InquiryResult.UNREACHED)
        result = peer.answer(incarnation, ticket)
        if result is None:
            await trio.sleep(timeout_s)
            return InquiryReport(InquiryResult.SILENT, address)
        await trio.sleep(0.001)
        return InquiryReport(result, "" if result is InquiryResult.REFUSED else address)


class Region:
    """Unfenced memory; the peer begins to move as soon as it has a ticket."""

    is_fenced = False

    def grant(
        self, ticket: int, blocks: object, on_complete: object, *, may_write: bool
    ) -> None: ...

    def revoke(self, ticket: int) -> None: ...


@attrs.frozen
class Deed:
    after_s: float
    peer: int
    what: str


SPANS = st.sampled_from([0.0, 0.01, 0.1, 0.4, 0.7, 1.5, 4.0, 12.0, 50.0])
SCRIPTS = st.lists(
    st.builds(Deed, SPANS, st.integers(0, 1), st.sampled_from(DEEDS)), min_size=3, max_size=25
)


@asynccontextmanager
async def open_leases(pool: BlockPool, world: World) -> AsyncIterator[BlockLeases]:
    async with open_block_leases(
        pool, drain_s=3, rng=random.Random(1), inquiries=Inquiries(world, timeout_s=1.0)
    ) as leases:
        yield leases


# A peer dies while its link is cut, is proven dead in a moment in which it is whole, and it is cut again.
CUT_TWICE = [
    *(Deed(0.1, 0, "freeze"), Deed(1.4, 0, "cut"), Deed(9.5, 0, "die"), Deed(0.0, 0, "heal")),
    *(Deed(0.01, 0, "cut"), Deed(8.0, 0, "freeze")),
]


@settings(max_examples=50, deadline=None)
@given(script=SCRIPTS)
@example(script=CUT_TWICE)
def test_no_block_is_free_while_its_peer_could_write_it_and_none_is_lost(
    script: list[Deed],
) -> None:
    """Free means that no byte can arrive any more; once all peers are dead, all blocks are free."""
    trio.run(run, script, clock=trio.testing.MockClock(autojump_threshold=0))


async def run(script: list[Deed]) -> None:
    peers = [Peer("a"), Peer("b")]
    world, pool = World({"at a": peers[0], "at b": peers[1]}), BlockPool(BLOCKS)
    async with open_leases(pool, world) as leases:
        grants: list[tuple[Grant, Peer]] = []
        for number in range(BLOCKS):
            peer = peers[number % 2]
            (block,) = pool.take(1) or [-1]
            card = PeerDescriptor("peer", f"at {peer.incarnation}", peer.incarnation)
            assert await leases.meet(card)
            grant = leases.grant(Region(), [block], card)  # type: ignore[arg-type]
            peer.moves[grant.ticket] = Move(grant.ticket)
            pool.give_back([block])
            grants.append((grant, peer))

        pool.on_change = partial(check, pool, grants)
        waiting = list(grants)
        for deed in script:
            await trio.sleep(deed.after_s)
            if deed.what == "withdraw" and waiting:
                waiting.pop(0)[0].withdraw()
            elif deed.what != "withdraw":
                peers[deed.peer].do(deed.what)
            check(pool, grants)
        for grant, _ in waiting:
            grant.withdraw()
        for peer in peers:
            peer.do("heal")
            peer.do("die")
        await trio.sleep(400)
        assert pool.free_count == BLOCKS


def check(pool: BlockPool, grants: list[tuple[Grant, Peer]]) -> None:
    counts = [pool.free_count, pool.used_count, pool.in_flight_count, pool.quarantined_count]
    assert min(counts) >= 0
    assert sum(counts) == BLOCKS
    for grant, peer in grants:
        if grant.is_settled:
            assert not peer.may_write(grant.ticket), "free, and bytes may arrive"
