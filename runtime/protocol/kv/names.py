"""How full KV blocks are named: by a keyed hash of their tokens and, through it, of all before them.

Equal prefixes of one tenant have equal names in all processes with one key (`kv/events.py`). Who has
it not can neither tell a block by its name, nor make two of one name. Sans-IO.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from ...errors import RemoteProtocolError

HASH_BYTES: Final = 16
"""Engines take blocks of one name for one block, so no two may ever have the same."""
_VERSION: Final = 2
"""Of names and the events about them (`kv/events.py`): 1 was 64 bits without a key."""
_KEY_MASK: Final = (1 << 60) - 1


class BlockNames:
    """Names under a key made of `shared`, which nobody else knows; empty: for this process alone."""

    def __init__(self, shared: bytes = b"") -> None:
        key = hashlib.blake2b(shared, person=b"trinamo-kv-names").digest()
        # To copy it costs less than to begin with the key for each block.
        self._begin = hashlib.blake2b(key=key, digest_size=HASH_BYTES).copy
        self.mark = f"{_VERSION}-{self.root('mark')[:4].hex()}"
        """Who has the same names alike."""

    def root(self, tenant: str) -> bytes:
        """The parent of a sequence's first block: no two tenants name blocks alike."""
        keyed = self._begin()
        keyed.update(tenant.encode("utf-8", "replace"))
        return keyed.digest()

    def of_tokens(self, ids: Sequence[int], block_tokens: int, parent: bytes) -> list[bytes]:
        """Names of all full blocks behind `parent`, in order; a token is from 0 to 2**32 - 1."""
        return self.of_text(struct.pack(f">{len(ids)}I", *ids), block_tokens * 4, parent)

    def of_text(self, text: bytes, piece_bytes: int, parent: bytes) -> list[bytes]:
        """A name for each full piece of `text` and all before it, behind `parent`."""
        names: list[bytes] = []
        begin, append = self._begin, names.append
        for end in range(piece_bytes, len(text) + 1, piece_bytes):
            keyed = begin()
            keyed.update(parent + text[end - piece_bytes : end])
            parent = keyed.digest()
            append(parent)
        return names


def block_keys(names: Iterable[bytes]) -> tuple[int, ...]:
    """The blocks as a router's index knows them: the last 60 bits of each name.

    Such a number takes 32 bytes of memory, a whole name 49. Two names with one, which nobody can look
    for, cost a prefill and no token.
    """
    return joined_keys(b"".join(names))


def joined_keys(joined: bytes) -> tuple[int, ...]:
    """`block_keys` of joined names; raises `RemoteProtocolError` if one is cut off."""
    if len(joined) % HASH_BYTES:
        raise RemoteProtocolError(f"{len(joined)} bytes are no whole number of block hashes")
    return tuple([half & _KEY_MASK for (half,) in struct.iter_unpack(">8xQ", joined)])


HINT_BLOCKS_MAX: Final = 4096
"""Blocks beyond are not named: naming one costs about a microsecond, and the caller waits for it."""
_TOKEN_BYTES: Final = 4
"""Of text, on average; where the tokens are not known."""


@attrs.frozen
class RoutingHint:
    """One prompt, made once for a request however often it is sent."""

    keys: Sequence[int]
    """Of its full blocks, from its start, as `block_keys` makes them."""
    tokens: int
    """Of the whole prompt."""
    block_tokens: int
    """Tokens of one block."""
    is_exact: bool
    """Whether the keys are those of the workers' own blocks; if not, of pieces of the text."""


def hint_of_tokens(
    names: BlockNames, token_ids: Sequence[int], block_tokens: int, tenant: str = ""
) -> RoutingHint:
    """Of a prompt of `tenant` whose tokens are known."""
    named = token_ids[: HINT_BLOCKS_MAX * block_tokens]
    keys = block_keys(names.of_tokens(named, block_tokens, names.root(tenant)))
    return RoutingHint(keys, len(token_ids), block_tokens, is_exact=True)


def hint_of_text(
    names: BlockNames, text: bytes, block_tokens: int, tenant: str = ""
) -> RoutingHint:
    """Of one of which only the text is: in pieces that are about as long as a block."""
    chunk_bytes = block_tokens * _TOKEN_BYTES
    named = text[: HINT_BLOCKS_MAX * chunk_bytes]
    keys = block_keys(names.of_text(named, chunk_bytes, names.root(tenant)))
    return RoutingHint(keys, -(-len(text) // _TOKEN_BYTES), block_tokens, is_exact=False)
