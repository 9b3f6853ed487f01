"""The KV cache of one engine, as transfers need it: bytes, who owns which block, what they mean.

An engine that has one hands it out (`engines/loop/host.py`); `kv/transfer/engine.py` registers it.
The engine's scheduler stays the owner of the pool.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs

from .pool import BlockPool
from .regions import RegionSet


@attrs.frozen(kw_only=True, eq=False)
class KvCache:
    """The KV memory of one engine and who owns its blocks, for as long as the engine is open."""

    memory: RegionSet
    pool: BlockPool
    """Its block ids are those of `memory`."""
    fingerprint: str
    """Equal to a peer's, or no block can be moved (`kv.memory.fingerprint`)."""


@runtime_checkable
class HoldsKv(Protocol):
    """An engine that may have KV memory."""

    @property
    def kv(self) -> KvCache | None:
        """Its cache; None if no byte of it can leave the engine."""
        ...
