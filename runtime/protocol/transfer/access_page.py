"""The access page of a region, which peers read as they move blocks, and their word at the end.

With one-sided backends (RDMA and what imitates it) the owner of memory sees no transfer, so it
cannot refuse one. Instead it keeps a page beside each region and registers it too: which
incarnation and generation the region is, whether it is withdrawn, and which blocks which ticket
may move. Whoever starts a transfer reads the page with the same backend and refuses itself. Peers
are trusted to do so; `MemoryRegion.is_fenced` is false there.

Tickets themselves are not on the page: who reads it learns no ticket that was given to another.

Sans-IO: the page is a view of memory that somebody else allocates. Little endian; every word that
is changed later is eight bytes and aligned, so a reader sees the old or the new one.

    0     magic, incarnation, region, generation, state, block_count, needs_ticket, 0
    64    TICKETS_MAX words: digests of the tickets that are granted, 0 for a free place; the lowest
          bit is 1 if the ticket is for writing, too
    4160  TICKETS_MAX bitmaps of `bitmap_bytes`: the blocks of the ticket in the same place
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

import attrs

from ...errors import LocalProtocolError, OverloadedError, RemoteProtocolError, StaleMemoryError
from .description import NOTIFY_BYTES_MAX, MemoryDescription

HEADER_BYTES: Final = 64
TICKETS_MAX: Final = 512
"""Tickets of one region that may be granted at once."""
DIRECTORY_BYTES: Final = 8 * TICKETS_MAX
TICKET_BLOCKS_MAX: Final = 1 << 20
"""Blocks of a region that needs tickets; it bounds what a peer must read."""
BITMAP_BYTES_MAX: Final = TICKET_BLOCKS_MAX // 8
_MAGIC: Final = int.from_bytes(b"trnamo02", "little")
_HEADER: Final = struct.Struct("<8Q")
_DIRECTORY: Final = struct.Struct(f"<{TICKETS_MAX}Q")
_WORD: Final = struct.Struct("<Q")
_GENERATION_AT: Final = 24
_STATE_AT: Final = 32
_OPEN, _WITHDRAWN = 1, 2


def _digest(ticket: int, *, may_write: bool) -> int:
    """The word that stands for a ticket; never 0."""
    summed = hashlib.blake2b(_WORD.pack(ticket), digest_size=8).digest()
    return (int.from_bytes(summed, "little") & ~1 or 2) | may_write


def _bitmap_bytes(block_count: int) -> int:
    return (block_count + 63) // 64 * 8


def page_bytes(block_count: int, *, needs_ticket: bool) -> int:
    """How much memory the page of a region of `block_count` blocks takes."""
    if not needs_ticket:
        return HEADER_BYTES
    return HEADER_BYTES + DIRECTORY_BYTES + TICKETS_MAX * _bitmap_bytes(block_count)


def incarnation_word(incarnation: str) -> int:
    """The incarnation as the page holds it; `StaleMemoryError` for one that is no number."""
    try:
        return int(incarnation, 16) % 2**64
    except ValueError:
        raise StaleMemoryError(f"{incarnation} is no incarnation of this backend") from None


class AccessPage:
    """The owner's end: keeps the page equal to what `AccessTable` decided."""

    def __init__(
        self,
        view: memoryview,
        *,
        incarnation: str,
        region: int,
        block_count: int,
        needs_ticket: bool,
    ) -> None:
        self._view = view
        self._places: dict[int, int] = {}
        self._stride = _bitmap_bytes(block_count)
        word = incarnation_word(incarnation)
        _HEADER.pack_into(
            view, 0, _MAGIC, word, region, 1, _OPEN, block_count, int(needs_ticket), 0
        )

    def renew(self, generation: int) -> None:
        _WORD.pack_into(self._view, _GENERATION_AT, generation)

    def withdraw(self) -> None:
        _WORD.pack_into(self._view, _STATE_AT, _WITHDRAWN)

    def grant(self, ticket: int, blocks: Sequence[int], *, may_write: bool = True) -> None:
        """Show `blocks` as granted; `OverloadedError` if `TICKETS_MAX` tickets are out."""
        place = self._places.get(ticket)
        is_new = place is None
        if place is None:
            if len(self._places) == TICKETS_MAX:
                raise OverloadedError(
                    f"{TICKETS_MAX} tickets of one region are granted",
                    bound="tickets",
                    value=TICKETS_MAX,
                )
            taken = set(self._places.values())
            place = next(place for place in range(TICKETS_MAX) if place not in taken)
        start = HEADER_BYTES + DIRECTORY_BYTES + place * self._stride
        with self._view[start : start + self._stride] as bitmap:
            if is_new:
                bitmap[:] = bytes(self._stride)
            for block in blocks:
                bitmap[block // 8] |= 1 << block % 8
        # The ticket is shown last, so nobody finds it without its blocks.
        self._places[ticket] = place
        _WORD.pack_into(self._view, HEADER_BYTES + 8 * place, _digest(ticket, may_write=may_write))

    def revoke(self, ticket: int) -> None:
        place = self._places.pop(ticket, None)
        if place is not None:
            _WORD.pack_into(self._view, HEADER_BYTES + 8 * place, 0)


def check_header(
    header: bytes | memoryview, expected: MemoryDescription, *, any_generation: bool
) -> bool:
    """Whether the region needs a ticket; `StaleMemoryError` unless the page is what a description said.

    With `any_generation` the generation is not looked at: enough to know who answers.
    """
    magic, word, region, generation, state, block_count, needs_ticket, _ = _HEADER.unpack_from(
        header
    )
    if magic != _MAGIC or word != incarnation_word(expected.incarnation):
        raise StaleMemoryError("another process has the described memory now")
    if region != expected.region or block_count != expected.pool_blocks:
        raise StaleMemoryError(f"there is no region {expected.region} as described")
    if state != _OPEN:
        raise StaleMemoryError("the region was deregistered")
    if not any_generation and generation != expected.generation:
        raise StaleMemoryError(f"the region is at generation {generation}")
    return bool(needs_ticket)


def find_ticket(directory: bytes | memoryview, ticket: int, *, is_target: bool) -> int:
    """The place of `ticket`; `StaleMemoryError` if it is not there, or only for reading."""
    places = _DIRECTORY.unpack_from(directory)
    for may_write in (True,) if is_target else (True, False):
        word = _digest(ticket, may_write=may_write)
        if word in places:
            return places.index(word)
    raise StaleMemoryError("the ticket is unknown, was revoked or is for reading")


def bitmap_range(block_count: int, place: int, blocks: Sequence[int]) -> tuple[int, int]:
    """`(offset, length)` in the page of the bytes that say whether `blocks` are granted."""
    if not blocks:
        raise LocalProtocolError("no blocks to look for")
    first, last = min(blocks) // 8, max(blocks) // 8
    start = HEADER_BYTES + DIRECTORY_BYTES + place * _bitmap_bytes(block_count)
    return start + first, last - first + 1


def check_bitmap(bitmap: bytes | memoryview, blocks: Sequence[int]) -> None:
    """Raise `StaleMemoryError` unless all `blocks` are granted in what `bitmap_range` named."""
    first = min(blocks) // 8
    if not all(bitmap[block // 8 - first] >> block % 8 & 1 for block in blocks):
        raise StaleMemoryError("blocks that were not granted to the ticket")


_HEAD: Final = struct.Struct("<QQ")


@attrs.frozen
class TransferDone:
    """A transfer with blocks of ours is done, says who started it."""

    region: int
    """The number of our region it moved blocks to or from."""
    ticket: int
    """What the blocks were granted to."""
    message: bytes
    """What the peer's caller gave as `notify`."""


def encode_completion(notice: TransferDone) -> bytes:
    return _HEAD.pack(notice.region, notice.ticket) + notice.message


def decode_completion(data: bytes) -> TransferDone:
    """The notice in `data`; `RemoteProtocolError` for anything else."""
    if not _HEAD.size <= len(data) <= _HEAD.size + NOTIFY_BYTES_MAX:
        raise RemoteProtocolError(f"a notification of {len(data)} bytes")
    region, ticket = _HEAD.unpack_from(data)
    return TransferDone(region, ticket, data[_HEAD.size :])
