"""What a peer may do with a region: its generation and the blocks granted to tickets.

Sans-IO and shared by every transfer plane that checks on the owner's side. A decision holds for
one instant: planes ask again when something was withdrawn, see `AccessTable.is_open_to`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LocalProtocolError, StaleMemoryError
from .transfer import check_blocks

__all__ = ["AccessTable"]


class AccessTable:
    """Who may move which blocks of one region.

    Without tickets any peer that knows the generation may move any block. With them a peer may
    move what was granted to the ticket it shows; ticket 0 is never granted.
    """

    def __init__(self, block_count: int, *, needs_ticket: bool) -> None:
        self.block_count = block_count
        self.generation = 1
        self.is_withdrawn = False
        self._grants: dict[int, set[int]] | None = {} if needs_ticket else None

    def renew(self) -> int:
        """Make every description given out before stale."""
        self.generation += 1
        return self.generation

    def withdraw(self) -> None:
        """The region is deregistered: nothing may be done with it any more."""
        self.is_withdrawn = True

    def grant(self, ticket: int, blocks: Sequence[int]) -> None:
        """Let `ticket` move these blocks too."""
        if self._grants is None:
            raise LocalProtocolError("the region was registered without tickets")
        if not 0 < ticket < 2**63:
            raise LocalProtocolError(f"ticket {ticket} is not between 1 and 2**63 - 1")
        check_blocks(blocks, self.block_count, whose="own")
        self._grants.setdefault(ticket, set()).update(blocks)

    def revoke(self, ticket: int) -> None:
        """Let `ticket` move nothing any more."""
        if self._grants is not None:
            self._grants.pop(ticket, None)

    def is_open_to(self, generation: int, ticket: int) -> bool:
        """Whether transfers admitted with these may go on."""
        return (
            not self.is_withdrawn
            and generation == self.generation
            and (self._grants is None or ticket in self._grants)
        )

    def admit(
        self, generation: int, ticket: int, blocks: Sequence[int], *, is_target: bool
    ) -> None:
        """Raise unless a peer may move these blocks now.

        `StaleMemoryError` for the wrong generation, an unknown ticket or blocks not granted to it;
        `RequestError` for blocks that are not there, or named twice as a target.
        """
        if self.is_withdrawn:
            raise StaleMemoryError("the region was deregistered")
        if generation != self.generation:
            raise StaleMemoryError(
                f"the region is at generation {self.generation}, not {generation}"
            )
        check_blocks(blocks, self.block_count, whose="remote", is_target=is_target)
        if self._grants is None:
            return
        granted = self._grants.get(ticket)
        if granted is None:
            raise StaleMemoryError("the ticket is unknown or was revoked")
        if not granted.issuperset(blocks):
            raise StaleMemoryError("blocks that were not granted to the ticket")
