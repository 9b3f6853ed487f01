"""KV memory: which blocks are free, where their bytes are, and how they move to other processes.

`pool` counts blocks and needs no numpy; `memory` is the paged buffer that engines write and
transfers read; `index` and `events` say who holds which prefix; `transfer/` moves blocks between
processes. None of them decides who gets a block: that is `engines/loop/scheduler.py`.
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
