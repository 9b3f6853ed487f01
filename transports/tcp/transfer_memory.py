"""Registered memory of the tcp transfer plane, and the flows of blocks in and out of it.

A `Flow` is one transfer's use of a region at this end. *Fencing* it is synchronous: it releases
the views that a pending system call would use, so not one byte is read from or written to the
blocks afterwards, even by a receive that has been woken up already. The link then discards what
still comes, or pads what it has announced. This is why `MemoryRegion.is_fenced` holds here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import msgspec
import trio
from typing_extensions import Buffer

from trinamo.runtime.errors import (
    CorruptedError,
    RemoteProtocolError,
    RequestError,
    StaleMemoryError,
    TrinamoError,
)
from trinamo.runtime.protocol.transfer import (
    BLOCK_BYTES_MAX,
    MemoryDescription,
    encode_description,
)
from trinamo.runtime.protocol.transfer_access import AccessTable
from trinamo.runtime.protocol.transfer_stream import SUM_BYTES

from .checksum import NO_CHECKSUM, PIECE_BYTES, Checksum

__all__ = ["SLICE_RUNS_MAX", "Flow", "TcpRegion"]

SLICE_RUNS_MAX: Final = 64
"""Descriptors of one system call; more than 64 were slower, not faster."""


class TcpRegion:
    """One registered region. Implements `MemoryRegion`."""

    is_fenced = True

    def __init__(
        self,
        memory: Buffer,
        *,
        block_bytes: int,
        needs_ticket: bool,
        describe: Callable[[int, int], MemoryDescription],
    ) -> None:
        if not 1 <= block_bytes <= BLOCK_BYTES_MAX:
            raise RequestError(f"blocks of {block_bytes} bytes; 1 to {BLOCK_BYTES_MAX} are moved")
        view = memoryview(memory)
        if view.readonly or not view.c_contiguous:
            raise RequestError("memory to register must be writable and contiguous")
        view = view.cast("B") if view.nbytes else view
        length = view.nbytes // block_bytes * block_bytes
        if not length:
            raise RequestError(f"memory of {view.nbytes} bytes holds no block of {block_bytes}")
        self.view: memoryview = view[:length]
        self._anchor = ctypes.c_char.from_buffer(self.view)
        self.base = ctypes.addressof(self._anchor)
        self.block_bytes = block_bytes
        self.access = AccessTable(length // block_bytes, needs_ticket=needs_ticket)
        self._flows: dict[int, Flow] = {}
        self._described = describe(self.base, length)

    @property
    def description(self) -> MemoryDescription:
        """With the generation as it is now."""
        if self._described.generation != self.access.generation:
            self._described = msgspec.structs.replace(
                self._described, generation=self.access.generation
            )
        return self._described

    def describe(self) -> bytes:
        """The description as bytes."""
        return encode_description(self.description)

    def renew(self) -> int:
        """Refuse all descriptions given out before; peers' flows end here."""
        generation = self.access.renew()
        self._fence_refused()
        return generation

    def grant(self, ticket: int, blocks: Sequence[int]) -> None:
        """Let `ticket` move these blocks."""
        self.access.grant(ticket, blocks)

    def revoke(self, ticket: int) -> None:
        """Let `ticket` move nothing; its flows end here."""
        self.access.revoke(ticket)
        self._fence_refused()

    def withdraw(self) -> None:
        """Deregister: all flows end here, ours too, and the memory is let go of."""
        self.access.withdraw()
        for flow in list(self._flows.values()):
            flow.fence(StaleMemoryError("the region was deregistered"))
        self.view.release()
        del self._anchor

    def _fence_refused(self) -> None:
        for flow in list(self._flows.values()):
            if flow.admitted is not None and not self.access.is_open_to(*flow.admitted):
                flow.fence(StaleMemoryError("the blocks were withdrawn while they moved"))

    def join(self, flow: Flow) -> None:
        """Fence the flow, too, when something is withdrawn."""
        self._flows[id(flow)] = flow

    def leave(self, flow: Flow) -> None:
        """The flow is over."""
        self._flows.pop(id(flow), None)


