"""What a process's transfers look like at one moment: for `/health` and `trinamo status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen(kw_only=True)
class BackendStatistics:
    """One backend of the chain."""

    backend: str
    is_open: bool = True
    """Whether it can be used on this machine at all."""
    peers: int = 0
    """Peers that we are connected to and that have it too."""
    usable_peers: int = 0
    """Those of them that new transfers go to by it."""
    in_flight: int = 0
    """Transfers under way."""
    done: int = 0
    """Transfers that this process began and that are done, since the start."""
    done_bytes: int = 0
    problem: str = ""
    """Why it is not open, does not take our memory, or lately failed with a peer."""


@attrs.frozen(kw_only=True)
class TransferStatistics:
    """The chain in its order, and what went on over it."""

    chain: Sequence[BackendStatistics]
    peers: int
    """Peers connected to."""
    fallbacks: int
    """Transfers that went on over another backend, since the start."""
    leased: int = 0
    """Transfers and grants that hold blocks."""
    blocks_in_flight: int = 0
    quarantined_blocks: int = 0
    moved_bytes: Mapping[str, int] = {}
    """By the engine id of a peer that is connected to, what we have read from it and written to it."""
