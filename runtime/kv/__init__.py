"""KV memory: which blocks are free, where their bytes are, and how they move to other processes.

`pool` counts blocks and needs no numpy; `memory` is the paged buffer that engines write and
transfers read; `transfers` keeps blocks that move from being reused too early, and `grants` finds
out when a peer has let go of those it was lent; `transfer_router` chooses the backend that moves
them; `engine_transfers` offers an engine's memory to others and finds theirs, by what `metadata`
keeps in the control plane. None of them decides who gets a block: that is
`engines/loop/scheduler.py`.
"""

from .device_array import device_memory
from .transfer.leases import BlockLeases, open_block_leases
from .transfer.metadata import NixlMetadata, NixlMetadataStore
from .transfer.router import TransferRouter, open_transfer_router

__all__ = [
    "BlockLeases",
    "NixlMetadata",
    "NixlMetadataStore",
    "TransferRouter",
    "device_memory",
    "open_block_leases",
    "open_transfer_router",
]
