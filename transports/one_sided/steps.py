"""What libraries of one-sided transfers are asked to do: the steps of a transfer, and of a look.

A *backend* (NIXL, Mooncake) can do three things: read a few bytes of a peer's access page, move
blocks, and tell the peer something. A transfer is a generator of such steps (`take_steps`) that
the backend runs in a thread of its own, where it may block: check the page, move a chunk, check
again, confirm. What a chunk brought counts only if nothing was withdrawn meanwhile.

Who submits them is `mover.py`; the page is `protocol/transfer/access_page.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import StaleMemoryError, TrinamoError
from trinamo.runtime.planes import Transfer
from trinamo.runtime.protocol.transfer.access_page import (
    DIRECTORY_BYTES,
    HEADER_BYTES,
    TransferDone,
    bitmap_range,
    check_bitmap,
    check_header,
    encode_completion,
    find_ticket,
)
from trinamo.runtime.protocol.transfer.description import Direction, pool_numbers

from .memory import SLOT_BYTES, Memory, OneSidedRemote, allocate

SMALL_BYTES: Final = 64 << 10
"""A transfer of up to this may be begun on the event loop: a copy of about 10 us."""


@attrs.frozen
class ReadPage:
    """Read `length` bytes at `offset` of the page into the scratch slot of the job."""

    remote: OneSidedRemote
    offset: int
    length: int


@attrs.frozen
class MoveBlocks:
    """Move the blocks `start` to `stop` of the transfer's lists."""

    transfer: Transfer
    start: int
    stop: int


@attrs.frozen
class Tell:
    """Send an encoded `TransferDone` to the peer, after everything moved before it has arrived."""

    remote: OneSidedRemote
    notice: bytes


Step = ReadPage | MoveBlocks | Tell
Steps = Generator[Step, None, None]


class BackendJob(ABC):
    """What a backend runs: its steps in order, one at a time."""

    is_small = False
    """Whether all its steps together are so short that the event loop may take them."""

    def __init__(
        self, incarnation: str, slot: int, steps: Steps, give_back: Callable[[int], None]
    ) -> None:
        self.incarnation = incarnation
        """The peer it is with."""
        self.slot = slot
        """Which scratch slot is its own."""
        self.steps = steps
        """Called from the backend's thread only; an error of a step is not thrown in."""
        self._give_back = give_back

    @abstractmethod
    def fail(self, error: TrinamoError) -> None:
        """It is over, but a step may still be under way: `finish` follows, or never does."""

    @abstractmethod
    def finish(self, error: TrinamoError | None) -> None:
        """No step is under way any more, nor will be. Called once, in trio's thread."""


class Backend(ABC):
    """One library in this process. Its own threads, no regions or generations."""

    name: str
    """Its name in configuration and descriptions."""

    def __init__(self, path: str, slot_count: int) -> None:
        self.path = path
        """How the bytes go, for reports."""
        self.slot_count = slot_count
        """How many jobs may run at once."""
        self.slots, self.scratch = allocate(slot_count * SLOT_BYTES)
        """`slot_count` slots of `SLOT_BYTES`, which `start` registers with the library."""
        # Nothing is registered yet, so nobody can have been granted anything.
        self.on_told: Callable[[str, bytes], None] = lambda _peer, _message: None
        """Called in trio's thread with the name of a peer, and what it tells us."""

    @abstractmethod
    async def start(self) -> None:
        """Start the threads and register the scratch slots; called once, before all others."""

    @abstractmethod
    async def close(self) -> bool:
        """End the threads and let go of the library; whether bytes may move all the same.

        Called once, also if `start` failed. Bounded, and never cancelled.
        """

    @abstractmethod
    def address(self) -> bytes:
        """How peers reach us, now that this is registered."""

    @abstractmethod
    async def register(self, memory: Memory) -> None:
        """Register a range; `TransferError` if the library refuses it."""

    @abstractmethod
    async def deregister(self, memory: Memory) -> None:
        """Give a range back; no error for one that is unknown."""

    @abstractmethod
    async def connect(self, remote: OneSidedRemote) -> None:
        """Learn how to reach the peer; repeated, it learns anew what was lost."""

    @abstractmethod
    async def forget(self, incarnation: str) -> None:
        """Drop what belongs to the peer, once its last job has finished."""

    @abstractmethod
    def submit(self, job: BackendJob) -> None:
        """Run a job; never waits."""


