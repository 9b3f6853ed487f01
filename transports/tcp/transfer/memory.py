"""Registered memory of the tcp transfer plane, and the flows of blocks in and out of it.

A `BlockFlow` is one transfer's use of a region at this end. *Fencing* it is synchronous: it releases
the views that a pending system call would use, so not one byte is read from or written to the
blocks afterwards, even by a receive that has been woken up already. The link then discards what
still comes, or pads what it has announced. This is why `MemoryRegion.is_fenced` holds here.

The checksum of a block is XXH3 where the package `xxhash` is installed, else CRC-32. Both run over the
registered memory itself, without a copy. Of bytes that the cache still holds, XXH3 takes 0.01 CPU seconds per GB
and CRC-32 0.15 (AVX-512; cold memory costs both 0.03 more); the two ends of a stream agree on one in their
handshake. Neither protects against a peer that lies: they find bytes that were damaged, mixed up or reused.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Final, Literal

import attrs
import trio
from typing_extensions import Buffer, override

from trinamo.runtime.errors import (
    CorruptedError,
    RefusedError,
    RemoteProtocolError,
    StaleMemoryError,
    TrinamoError,
)
from trinamo.runtime.planes.regions import HostRegion, Registrable
from trinamo.runtime.protocol.transfer.description import MemoryDescription
from trinamo.runtime.protocol.transfer.stream import SUM_BYTES

_log = logging.getLogger("trinamo.tcp")
STRETCH_BYTES: Final = 1 << 20
"""Larger blocks are summed in stretches, so that the event loop gets its turn between them."""

ChecksumChoice = Literal["auto", "crc32", "none"]


@attrs.frozen
class Checksum:
    name: str
    of: Callable[[Buffer], int] | None = None
    """The sum of some bytes; less than 2**64. None where blocks are not summed."""


NO_CHECKSUM: Final = Checksum("none")
_TAGS: Final = Checksum("aead")
"""Those of the pieces that blocks go in, where the stream is sealed; see `sealed.py`."""
_CRC32: Final = Checksum("crc32", zlib.crc32)


@functools.cache
def _xxh3() -> Checksum | None:
    try:
        return Checksum("xxh3", importlib.import_module("xxhash").xxh3_64_intdigest)
    except ImportError:
        _log.info(
            "xxhash is not installed: blocks are checked by CRC-32, which costs several times as "
            "much; pip install 'trinamo[checksums]'"
        )
        return None


def offered(choice: ChecksumChoice, *, is_sealed: bool = False) -> dict[str, Checksum]:
    """What this end can check blocks by under `choice`, best first."""
    if choice == "none":
        return {"none": NO_CHECKSUM}
    found = [_CRC32] if choice == "crc32" else [_TAGS if is_sealed else None, _xxh3(), _CRC32]
    return {each.name: each for each in found if each is not None}


def choose(theirs: list[str], choice: ChecksumChoice, *, is_sealed: bool = False) -> Checksum:
    """The first of the peer's that we know too; `RefusedError` if there is none."""
    ours = offered(choice, is_sealed=is_sealed)
    for name in theirs:
        if name in ours:
            return ours[name]
    raise RefusedError(f"no checksum in common: {', '.join(theirs)} there, {', '.join(ours)} here")


SLICE_RUNS_MAX: Final = 64
"""Descriptors of one system call; more than 64 were slower, not faster."""
SLICE_BLOCKS_MAX: Final = 1024
"""However small they are: the sums of a slice fit into one header, and cost one turn of the loop."""


class TcpRegion(HostRegion):
    """One registered region, whose flows a withdrawal fences."""

    def __init__(
        self,
        memory: Registrable,
        draft: MemoryDescription,
        *,
        needs_ticket: bool,
    ) -> None:
        super().__init__(memory, draft, needs_ticket=needs_ticket)
        self._anchors = [ctypes.c_char.from_buffer(view) for view in self.views]
        self._flows: dict[int, BlockFlow] = {}

    @override
    def renew(self) -> int:
        """Refuse all descriptions given out before; peers' flows end here."""
        generation = super().renew()
        self._fence_refused()
        return generation

    @override
    def revoke(self, ticket: int) -> None:
        """Let `ticket` move nothing; its flows end here."""
        super().revoke(ticket)
        self._fence_refused()

    @override
    def withdraw(self) -> None:
        """Deregister: all flows end here, ours too, and the memory is let go of."""
        super().withdraw()
        for flow in list(self._flows.values()):
            flow.fence(StaleMemoryError("the region was deregistered"))
        for view in self.views:
            view.release()
        self._anchors.clear()

    def _fence_refused(self) -> None:
        for flow in list(self._flows.values()):
            if flow.admitted is not None and not self.access.is_open_to(*flow.admitted):
                flow.fence(StaleMemoryError("the blocks were withdrawn while they moved"))

    def join(self, flow: BlockFlow) -> None:
        """Fence the flow, too, when something is withdrawn."""
        self._flows[id(flow)] = flow

    def leave(self, flow: BlockFlow) -> None:
        self._flows.pop(id(flow), None)


