"""What a peer may do with a region: its generation and the blocks granted to tickets.

Sans-IO and shared by every transfer plane that checks on the owner's side. A decision holds for
one instant: planes ask again when something was withdrawn, see `AccessTable.is_open_to`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ...errors import LocalProtocolError, StaleMemoryError
from .description import check_blocks, pool_numbers

OnComplete = Callable[[bytes], None]
"""Told what a peer's transfer said when it was done; must not raise."""


def unheard(message: bytes, /) -> None:
    """Nobody waits for the grant's completion."""


@attrs.define
class _Granted:
    blocks: set[int]
    on_complete: OnComplete
    may_write: bool


class AccessTable:
    """Who may move which blocks of one region.

    Without tickets any peer that knows the generation may move any block. With them a peer may
    move what was granted to the ticket it shows; ticket 0 is never granted. A block is granted
    with all its `parts`, which are `pool_blocks` apart in what peers name.
    """

    def __init__(self, pool_blocks: int, *, needs_ticket: bool, parts: int = 1) -> None:
        self.pool_blocks, self.parts = pool_blocks, parts
        self.generation = 1
        self.is_withdrawn = False
        self._grants: dict[int, _Granted] | None = {} if needs_ticket else None

    def renew(self) -> int:
        """Make every description given out before stale."""
        self.generation += 1
        return self.generation

    def withdraw(self) -> None:
        """The region is deregistered: nothing may be done with it any more."""
        self.is_withdrawn = True

    def grant(
        self,
        ticket: int,
        blocks: Sequence[int],
        on_complete: OnComplete = unheard,
        *,
        may_write: bool = True,
    ) -> None:
        """Let `ticket` move these blocks too; `on_complete` is told by `complete`."""
        if self._grants is None:
            raise LocalProtocolError("the region was registered without tickets")
        if not 0 < ticket < 2**63:
            raise LocalProtocolError(f"ticket {ticket} is not between 1 and 2**63 - 1")
        check_blocks(blocks, self.pool_blocks, whose="own")
        granted = self._grants.setdefault(ticket, _Granted(set(), on_complete, may_write))
        granted.blocks.update(blocks)
        granted.on_complete = on_complete

    def revoke(self, ticket: int) -> None:
        if self._grants is not None:
            self._grants.pop(ticket, None)

    def is_open_to(self, generation: int, ticket: int) -> bool:
        """Whether transfers admitted with these may go on."""
        return (
            not self.is_withdrawn
            and generation == self.generation
            and (self._grants is None or ticket in self._grants)
        )

    def complete(self, ticket: int, message: bytes) -> None:
        """A peer says that what it did with `ticket` is done: tell whoever granted it.

        Only who was given the ticket can name it. `StaleMemoryError` for one that is not live.
        """
        self._granted(ticket).on_complete(message)

    def check(self, generation: int, ticket: int) -> None:
        """Raise `StaleMemoryError` unless a peer that shows these may move anything now."""
        if self.is_withdrawn:
            raise StaleMemoryError("the region was deregistered")
        if generation != self.generation:
            raise StaleMemoryError(
                f"the region is at generation {self.generation}, not {generation}"
            )
        if self._grants is not None:
            self._granted(ticket)

    def _granted(self, ticket: int) -> _Granted:
        granted = None if self.is_withdrawn or self._grants is None else self._grants.get(ticket)
        if granted is None:
            raise StaleMemoryError("the ticket is unknown or was revoked")
        return granted

    def admit(
        self, generation: int, ticket: int, blocks: Sequence[int], *, is_target: bool
    ) -> None:
        """Raise unless a peer may move these blocks now.

        `StaleMemoryError` for the wrong generation, an unknown ticket, blocks not granted to it, or
        a target where it is for reading;
        `RequestError` for blocks that are not there, or named twice as a target.
        """
        # A stranger is refused before its list is looked at, which may be long.
        self.check(generation, ticket)
        count = self.pool_blocks * self.parts
        check_blocks(blocks, count, whose="remote", is_target=is_target)
        if self._grants is None:
            return
        granted = self._granted(ticket)
        if not granted.blocks.issuperset(pool_numbers(blocks, self.pool_blocks, self.parts)):
            raise StaleMemoryError("blocks that were not granted to the ticket")
        if is_target and not granted.may_write:
            raise StaleMemoryError("the ticket is for reading")
