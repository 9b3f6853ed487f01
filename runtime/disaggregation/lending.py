"""How much of a decode worker's KV pool may depend on prefill workers: those that hang give nothing back.

Blocks that a peer may write, or that a read may still fill, are nobody's until that has settled, or is
proven never to happen. So no more than a share of the pool is promised, lent or in quarantine at a
time, and prompts beyond it are computed where their answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..engines.handoff import Prompt, Reservation
from ..kv.pool import BlockPool, block_count_for


class Lending:
    """The bound of one pool."""

    def __init__(self, pool: BlockPool, *, block_tokens: int, share: float) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._blocks_max = int(share * pool.block_count)
        self._promised = 0

    @property
    def room(self) -> int:
        """How many more blocks may be promised now."""
        held = self._pool.in_flight_count + self._pool.quarantined_count
        return self._blocks_max - self._promised - held

    def missing(self, prompt: Prompt) -> int:
        """How many blocks of `prompt` would have to come."""
        skip = prompt.cached_tokens // self._block_tokens
        return block_count_for(len(prompt.token_ids), self._block_tokens) - skip

    @contextmanager
    def promise(
        self, prompt: Prompt
    ) -> Iterator[Callable[[Reservation], tuple[int, list[int]] | None]]:
        """Count the missing blocks of `prompt` as promised until the block is left.

        What it yields leases those of a reservation instead, and says how many leading blocks are
        there already, and the ids of those to be filled. None if these have become more than the
        bound lets: then nothing is leased.
        """
        promised, lent = self.missing(prompt), list[int]()
        self._promised += promised

        def lend(reservation: Reservation) -> tuple[int, list[int]] | None:
            nonlocal promised
            self._promised -= promised
            promised = 0
            skip = reservation.prompt.cached_tokens // self._block_tokens
            blocks = list(reservation.block_ids[skip:])
            if len(blocks) > self.room:
                return None
            self._pool.lease(blocks)
            lent.extend(blocks)
            return skip, blocks

        try:
            yield lend
        finally:
            self._promised -= promised
            self._pool.release(lent)
