"""Two ends of a backend with memory of their own, and blocks that one has granted to the other."""

from __future__ import annotations

import random
from typing import Any

import attrs
import trio
import trio.testing

from tests.conformance.transfer.backends import (
    BLOCKS,
    Pages,
    TransferBackend,
)
from trinamo.runtime.planes import MemoryRegion, RemoteMemory, Transfer, TransferPlane
from trinamo.runtime.protocol.transfer.description import (
    Direction,
)

READ, WRITE = Direction.READ, Direction.WRITE
DEADLINE_S = 20.0


@attrs.frozen
class Ends:
    """Two planes, a region of each, and the first one connected to the second's."""

    backend: TransferBackend
    ours: TransferPlane
    theirs: TransferPlane
    here: Pages
    there: Pages
    local: MemoryRegion
    owned: MemoryRegion
    remote: RemoteMemory

    def start(
        self, direction: Direction, here: list[int], there: list[int], **more: Any
    ) -> Transfer:
        more.setdefault("deadline_s", DEADLINE_S)
        return self.ours.start(direction, self.local, here, self.remote, there, **more)

    async def move(
        self, direction: Direction, here: list[int], there: list[int], **more: Any
    ) -> None:
        """Move and expect what must be where afterwards."""
        for a, b in zip(here, there, strict=True):
            if direction is READ:
                self.here.expect(a, self.there.block(b))
            else:
                self.there.expect(b, self.here.block(a))
        transfer = self.start(direction, here, there, **more)
        report = await transfer.wait()
        assert transfer.is_settled
        assert transfer.confirmed_count == report.block_count == len(here)
        assert report.byte_count == len(here) * self.local.description.block_bytes
        assert report.direction is direction
        assert report.backend == self.ours.backend
        assert report.is_verified is self.backend.is_verified
        self.check()

    def check(self) -> None:
        assert self.here.memory == self.here.expected
        assert self.there.memory == self.there.expected


def scattered(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(BLOCKS), count)


@attrs.frozen
class Granted:
    """A region of the peer's whose blocks are granted to tickets, and what was heard of each."""

    ends: Ends
    owned: MemoryRegion
    remote: RemoteMemory
    heard: list[bytes]

    async def move(self, direction: Direction, blocks: list[int], **more: Any) -> None:
        await self.ends.ours.start(
            direction,
            self.ends.local,
            blocks,
            self.remote,
            blocks,
            **{"deadline_s": DEADLINE_S, "ticket": 77, **more},
        ).wait()

    async def hears(self, *messages: bytes) -> bool:
        """Whether these have been told, and no others; one-sided backends look now and then."""
        with trio.move_on_after(60 if messages else 0.05):
            while len(self.heard) < max(1, len(messages)):
                await trio.sleep(0.005)
        return self.heard == list(messages)
