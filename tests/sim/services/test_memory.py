"""What one-sided memory does that messages do not: it moves while nobody runs, and lands late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    KilledError,
    StaleMemoryError,
)
from trinamo.runtime.planes import MemoryRegion, RemoteMemory, TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.sim import Network, SeedChoices, SimEnv, World
from trinamo.sim.services import MemoryFabric
from trinamo.transports.memory.transfer import MemoryMover, open_memory_transfer_plane

BLOCK, BLOCKS = 1024, 32
ALL = list(range(BLOCKS))
READ, WRITE = Direction.READ, Direction.WRITE


class Pair:
    """Two hosts with a page of memory each; the story is told on `decode`."""

    plane: TransferPlane[MemoryMover]
    local: MemoryRegion
    remote: RemoteMemory
    owned: MemoryRegion

    def __init__(self, *, is_fenced: bool = True) -> None:
        self.world = World(SeedChoices(1), ambient="raise")
        self.network = Network(self.world)
        self.fabric = MemoryFabric(self.world, self.network, is_fenced=is_fenced)
        self.here, self.there = bytearray(BLOCK * BLOCKS), bytearray(b"x" * BLOCK * BLOCKS)
        self._description = b""

    async def own(self) -> None:
        # Each life has dice of its own, or it would draw its predecessor's name.
        life = f"prefill.{self.world.host('prefill').generation}"
        async with open_memory_transfer_plane(self.fabric, SimEnv(self.world, life)) as plane:
            self.owned = await plane.register(self.there, block_bytes=BLOCK)
            self._description = self.owned.describe()
            await trio.sleep_forever()

    async def connect(self) -> RemoteMemory:
        return await self.plane.connect(self._description)

    def play(self, story: Callable[[Pair], Awaitable[None]]) -> str:
        async def decode() -> None:
            await trio.sleep(0.1)
            async with open_memory_transfer_plane(
                self.fabric, SimEnv(self.world, "decode")
            ) as plane:
                self.plane = plane
                self.local = await plane.register(self.here, block_bytes=BLOCK)
                self.remote = await self.connect()
                await story(self)

        async def main() -> None:
            self.world.boot("prefill", self.own)
            await self.world.boot("decode", decode).ended.wait()

        return self.world.run(main)

    def start(self, direction: Direction, *, deadline_s: float = 30):  # type: ignore[no-untyped-def]
        return self.plane.start(direction, self.local, ALL, self.remote, ALL, deadline_s=deadline_s)

    def landed(self) -> int:
        return sum(self.here[block * BLOCK] == ord("x") for block in ALL)


def test_a_paused_owner_does_not_hold_up_a_read() -> None:
    async def story(pair: Pair) -> None:
        pair.world.pause("prefill")
        report = await pair.start(READ).wait()
        assert report.block_count == pair.landed() == BLOCKS

    Pair().play(story)


def test_an_owner_that_is_killed_mid_transfer_leaves_a_part() -> None:
    async def story(pair: Pair) -> None:
        transfer = pair.start(READ)
        await trio.sleep(0.004)
        pair.world.kill("prefill")
        with pytest.raises(DisconnectedError):
            await transfer.wait()
        await transfer.wait_settled()
        assert 0 < transfer.confirmed_count == pair.landed() < BLOCKS
        with pytest.raises(ConnectError):
            await pair.plane.probe(pair.remote)

    Pair().play(story)


def test_a_cut_shorter_than_the_adapter_s_patience_only_delays() -> None:
    async def story(pair: Pair) -> None:
        transfer = pair.start(READ)
        pair.network.cut("decode", "prefill")
        pair.world.after(2.0, pair.network.heal, "decode", "prefill")
        await transfer.wait()
        assert trio.current_time() > 2.0
        transfer = pair.start(WRITE)
        pair.network.cut("decode", "prefill")
        with pytest.raises(DisconnectedError):
            await transfer.wait()

    Pair().play(story)


def test_what_is_on_its_way_lands_after_the_abort_and_before_it_is_settled() -> None:
    """S12: whoever uses the blocks again before the transfer is settled loses what it wrote."""

    async def story(pair: Pair) -> None:
        transfer = pair.start(READ)
        await trio.sleep(0.0035)
        transfer.abort()
        with pytest.raises(KilledError):
            await transfer.wait()
        at_abort = pair.landed()
        assert not transfer.is_settled
        await transfer.wait_settled()
        assert pair.landed() == at_abort + pair.fabric.window
        settled = bytes(pair.here)
        await trio.sleep(5)
        assert bytes(pair.here) == settled

    Pair().play(story)


def test_a_deadline_passes_while_the_link_is_cut_and_the_blocks_are_settled_later() -> None:
    async def story(pair: Pair) -> None:
        transfer = pair.start(READ, deadline_s=1.0)
        pair.network.cut("decode", "prefill")
        with pytest.raises(DeadlineError):
            await transfer.wait()
        assert not transfer.is_settled
        await transfer.wait_settled()
        assert trio.current_time() > pair.fabric.give_up_s

    Pair().play(story)


def test_a_restarted_owner_is_another_incarnation() -> None:
    async def story(pair: Pair) -> None:
        stale = pair._description
        pair.world.kill("prefill")
        pair.world.boot("prefill", pair.own)
        await trio.sleep(0.1)
        with pytest.raises(StaleMemoryError):
            await pair.plane.connect(stale)
        with pytest.raises(DisconnectedError):
            await pair.start(READ).wait()
        pair.remote = await pair.connect()
        await pair.start(READ).wait()

    Pair().play(story)


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_stale_generation_is_refused_before_a_block_moves(is_fenced: bool) -> None:
    async def story(pair: Pair) -> None:
        assert pair.owned.is_fenced is is_fenced
        pair.owned.renew()
        with pytest.raises(StaleMemoryError):
            await pair.start(WRITE).wait()
        assert pair.there[0] == ord("x")

    Pair(is_fenced=is_fenced).play(story)


@pytest.mark.parametrize("is_fenced", [True, False])
def test_what_is_withdrawn_on_the_way_is_refused_where_memory_is_fenced_and_unconfirmed_elsewhere(
    is_fenced: bool,
) -> None:
    """Without a fence the owner's page is read before and after, and nothing stops what moves."""

    async def story(pair: Pair) -> None:
        transfer = pair.start(WRITE)
        while not transfer.was_admitted:
            await trio.sleep(0.0001)
        assert pair.there[0] == ord("x")
        pair.owned.renew()
        with pytest.raises(StaleMemoryError):
            await transfer.wait()
        await transfer.wait_settled()
        assert (pair.there[0] == 0) is not is_fenced
        assert transfer.confirmed_count == 0

    Pair(is_fenced=is_fenced).play(story)


def test_the_same_seed_gives_the_same_run() -> None:
    async def story(pair: Pair) -> None:
        await pair.start(READ).wait()

    assert Pair().play(story) == Pair().play(story)
