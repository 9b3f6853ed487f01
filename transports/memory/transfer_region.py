"""Registered memory of the in-memory transfer plane, and what may go wrong with its transfers."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec

from trinamo.runtime.protocol.transfer import MemoryDescription, encode_description
from trinamo.runtime.protocol.transfer_access import AccessTable

__all__ = ["Region", "TransferFaults"]


@attrs.define(kw_only=True)
class TransferFaults:
    """What goes wrong with the transfers that one plane starts, from now on."""

    is_unreachable: bool = False
    """Peers cannot be reached, and transfers fail before a block has moved."""
    breaks_after: int | None = None
    """The connection breaks after so many blocks of a transfer."""
    stalls_after: int | None = None
    """Nothing moves any more after so many blocks, as if the peer were stopped."""
    corrupts: int | None = None
    """A bit of this block of a transfer turns over on the way."""
    lands_late: bool = False
    """An aborted or failed transfer goes on moving, and is settled only when all has moved."""
    block_s: float = 0.0
    """How long one block takes."""


class Region:
    """One registered region. Implements `MemoryRegion`."""

    def __init__(
        self, view: memoryview, description: MemoryDescription, access: AccessTable
    ) -> None:
        self.view = view
        self.access = access
        self._description = description

    is_fenced = True

    @property
    def description(self) -> MemoryDescription:
        return msgspec.structs.replace(self._description, generation=self.access.generation)

    def describe(self) -> bytes:
        return encode_description(self.description)

    def renew(self) -> int:
        return self.access.renew()

    def grant(self, ticket: int, blocks: Sequence[int]) -> None:
        self.access.grant(ticket, blocks)

    def revoke(self, ticket: int) -> None:
        self.access.revoke(ticket)

    def block(self, number: int) -> memoryview:
        size = self._description.block_bytes
        return self.view[number * size : (number + 1) * size]
