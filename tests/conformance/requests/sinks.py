"""Sinks for tests: what one was given, and one that has no room, or fails."""

from __future__ import annotations

from trinamo.runtime.sinks import Sink


class Collecting(Sink[bytes]):
    """Keeps what it gets; has room for as long as `has_room`; raises at the item `fails_at`."""

    def __init__(self, *, has_room: bool = True, fails_at: bytes = b"") -> None:
        super().__init__()
        self.items: list[bytes] = []
        self.has_room = has_room
        self.fails_at = fails_at

    def take(self, items: list[bytes]) -> bool:
        self.items += items
        if self.fails_at in items:
            raise ZeroDivisionError("the sink's own mistake")
        return self.has_room

    def make_room(self) -> None:
        """From now on there is room, and the source is told."""
        self.has_room = True
        self.room_again()
