"""A peer that discovery does not name is kept while it answers, and seen off once it does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
from trio.testing import MockClock

from trinamo.runtime.kv.transfer.farewells import Farewells

GRACE_S = 15.0


@attrs.define
class Peer:
    """One life of a peer, as the process and the store would tell of it."""

    answers: bool = True
    is_named: bool = False
    asking: trio.Event = attrs.field(factory=trio.Event)
    answer: trio.Event = attrs.field(factory=trio.Event)
    forgotten_at: list[float] = attrs.field(factory=list)

    async def ask_it(self, _: str) -> bool:
        await trio.lowlevel.checkpoint()
        return self.answers

    async def ask_the_store(self, _: str) -> bool:
        is_named = self.is_named
        self.asking.set()
        await self.answer.wait()
        return is_named

    async def forget(self, _: str) -> None:
        await trio.lowlevel.checkpoint()
        self.forgotten_at.append(trio.current_time())


@asynccontextmanager
async def seeing_off(peer: Peer) -> AsyncIterator[Farewells]:
    async with trio.open_nursery() as nursery:
        yield Farewells(
            nursery,
            grace_s=GRACE_S,
            answers=peer.ask_it,
            is_named=peer.ask_the_store,
            forget=peer.forget,
        )


async def test_one_that_does_not_answer_is_forgotten_at_once(autojump_clock: MockClock) -> None:
    peer, began_at = Peer(answers=False), trio.current_time()
    async with seeing_off(peer) as farewells:
        await farewells.begin("life")
    assert peer.forgotten_at == [began_at]


async def test_one_that_is_named_again_is_kept(autojump_clock: MockClock) -> None:
    peer = Peer(is_named=True)
    peer.answer.set()
    async with seeing_off(peer) as farewells:
        await farewells.begin("life")
    assert peer.forgotten_at == []


async def test_one_that_is_never_named_again_is_forgotten_once_the_grace_is_over(
    autojump_clock: MockClock,
) -> None:
    peer, began_at = Peer(), trio.current_time()
    peer.answer.set()
    async with seeing_off(peer) as farewells:
        await farewells.begin("life")
        await farewells.begin("life")
    assert peer.forgotten_at == [began_at + GRACE_S]


async def test_one_that_goes_missing_again_while_the_store_is_asked_is_not_taken_for_back(
    autojump_clock: MockClock,
) -> None:
    """The answer says that it is there, but is older than the news that it is not."""
    peer = Peer(is_named=True)
    async with seeing_off(peer) as farewells:
        await farewells.begin("life")
        await peer.asking.wait()
        peer.is_named = False
        await farewells.begin("life")
        peer.answer.set()
    assert len(peer.forgotten_at) == 1