@attrs.define(eq=False)
class Flow:
    """The blocks of one transfer at this end of a stream, from the first to the last.

    `admitted` is the peer's generation and ticket, None for a transfer that we started ourselves.
    `on_fence` tells the peer, or the transfer, why it ended; it may be called once at any time
    before `close`.
    """

    id: int
    region: TcpRegion
    blocks: Sequence[int]
    checksum: Checksum
    admitted: tuple[int, int] | None = None
    on_fence: Callable[[TrinamoError], None] = lambda _: None
    position: int = 0
    """Blocks that are sent, or received and verified."""
    pending: int = 0
    """Blocks of the slice that is under way."""
    error: TrinamoError | None = None
    is_closed: bool = False
    views: list[memoryview] = attrs.field(factory=list)
    """What is still to be sent or filled of the slice under way; emptied by `fence`."""

    def __attrs_post_init__(self) -> None:
        self.region.join(self)

    @property
    def is_complete(self) -> bool:
        """Whether no block is missing."""
        return self.position == len(self.blocks)

    def is_live(self) -> bool:
        """Whether its memory may still be touched."""
        return not self.is_closed

    def fence(self, error: TrinamoError) -> None:
        """End it here and now: no byte of its blocks is touched after this returns."""
        if not self.is_closed:
            self.error = error
            self.close()
            self.on_fence(error)

    def close(self) -> None:
        """Let go of the memory, without a word to anybody."""
        if not self.is_closed:
            self.is_closed = True
            self._release()
            self.region.leave(self)

    def _release(self) -> None:
        for view in self.views:
            view.release()
        self.views.clear()

    def advance(self, count: int) -> None:
        """`count` bytes of `views` were sent or filled."""
        views, done = self.views, 0
        for view in views:
            if count < view.nbytes:
                break
            count -= view.nbytes
            view.release()
            done += 1
        del views[:done]
        if count:
            whole = views[0]
            views[0] = whole[count:]
            whole.release()

    # --- slices --------------------------------------------------------------------------------

    def next_count(self, slice_bytes: int) -> int:
        """How many blocks to send next: about `slice_bytes`, at most 64 descriptors."""
        left = len(self.blocks) - self.position
        count = min(left, max(1, slice_bytes // self.region.block_bytes))
        blocks, runs = self.blocks, 1
        for index in range(self.position + 1, self.position + count):
            if blocks[index] != blocks[index - 1] + 1:
                runs += 1
                if runs > SLICE_RUNS_MAX:
                    return index - self.position
        return count

    def begin(self, count: int) -> int:
        """Put the memory of the next `count` blocks into `views`, neighbours merged; its bytes.

        Raises what ended the flow, if it was ended: nothing of a closed flow is touched again.
        """
        self.check_live()
        size, blocks, end = self.region.block_bytes, self.blocks, self.position + count
        memory, views = self.region.view, self.views
        self.pending = count
        start = self.position
        while start < end:
            stop = start + 1
            while stop < end and blocks[stop] == blocks[stop - 1] + 1:
                stop += 1
            offset = blocks[start] * size
            views.append(memory[offset : offset + (stop - start) * size])
            start = stop
        return count * size

    def begin_received(self, first: int, count: int, data_bytes: int) -> None:
        """As `begin`, for what a peer says it sends; `RemoteProtocolError` if it does not fit."""
        if (
            self.pending
            or first != self.position
            or not 0 < count <= len(self.blocks) - first
            or data_bytes != count * self.region.block_bytes
        ):
            raise RemoteProtocolError(
                f"a slice of {count} blocks and {data_bytes} bytes from block {first}; expected "
                f"from block {self.position} of {len(self.blocks)}"
            )
        self.begin(count)

    async def sums(self) -> bytes:
        """The checksums of the slice under way; raises `error` if fenced meanwhile."""
        self.check_live()
        if self.checksum is NO_CHECKSUM:
            return b""
        sums = bytearray()
        budget = PIECE_BYTES
        for block in self.blocks[self.position : self.position + self.pending]:
            total = b""
            for offset in range(0, self.region.block_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, self.region.block_bytes - offset)
                if budget < length:
                    await trio.lowlevel.checkpoint()
                    self.check_live()
                    budget = PIECE_BYTES
                budget -= length
                total += self._sum(block * self.region.block_bytes + offset, length)
            sums += total if len(total) == SUM_BYTES else _fold(total)
        return bytes(sums)

    def _sum(self, start: int, length: int) -> bytes:
        with self.region.view[start : start + length] as piece:
            return self.checksum.of(piece, self.region.base + start).to_bytes(SUM_BYTES, "little")

    def check_live(self) -> None:
        """Raise what ended it, if it was ended."""
        if self.is_closed:
            raise self.error or StaleMemoryError("the transfer ended meanwhile")

    async def verify(self, theirs: bytes | bytearray) -> None:
        """Compare with what the sender computed and count the slice; `CorruptedError`."""
        ours = await self.sums()
        if ours != theirs:
            raise CorruptedError(
                f"the checksum of block {self.position + _first_difference(ours, theirs)} of the "
                "transfer does not match"
            )
        self.end()

    def end(self) -> None:
        """The slice under way is over."""
        self._release()
        self.position += self.pending
        self.pending = 0


def _fold(total: bytes) -> bytes:
    """One sum for a block of many pieces; a rolling polynomial, so their order counts."""
    folded = 0
    for start in range(0, len(total), SUM_BYTES):
        piece = int.from_bytes(total[start : start + SUM_BYTES], "little")
        folded = (folded * 0x9E3779B97F4A7C15 + piece) % 2**64
    return folded.to_bytes(SUM_BYTES, "little")


def _first_difference(ours: bytes, theirs: bytes | bytearray) -> int:
    pairs = zip(range(0, len(ours), SUM_BYTES), range(len(ours)), strict=False)
    return next(
        (n for at, n in pairs if ours[at : at + SUM_BYTES] != theirs[at : at + SUM_BYTES]), 0
    )