@attrs.define(eq=False)
class BlockFlow:
    """The blocks of one transfer at this end of a stream, from the first to the last.

    `admitted` is the peer's generation and ticket, None for a transfer that we started ourselves.
    `on_fence` tells the peer, or the transfer, why it ended; it may be called once at any time
    before `close`. `on_sent` is called when all of it was sent.
    """

    id: int
    region: TcpRegion
    blocks: Sequence[int]
    checksum: Checksum
    admitted: tuple[int, int] | None = None
    on_fence: Callable[[TrinamoError], None] = lambda _: None
    on_sent: Callable[[], None] = lambda: None
    position: int = 0
    """Blocks that are sent, or received and verified."""
    pending: int = 0
    """Blocks of the slice that is under way."""
    error: TrinamoError | None = None
    is_closed: bool = False
    views: list[memoryview] = attrs.field(factory=list)
    """What is still to be sent or filled of the slice under way; emptied by `fence`."""
    _moved: int = 0
    """Bytes of that slice that were sent or filled."""
    _sums: list[int] = attrs.field(factory=list)
    """The sums of its stretches, as far as they have moved."""

    def __attrs_post_init__(self) -> None:
        self.region.join(self)

    @property
    def is_complete(self) -> bool:
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

    def let_go(self) -> bool:
        """`close`, and say that nothing of ours is touched any more."""
        self.close()
        return True

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
        """`count` bytes of `views` were sent or filled; sum them while the cache holds them."""
        self._moved += count
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
        self._sum_until(self._moved)

    # --- slices --------------------------------------------------------------------------------

    def next_count(self, slice_bytes: int) -> int:
        """How many blocks to send next: about `slice_bytes`, `SLICE_RUNS_MAX` descriptors at most."""
        left = min(SLICE_BLOCKS_MAX, len(self.blocks) - self.position)
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
        region, views = self.region, self.views
        size, per_buffer = region.block_bytes, region.buffer_blocks
        blocks, end = self.blocks, self.position + count
        self.pending = count
        start = self.position
        while start < end:
            first, stop = blocks[start], start + 1
            # Neighbours in number are none in memory where the next buffer begins.
            limit = min(end, start + per_buffer - first % per_buffer)
            while stop < limit and blocks[stop] == blocks[stop - 1] + 1:
                stop += 1
            views.append(region.span(first, 0, (stop - start) * size))
            start = stop
        return count * size

    def begin_received(self, first: int, count: int, data_bytes: int) -> None:
        """As `begin`, for what a peer says it sends; `RemoteProtocolError` if it does not fit."""
        if (
            self.pending
            or first != self.position
            or not 0 < count <= min(SLICE_BLOCKS_MAX, len(self.blocks) - first)
            or data_bytes != count * self.region.block_bytes
        ):
            raise RemoteProtocolError(
                f"a slice of {count} blocks and {data_bytes} bytes from block {first}; expected "
                f"from block {self.position} of {len(self.blocks)}"
            )
        self.begin(count)

    async def sums(self) -> bytes:
        """The checksums of the slice under way; raises `error` if fenced meanwhile.

        Most were taken as the bytes moved: one taken earlier would not find a source that changes
        on the way, one taken later would read all memory again.
        """
        self.check_live()
        if self.checksum.of is None:
            return b""
        whole = self.pending * self.region.block_bytes
        for end in range(self._moved + STRETCH_BYTES, whole, STRETCH_BYTES):
            self._sum_until(end)
            await trio.lowlevel.checkpoint()
            self.check_live()
        self._sum_until(whole)
        sums = struct.pack(f"<{len(self._sums)}Q", *self._sums)
        if self._stretch_count == 1:
            return sums
        size = SUM_BYTES * self._stretch_count
        return b"".join(_fold(sums[at : at + size]) for at in range(0, len(sums), size))

    @property
    def _stretch_count(self) -> int:
        """Of each block; one unless it is larger than a stretch."""
        return -(-self.region.block_bytes // STRETCH_BYTES)

    def _sum_until(self, end: int) -> None:
        """Sum the stretches that lie within the first `end` bytes of the slice."""
        of, sums = self.checksum.of, self._sums
        if of is None:
            return
        region, size, stretches = self.region, self.region.block_bytes, self._stretch_count
        if stretches == 1:
            for block in self.blocks[self.position + len(sums) : self.position + end // size]:
                sums.append(of(region.block(block)))
            return
        while len(sums) < stretches * self.pending:
            ordinal, stretch = divmod(len(sums), stretches)
            start, stop = stretch * STRETCH_BYTES, min((stretch + 1) * STRETCH_BYTES, size)
            if ordinal * size + stop > end:
                return
            sums.append(of(region.span(self.blocks[self.position + ordinal], start, stop)))

    def check_live(self) -> None:
        """Raise what ended it, if it was ended."""
        if self.is_closed:
            raise self.error or StaleMemoryError("the transfer ended meanwhile")

    async def verify(self, theirs: bytes | bytearray) -> None:
        """Compare with what the sender computed and count the slice; `CorruptedError`."""
        ours = await self.sums()
        if ours != theirs:
            step = SUM_BYTES
            pairs = (
                (ours[at : at + step], theirs[at : at + step]) for at in range(0, len(ours), step)
            )
            first = next((number for number, (our, their) in enumerate(pairs) if our != their), 0)
            raise CorruptedError(
                f"the checksum of block {self.position + first} of the transfer does not match"
            )
        self.end()

    def end(self) -> None:
        """The slice under way is over."""
        self._release()
        self.position += self.pending
        self.pending = self._moved = 0
        self._sums.clear()


def _fold(total: bytes) -> bytes:
    """One sum for a block of many stretches; a rolling polynomial, so their order counts."""
    folded = 0
    for start in range(0, len(total), SUM_BYTES):
        stretch = int.from_bytes(total[start : start + SUM_BYTES], "little")
        folded = (folded * 0x9E3779B97F4A7C15 + stretch) % 2**64
    return folded.to_bytes(SUM_BYTES, "little")
