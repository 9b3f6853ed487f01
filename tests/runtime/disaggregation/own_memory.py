"""`exact` over KV memory that is its author's: `--engine …/own_memory.py:engine`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import numpy as np

import trinamo
from trinamo.runtime.engines.exact.engine import ExactEngine
from trinamo.runtime.engines.loop.host import EngineHost, open_engine_host
from trinamo.runtime.kv.memory import KvLayout


class OwnMemory:
    """`ExactEngine`, with its tensors, one a layer, handed over by `trinamo.kv_cache`."""

    def __init__(self, exact: ExactEngine) -> None:
        self._exact = exact
        tensors = [np.asarray(buffer) for buffer in exact.memory.buffers]
        self.memory = trinamo.kv_cache(tensors, exact.memory.shape).memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exact, name)


def engine() -> AbstractAsyncContextManager[EngineHost]:
    """As `open_exact_engine`, whose defaults these are."""
    exact = ExactEngine(layout=KvLayout.PER_LAYER)
    return open_engine_host(cast("Any", OwnMemory(exact)), step_tokens_max=128)
