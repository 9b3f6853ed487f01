"""Asking a peer whether it has let go of our blocks, and answering when we are asked.

The question is carried by a plane that listens for as long as any transfer of its process can touch
memory of others, so that a refused connection is an answer, too. What each result means is a table in
`protocol/transfer/settlement.py`; who asks, and when, is `kv/transfer/settlement.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from ..protocol.transfer.settlement import InquiryResult

IsSettled = Callable[[int], bool]
"""Whether no transfer of ours with this ticket is under way. Synchronous, so that what it says is
true of one instant."""


@attrs.frozen
class InquiryReport:
    """What came of one question."""

    result: InquiryResult
    reached: str = ""
    """Where the connection was taken, by number and not by name; empty if it was not."""


class SettlementPlane(ABC):
    """One end of the question in one process; the mover of tcp is one."""

    address: str
    """Where we are asked: for our descriptor."""
    incarnation: str
    """Of this process: who is asked for."""

    def __init__(self) -> None:
        self._owners: list[IsSettled] = []
        self._active_count = 0

    @contextmanager
    def answering(self, is_settled: IsSettled) -> Iterator[None]:
        """Answer peers by `is_settled` until the block is left.

        Whoever owns transfers says so, and while nobody does, the answer is MOVING. After the block
        is left `is_settled` is still asked, and must still be right: what its owner left behind
        unsettled may move.
        """
        self._owners.append(is_settled)
        self._active_count += 1
        try:
            yield
        finally:
            self._active_count -= 1

    def is_settled(self, ticket: int) -> bool:
        """Whether every owner of transfers there was says so, and somebody is there to start or refuse them."""
        return self._active_count > 0 and all(owner(ticket) for owner in self._owners)

    @abstractmethod
    async def inquire(
        self, address: str, incarnation: str, ticket: int, *, timeout_s: float
    ) -> InquiryReport:
        """Ask the peer at `address` about a ticket that we have revoked before.

        Takes `timeout_s` seconds at most and raises nothing: what fails is a result, too. Cancelled, it
        leaves nothing behind.
        """
