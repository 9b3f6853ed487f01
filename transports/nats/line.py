"""What the event plane sees of its connection: what is wanted, what waits, whether it stands.

A plane puts interests and messages in, by plain calls; whoever holds the connection takes them out,
makes every interest again on each new connection, and says what is lost with the old one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from .outbox import Interest, Outbox


class Line(ABC):
    """A connection that comes and goes. `messages_max` and `bytes_max` bound what waits for it."""

    def __init__(self, *, messages_max: int, bytes_max: int) -> None:
        self.outbox = Outbox(messages_max=messages_max, bytes_max=bytes_max)
        self.interests: dict[Interest, None] = {}
        self.message_bytes_max = 1_048_576
        self.is_connected = False
        self.connection_count = 0
        self.server = ""
        self.last_error = "not connected yet"

    def add(self, interest: Interest) -> None:
        """Subscribe from now on, on this connection and all that follow."""
        self.interests[interest] = None
        # Without a connection the table is enough: the next one starts with all that is in it.
        if self.is_connected:
            self.outbox.put_change(interest)
            self.wake()

    def remove(self, interest: Interest) -> None:
        """Subscribe no more."""
        interest.is_wanted = False
        del self.interests[interest]
        if interest.handle is not None:
            self.outbox.put_change(interest)
            self.wake()

    @abstractmethod
    def wake(self) -> None:
        """There is something in the outbox."""

    def missing(self) -> list[Interest]:
        """What the present connection does not know yet."""
        return [each for each in self.interests if each.handle is None]

    def restored(self, server: str) -> None:
        """The present connection knows all interests: it counts as open."""
        for interest in self.interests:
            interest.confirmed()
        self.server = server
        self.connection_count += 1
        self.is_connected = True

    def forget(self) -> None:
        """The connection is over or about to be: nobody may wait for it any more."""
        self.is_connected = False
        for interest in self.interests:
            interest.handle = None
            interest.confirmed()
