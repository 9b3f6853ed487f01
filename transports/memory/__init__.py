"""In-process planes: for unit tests, single-process use, and, behind messages, the simulator."""

from .transfer import TransferFabric, open_memory_transfer_plane

__all__ = ["TransferFabric", "open_memory_transfer_plane"]
