"""The tickets of peers that transfers of ours carry now: what we say when an owner asks."""

from __future__ import annotations

__all__ = ["Tickets"]


class Tickets:
    """How many transfers with each ticket are not settled. Never waits.

    Why SETTLED is the truth: an owner revokes the ticket, then asks. We count a transfer in the same
    synchronous stretch that starts it, so, seen by whoever asks, before it looks at the owner's
    access page. Each side writes before it reads, and so one of them sees the other: either the
    question finds the transfer counted, or the transfer looks at the page after the answer, which
    is after the revocation, and is refused. It stays counted between its later looks, until it is
    settled; one that never settles says MOVING for the life of the process.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def enter(self, ticket: int) -> None:
        """A transfer with this ticket starts; 0 is none."""
        if ticket:
            self._counts[ticket] = self._counts.get(ticket, 0) + 1

    def leave(self, ticket: int) -> None:
        """One that entered is settled."""
        if ticket:
            self._counts[ticket] -= 1
            if not self._counts[ticket]:
                del self._counts[ticket]

    def is_settled(self, ticket: int) -> bool:
        """Whether nothing of ours moves with it."""
        return ticket not in self._counts
