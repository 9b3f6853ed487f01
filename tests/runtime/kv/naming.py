"""Names of the blocks of whole sequences, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trinamo.runtime.protocol.kv.names import BlockNames

OWN: Final = BlockNames()
"""Those of an engine that was told no others."""


def block_hashes(
    token_ids: Sequence[int], block_tokens: int, tenant: str = "", names: BlockNames = OWN
) -> list[bytes]:
    return names.of_tokens(token_ids, block_tokens, names.root(tenant))
