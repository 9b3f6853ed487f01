"""`exact` over KV memory that is its author's: `--engine …/own_memory.py:engine`, `:gpu_engine`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, cast

import attrs
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


class GpuMemory(OwnMemory):
    """The same in the memory of the first GPU, by torch: the engine reads and writes it there."""

    def __init__(self, exact: ExactEngine) -> None:
        self._exact = exact
        torch = import_module("torch")
        shape = exact.memory.shape
        tail = (shape.block_tokens, shape.heads, shape.channels)
        size = (exact.info.block_count, 2, *tail)
        layers = [torch.zeros(size, dtype=torch.int16, device="cuda") for _ in range(shape.layers)]
        cache = trinamo.kv_cache(layers, shape, synchronize=torch.cuda.synchronize)
        self.memory = cache.memory
        cast("Any", exact.memory).view = [
            (GpuPlane(torch, layer[:, 0]), GpuPlane(torch, layer[:, 1])) for layer in layers
        ]


@attrs.frozen
class GpuPlane:
    """Keys or values of a layer, as far as `ExactEngine` asks an array for them."""

    torch: Any
    tensor: Any

    def __setitem__(self, rows: tuple[Any, Any], value: Any) -> None:
        blocks, slots = (self.torch.as_tensor(np.asarray(each)).cuda() for each in rows)
        self.tensor[blocks, slots] = self.torch.as_tensor(value.astype(np.int16)).cuda()

    def __getitem__(self, blocks: Sequence[int]) -> Any:
        return self.tensor[self.torch.as_tensor(blocks).cuda()].cpu().numpy()


def engine() -> AbstractAsyncContextManager[EngineHost]:
    """As `open_exact_engine`, whose defaults these are."""
    return _opened(OwnMemory(ExactEngine(layout=KvLayout.PER_LAYER)))


def gpu_engine() -> AbstractAsyncContextManager[EngineHost]:
    """The same on a GPU."""
    return _opened(GpuMemory(ExactEngine(layout=KvLayout.PER_LAYER)))


def _opened(own: OwnMemory) -> AbstractAsyncContextManager[EngineHost]:
    return open_engine_host(cast("Any", own), step_tokens_max=128)
