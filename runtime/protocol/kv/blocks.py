"""Which blocks one worker holds, as its KV events tell it, and the snapshot of that. Sans-IO.

The worker keeps one set of what it has told (`kv/events.py`); a router keeps one map for all workers
(`holders.py`), which the same events feed. Applying an event again changes nothing once those after
it have been applied again too, which is what lets a snapshot be taken in parts while events go on.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import msgspec

from ..undecodable import decoded
from .events import Cleared, KvEvent, Removed, Stored
from .names import joined_keys


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Hashes, joined."""

    hashes: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Part).decode


class BlockSet:
    """The hashes of the full blocks that one worker holds.

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
    return joined_keys(decoded(_decode, body, "not a snapshot of KV blocks").hashes)