def look_at(
    remote: OneSidedRemote, slot: memoryview, *, any_generation: bool = True
) -> Generator[ReadPage, None, bool]:
    """Read the header of the page and check it; whether the region needs a ticket."""
    slot[:HEADER_BYTES] = bytes(HEADER_BYTES)
    yield ReadPage(remote, 0, HEADER_BYTES)
    return check_header(slot, remote.description, any_generation=any_generation)


def _admit(transfer: Transfer, slot: memoryview, blocks: Sequence[int]) -> Steps:
    """Refuse what the owner's page does not allow now."""
    remote: OneSidedRemote = transfer.remote
    if transfer.ticket:
        length = HEADER_BYTES + DIRECTORY_BYTES
        slot[:length] = bytes(length)
        yield ReadPage(remote, 0, length)
        needs_ticket = check_header(slot, remote.description, any_generation=False)
    else:
        needs_ticket = yield from look_at(remote, slot, any_generation=False)
    if not needs_ticket:
        return
    if not transfer.ticket:
        raise StaleMemoryError("the ticket is unknown or was revoked")
    with slot[HEADER_BYTES : HEADER_BYTES + DIRECTORY_BYTES] as directory:
        is_target = transfer.direction is Direction.WRITE
        place = find_ticket(directory, transfer.ticket, is_target=is_target)
    if not blocks:
        return
    there = remote.description
    blocks = pool_numbers(blocks, there.pool_blocks, there.parts)
    offset, length = bitmap_range(there.pool_blocks, place, blocks)
    slot[:length] = bytes(length)
    yield ReadPage(remote, offset, length)
    check_bitmap(slot, blocks)


class Look(BackendJob):
    """A job that only reads the page, to see who answers."""

    def __init__(
        self,
        remote: OneSidedRemote,
        slot: int,
        view: memoryview,
        give_back: Callable[[int], None],
    ) -> None:
        super().__init__(remote.description.incarnation, slot, self._take(remote, view), give_back)
        self.error: TrinamoError | None = None
        self.done = trio.Event()

    def _take(self, remote: OneSidedRemote, view: memoryview) -> Steps:
        yield from look_at(remote, view)

    def fail(self, error: TrinamoError) -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()

    def finish(self, error: TrinamoError | None) -> None:
        if error is not None:
            self.fail(error)
        self._give_back(self.slot)
        self.done.set()


class Move(BackendJob):
    """The job of one transfer; once that is over it takes no further step, but ends the one it is at."""

    def __init__(
        self,
        transfer: Transfer,
        slot: int,
        view: memoryview,
        chunk_blocks: int,
        give_back: Callable[[int], None],
    ) -> None:
        steps = take_steps(transfer, view, chunk_blocks)
        super().__init__(transfer.there.incarnation, slot, steps, give_back)
        self._transfer = transfer
        self.is_small = transfer.byte_count <= SMALL_BYTES and transfer.local.synchronize is None

    def fail(self, error: TrinamoError) -> None:
        self._transfer.fail(error)

    def finish(self, error: TrinamoError | None) -> None:
        if error is None:
            self._transfer.succeed(is_verified=False)
        else:
            self._transfer.fail(error)
        self._transfer.settle()
        self._give_back(self.slot)


def take_steps(transfer: Transfer, slot: memoryview, chunk_blocks: int) -> Steps:
    """A transfer from its first look at the page to its notification.

    The page is looked at before and after every `chunk_blocks` blocks.
    """
    count, blocks = transfer.block_count, transfer.remote_blocks
    synchronize = transfer.local.synchronize
    if synchronize is not None:
        synchronize()
    for start in range(0, max(1, count), chunk_blocks):
        stop = min(count, start + chunk_blocks)
        yield from _admit(transfer, slot, blocks[start:stop])
        if transfer.is_over:
            return
        if stop > start:
            yield MoveBlocks(transfer, start, stop)
            # What was read of memory that was withdrawn meanwhile may be anything, and what was
            # written there may be anybody's: neither is confirmed.
            yield from _admit(transfer, slot, blocks[start:stop])
        if synchronize is not None:
            synchronize()
        if not transfer.confirm(stop):
            return
    if transfer.notify is not None:
        said = TransferDone(transfer.there.region, transfer.ticket, transfer.notify)
        yield Tell(transfer.remote, encode_completion(said))
