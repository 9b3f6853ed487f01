"""What a worker tells about its KV blocks: events, and their bytes. Sans-IO.

Full blocks have the names of `names.py`. `Stored`, `Removed` and `Cleared` are all
that can happen; a batch is what one message carries. What the events add up to is in
`BlockSet`; that none is missed is the business of `protocol/events/sequence.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set as AbstractSet
from typing import Annotated, Final, Literal

import attrs
import msgspec

from ...errors import RemoteProtocolError
from ..undecodable import UNDECODABLE, decoded, decoding_fault
from .names import HASH_BYTES, joined_keys

BATCH_EVENTS_MAX: Final = 256
BATCH_HASHES_MAX: Final = 768
_EVENT_BYTES_MAX: Final = 16
"""What an event adds to its hashes: kind and lengths."""
_BATCH_BYTES_MAX: Final = BATCH_HASHES_MAX * HASH_BYTES + BATCH_EVENTS_MAX * _EVENT_BYTES_MAX


@attrs.frozen
class Stored:
    """Full blocks that are new."""

    block_hashes: tuple[bytes, ...]


@attrs.frozen
class Removed:
    """Full blocks that are gone."""

    block_hashes: tuple[bytes, ...]


@attrs.frozen
class Cleared:
    """No block is left."""

    block_hashes: tuple[bytes, ...] = ()


KvEvent = Stored | Removed | Cleared
_KINDS: Final[dict[str, type[KvEvent]]] = {"stored": Stored, "removed": Removed, "cleared": Cleared}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(
    Annotated[
        list[tuple[Literal["stored", "removed", "cleared"], bytes]],
        msgspec.Meta(min_length=1, max_length=BATCH_EVENTS_MAX),
    ]
).decode


def encode_batch(events: Sequence[KvEvent]) -> bytes:
    """The bytes of one batch; take it from `next_batch`, which keeps to the bounds."""
    return _encode([(type(e).__name__.lower(), b"".join(e.block_hashes)) for e in events])


def decode_keys(payload: bytes) -> list[tuple[type[KvEvent], tuple[int, ...]]]:
    """A batch as an index reads it: what each event is, and the `block_keys` of its blocks.

    At least one event and at most `BATCH_EVENTS_MAX`, with `BATCH_HASHES_MAX` hashes together. Raises
    `RemoteProtocolError` for anything else, kinds of events that we do not know included; of such a
    publisher only a snapshot can tell the blocks.
    """
    if len(payload) > _BATCH_BYTES_MAX:
        raise RemoteProtocolError(
            f"a batch of KV events of {len(payload)} bytes; at most {_BATCH_BYTES_MAX} are taken"
        )
    try:
        batch = [(_KINDS[word], joined_keys(joined)) for word, joined in _decode(payload)]
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"not a batch of KV events: {decoding_fault(error)}") from error
    if sum(len(keys) for _, keys in batch) > BATCH_HASHES_MAX:
        raise RemoteProtocolError(f"a batch with more than {BATCH_HASHES_MAX} block hashes")
    if any((kind is Cleared) == bool(keys) for kind, keys in batch):
        raise RemoteProtocolError("a KV event about no block, or a clearing about some")
    return batch


def next_batch(waiting: deque[KvEvent]) -> list[KvEvent]:
    """Take as many events from the left as one batch holds, cutting one in two if need be."""
    batch: list[KvEvent] = []
    room = BATCH_HASHES_MAX
    while waiting and room and len(batch) < BATCH_EVENTS_MAX:
        event = waiting.popleft()
        if (hashes := event.block_hashes)[room:]:
            kind = type(event)
            waiting.appendleft(kind(hashes[room:]))
            event = kind(hashes[:room])
        room -= len(event.block_hashes)
        batch.append(event)
    return batch


class _Part(msgspec.Struct, frozen=True, array_like=True):
    hashes: bytes


_decode_part = msgspec.msgpack.Decoder(_Part).decode


class BlockSet:
    """The hashes of the full blocks that one worker holds, as its events tell it, and the snapshot of that.

    Applying an event again changes nothing once those after it have been applied again too, which is
    what lets a snapshot be taken in parts while events go on. A router keeps one map for all workers
    (`holders.py`), which the same events feed.

    Not their parents: a hash names all tokens before it too, so who asks for a sequence asks for
    its hashes and needs no chain.
    """

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> AbstractSet[bytes]:
        """Every block; live."""
        return self._hashes

    def apply(self, event: KvEvent) -> None:
        """Take one event. Storing again, and removing what is not there, is no error."""
        match event:
            case Stored(hashes):
                self._hashes.update(hashes)
            case Removed(hashes):
                self._hashes.difference_update(hashes)
            case Cleared():
                self._hashes = set()

    def encode_part(self, part: int, parts: int) -> bytes:
        """The blocks whose hash falls to `part` of `parts`, `HASH_BYTES` each."""
        # Parts of about one size, as hashes are as good as random; sorted, since a set has another
        # order in every process.
        hashes = sorted(
            each for each in self._hashes if int.from_bytes(each[-2:], "big") % parts == part
        )
        return _encode(_Part(b"".join(hashes)))


def decode_part(body: bytes) -> tuple[int, ...]:
    """The `block_keys` of one part of a snapshot; `RemoteProtocolError` if it is none."""
    return joined_keys(decoded(_decode_part, body, "not a snapshot of KV blocks").hashes)
