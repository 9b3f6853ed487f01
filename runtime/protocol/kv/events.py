"""What a worker tells about its KV blocks: events, how they are named, and their bytes. Sans-IO.

A full block is named by a hash of its tokens and, through its parent's hash, of all tokens before
them, so equal prefixes have equal names on every worker. `Stored`, `Removed` and `Cleared` are all
that can happen; a batch is what one message carries. What the events add up to is in
`blocks.py`; that none is missed is the business of `protocol/events/sequence.py`.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import attrs
import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import UNDECODABLE

HASH_BYTES: Final = 8
"""Of a million blocks two have the same 64 bits once in 2**25 clusters."""
BATCH_EVENTS_MAX: Final = 256
BATCH_HASHES_MAX: Final = 1024
_EVENT_BYTES_MAX: Final = 32
"""What an event adds to its hashes: kind, lengths, parent."""
_KEY_MASK: Final = (1 << 60) - 1
_BATCH_BYTES_MAX: Final = BATCH_HASHES_MAX * HASH_BYTES + BATCH_EVENTS_MAX * _EVENT_BYTES_MAX


@attrs.frozen
class Stored:
    """Full blocks that are new, in order, each the child of the one before."""

    parent_hash: bytes
    """Of the first of them; empty for the first block of a sequence."""
    block_hashes: tuple[bytes, ...]


@attrs.frozen
class Removed:
    """Full blocks that are gone."""

    block_hashes: tuple[bytes, ...]


@attrs.frozen
class Cleared:
    """No block is left."""


KvEvent = Stored | Removed | Cleared


def block_hash(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: its tokens (0 to 2**32 - 1) behind its parent's name."""
    text = parent_hash + struct.pack(f">{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(text, digest_size=HASH_BYTES).digest()


def root_of(tenant: str) -> bytes:
    """What the name of a sequence's first block goes on from: no two tenants name blocks alike."""
    return tenant.encode("utf-8", "replace")


def block_hashes(token_ids: Sequence[int], block_tokens: int, tenant: str = "") -> list[bytes]:
    """The names of all full blocks of a sequence, in order: as `block_hash` would name each."""
    count = len(token_ids) // block_tokens
    packed = struct.pack(f">{count * block_tokens}I", *token_ids[: count * block_tokens])
    return chained_hashes(packed, block_tokens * 4, tenant)


def chained_hashes(text: bytes, chunk_bytes: int, tenant: str = "") -> list[bytes]:
    """A name for each full chunk of `text` and all before it."""
    hashes: list[bytes] = []
    append, blake2b, parent = hashes.append, hashlib.blake2b, root_of(tenant)
    for end in range(chunk_bytes, len(text) + 1, chunk_bytes):
        parent = blake2b(parent + text[end - chunk_bytes : end], digest_size=HASH_BYTES).digest()
        append(parent)
    return hashes


def block_keys(hashes: Sequence[bytes]) -> tuple[int, ...]:
    """The blocks as a router's index knows them: the last 60 bits of each name.

    Four bits less, because a number of 60 bits takes 32 bytes of memory and one of 64 takes 48.
    """
    return joined_keys(b"".join(hashes))


def joined_keys(joined: bytes) -> tuple[int, ...]:
    """`block_keys` of joined hashes; raises `RemoteProtocolError` if one is cut off."""
    _check_whole(joined)
    numbers = struct.unpack(f">{len(joined) // HASH_BYTES}Q", joined)
    return tuple([number & _KEY_MASK for number in numbers])


def join_hashes(hashes: Iterable[bytes]) -> bytes:
    """One string of bytes, `HASH_BYTES` for each."""
    return b"".join(hashes)


def _check_whole(joined: bytes) -> None:
    if len(joined) % HASH_BYTES:
        raise RemoteProtocolError(f"{len(joined)} bytes are no whole number of block hashes")


# --- the wire --------------------------------------------------------------------------------


class _StoredWire(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    parent: bytes
    hashes: bytes


class _RemovedWire(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    hashes: bytes


class _ClearedWire(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    pass


_Wire = _StoredWire | _RemovedWire | _ClearedWire
_KINDS: Final[dict[type[_Wire], type[KvEvent]]] = {
    _StoredWire: Stored,
    _RemovedWire: Removed,
    _ClearedWire: Cleared,
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(
    Annotated[list[_Wire], msgspec.Meta(min_length=1, max_length=BATCH_EVENTS_MAX)]
).decode


def encode_batch(events: Sequence[KvEvent]) -> bytes:
    """The bytes of one batch; take it from `next_batch`, which keeps to the bounds."""
    return _encode([_wire(event) for event in events])


def _wire(event: KvEvent) -> _Wire:
    match event:
        case Stored(parent_hash, hashes):
            return _StoredWire(parent_hash, join_hashes(hashes))
        case Removed(hashes):
            return _RemovedWire(join_hashes(hashes))
        case Cleared():
            return _ClearedWire()


def decode_keys(payload: bytes) -> list[tuple[type[KvEvent], tuple[int, ...]]]:
    """A batch as an index reads it: what each event is, and the `block_keys` of its blocks.

    At least one event and at most `BATCH_EVENTS_MAX`, with `BATCH_HASHES_MAX` hashes together. Raises
    `RemoteProtocolError` for anything else, kinds of events that we do not know included; of such a
    publisher only a snapshot can tell the blocks.
    """
    return [(_KINDS[type(wire)], _keys(wire)) for wire in _wires(payload)]


def _wires(payload: bytes) -> list[_Wire]:
    """The events, with their bounds checked."""
    if len(payload) > _BATCH_BYTES_MAX:
        raise RemoteProtocolError(
            f"a batch of KV events of {len(payload)} bytes; at most {_BATCH_BYTES_MAX} are taken"
        )
    try:
        wires: list[_Wire] = _decode(payload)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"not a batch of KV events: {error}") from error
    hash_bytes = 0
    for wire in wires:
        if isinstance(wire, _ClearedWire):
            continue
        if not wire.hashes:
            raise RemoteProtocolError("a KV event about no block")
        if isinstance(wire, _StoredWire) and len(wire.parent) not in (0, HASH_BYTES):
            raise RemoteProtocolError(f"a parent hash of {len(wire.parent)} bytes")
        _check_whole(wire.hashes)
        hash_bytes += len(wire.hashes)
    if hash_bytes > BATCH_HASHES_MAX * HASH_BYTES:
        raise RemoteProtocolError(f"a batch with more than {BATCH_HASHES_MAX} block hashes")
    return wires


def _keys(wire: _Wire) -> tuple[int, ...]:
    return () if isinstance(wire, _ClearedWire) else joined_keys(wire.hashes)


def hash_count(event: KvEvent) -> int:
    """How many blocks the event is about; none for `Cleared`."""
    return 0 if isinstance(event, Cleared) else len(event.block_hashes)


def next_batch(waiting: deque[KvEvent]) -> list[KvEvent]:
    """Take as many events from the left as one batch holds, cutting one in two if need be."""
    batch: list[KvEvent] = []
    room = BATCH_HASHES_MAX
    while waiting and len(batch) < BATCH_EVENTS_MAX:
        event = waiting.popleft()
        if (count := hash_count(event)) <= room:
            room -= count
            batch.append(event)
            continue
        if room:
            head, tail = _cut(event, room)
            batch.append(head)
            event = tail
        waiting.appendleft(event)
        break
    return batch


def _cut(event: KvEvent, count: int) -> tuple[KvEvent, KvEvent]:
    assert not isinstance(event, Cleared), "it has no hashes"
    head, tail = event.block_hashes[:count], event.block_hashes[count:]
    if isinstance(event, Removed):
        return Removed(head), Removed(tail)
    return Stored(event.parent_hash, head), Stored(head[-1], tail)
