"""What a router is told about a prompt: the names of its blocks, and how long it is. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from .names import BlockNames, block_keys

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
