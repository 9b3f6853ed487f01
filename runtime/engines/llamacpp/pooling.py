"""Embeddings by llama.cpp: the last layer of a prompt's tokens, pooled.

In a context of its own, which is made with the first: that of the answers computes logits. It holds one prompt
at a time, in chunks, and so takes no more memory than the KV of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import numpy as np

POOLINGS: Final = {"1": "mean", "3": "last"}
"""What a file calls the ways that are known, by `pooling_type`; another one is none."""


def pooling_of(metadata: Mapping[str, str]) -> str:
    """How the model of a file was trained to be pooled; empty if it is not one for embeddings."""
    kind = metadata.get("general.architecture", "")
    if metadata.get(f"{kind}.attention.causal", "true") == "false":
        # All of the prompt would have to be one chunk.
        return ""
    return POOLINGS.get(metadata.get(f"{kind}.pooling_type", ""), "")


@attrs.define(eq=False)
class Pooled:
    """The second context of one model; `pooling` is a value of `POOLINGS`."""

    _llama: Any
    _make_context: Callable[[], Any]
    _chunk_tokens: int
    _pooling: str
    _made: tuple[Any, Any] | None = attrs.field(default=None, init=False)
    """Context and batch."""

    def embed(self, token_ids: list[int]) -> Iterator[bytes]:
        """See `Embeds.embed`."""
        if self._made is None:
            context = self._make_context()
            batch = self._llama.LlamaBatch(n_tokens=self._chunk_tokens, embd=0, n_seq_max=1)
            self._made = context, batch
        context, batch = self._made
        context.memory_seq_rm(-1, -1, -1)
        total: Any = 0
        for start in range(0, len(token_ids), self._chunk_tokens):
            chunk = token_ids[start : start + self._chunk_tokens]
            batch.clear()
            for offset, token_id in enumerate(chunk):
                batch.add(token_id, start + offset, [0], True)  # noqa: FBT003 -- its only way
            context.decode(batch)
            rows = range(len(chunk)) if self._pooling == "mean" else [len(chunk) - 1]
            found = [np.array(context.get_embeddings_ith(row), np.float64) for row in rows]
            total = found[-1] if self._pooling == "last" else total + np.sum(found, axis=0)
            if start + self._chunk_tokens < len(token_ids):
                yield b""
        length = float(np.linalg.norm(total))
        yield (total / (length or 1.0)).astype("<f4").tobytes()

    def interrupt(self) -> None:
        """Let a decode that is running raise `InterruptedError`."""
        if self._made is not None:
            self._made[0].cancel = True

    def close(self) -> None:
        """Free the context, if there is one."""
        if self._made is not None:
            context, batch = self._made
            batch.close()
            context.close()
