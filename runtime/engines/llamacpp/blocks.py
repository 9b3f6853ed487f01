"""The blocks of a registered memory that llama.cpp's KV is copied to and from, where that is possible."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from ...kv.memory import KvLayout, KvMemory, fingerprint
from .state import SequenceFormat

_EVERY = -1


class StagedBlocks:
    """`block_count` blocks, and how to copy one sequence of a context to or from them.

    Raises `ValueError`, which says why, for a model or context whose KV cannot be cut into blocks.
    Its pages are taken from the system as blocks are first filled.
    """

    def __init__(
        self,
        context: Any,
        batch: Any,
        *,
        heads: int,
        block_tokens: int,
        block_count: int,
        layout: KvLayout,
    ) -> None:
        self._context = context
        # What the KV of a context looks like is seen in that of any token.
        batch.clear()
        batch.add(0, 0, [0], False)  # noqa: FBT003 -- no logits of it
        context.decode(batch)
        try:
            self._format = SequenceFormat.of(context.get_state_seq_data(0))
        finally:
            context.memory_seq_rm(0, _EVERY, _EVERY)
        self.memory = KvMemory(self._format.shape(heads, block_tokens), block_count, layout)

    def fingerprint(self, model_digest: str) -> str:
        """What a peer's must be; llama.cpp's format is private to each of cyllama's versions."""
        version = importlib.metadata.version("cyllama")
        return fingerprint("llamacpp", version, model_digest, self.memory.shape, self.memory.layout)

    def save(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """See `StagesKv.save`."""
        blob = self._context.get_state_seq_data(slot)
        self._format.save(blob, self.memory, block_ids, tokens)

    def load(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """See `StagesKv.load`."""
        blob = self._format.blob(slot, self.memory, block_ids, tokens)
        self._context.set_state_seq_data(blob, slot)
