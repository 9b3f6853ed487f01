"""I9, watched while it happens: who owns which block, and which transfers may still touch it.

The books are kept beside the pool's own, from what is asked of it and of the planes, so that a pool
or a lease that is wrong does not hide it. Bytes are compared by the hosts themselves
(`process.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.planes import Transfer, TransferPlane

from ..errors import Violation

__all__ = ["BlockAudit", "WatchedPlane"]


@attrs.define
class BlockAudit:
    """The books of one pool."""

    host: str
    pool: BlockPool
    owners: dict[int, str] = attrs.Factory(dict)
    """Whose each block is that somebody has taken."""
    _moves: list[tuple[Transfer, tuple[int, ...], str]] = attrs.Factory(list)

    def taken(self, blocks: Sequence[int], owner: str) -> None:
        """The pool lends blocks; raises `Violation` if they are not free to be lent."""
        for block in blocks:
            if block in self.owners:
                raise self._broken(f"block {block} of {self.owners[block]} is lent to {owner}")
            for name in self._touching(block):
                raise self._broken(
                    f"block {block} is lent to {owner} while the transfer of {name} may touch it"
                )
            self.owners[block] = owner
        self.count()

    def returned(self, blocks: Sequence[int]) -> None:
        """The owner gives blocks back."""
        for block in blocks:
            del self.owners[block]
        self.count()

    def moves(self, transfer: Transfer, blocks: Sequence[int]) -> None:
        """A transfer that we started may touch these blocks until it is settled."""
        owner = self.owners.get(blocks[0], "nobody") if blocks else "nobody"
        self._moves.append((transfer, tuple(blocks), owner))

    def transfers_of(self, owner: str) -> list[Transfer]:
        """Those that moved blocks of `owner` and may still do so."""
        return [move for move, _, name in self._moves if name == owner and not move.is_settled]

    def count(self) -> None:
        """Free, used, in flight and quarantined blocks are all there are, and none is two."""
        pool = self.pool
        counts = (pool.free_count, pool.used_count, pool.in_flight_count, pool.quarantined_count)
        if min(counts) < 0 or sum(counts) != pool.block_count:
            raise self._broken(f"free, used, in flight, quarantined are {counts}")
        if pool.free_count + len(self.owners) > pool.block_count:
            raise self._broken(f"{pool.free_count} are free, but {len(self.owners)} have owners")
        self._moves = [move for move in self._moves if not move[0].is_settled]

    def _touching(self, block: int) -> list[str]:
        return [
            name
            for transfer, blocks, name in self._moves
            if block in blocks and not transfer.is_settled
        ]

    def _broken(self, text: str) -> Violation:
        return Violation("I9", f"{self.host}: {text}")


class WatchedPlane:
    """A transfer plane whose transfers are told to the audit; everything else is the plane's."""

    def __init__(self, plane: TransferPlane, audit: BlockAudit) -> None:
        self._plane, self._audit = plane, audit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def start(
        self, direction: Any, local: Any, local_blocks: Sequence[int], *args: Any, **options: Any
    ) -> Transfer:
        """See `TransferPlane.start`."""
        transfer = self._plane.start(direction, local, local_blocks, *args, **options)
        self._audit.moves(transfer, local_blocks)
        return transfer
