"""How much work a client of HTTP/2 may cause that asks for nothing. Sans-IO.

Frames that make a server work without an answer at their end (streams opened and reset at once, a
flood of PING, SETTINGS, PRIORITY, empty DATA, half heads) are each within the protocol, and
together an attack (CVE-2019-9511 to 9518, 2023-44487, 2024-27316, 2025-8671). So each frame costs
something, time pays it back, and so does what an honest client has to send: an answer it took to
its end, a piece of an answer, for which it may grant new room.
"""

from __future__ import annotations

from typing import Final

BUDGET: Final = 2_000.0
REFILL_PER_S: Final = 200.0
HEAD_BYTES: Final = 9
SMALL_DATA_BYTES: Final = 64
DATA, HEADERS, RESET, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 6, 8, 9
RESET_COSTS: Final = 10
_COSTS: Final = {HEADERS: 1, RESET: RESET_COSTS, PING: 2, WINDOW_UPDATE: 1, CONTINUATION: 10}
_OTHERS_COST: Final = 5
FIELD_COST: Final = 0.2
"""What a field of a head costs to read, whether its request is taken or not."""
ANSWER_REPAYS: Final = 11
"""A head, and a reset that crosses the answer's end."""
PIECE_REPAYS: Final = 2
"""New room for the stream, and for the connection."""


class FrameBudget:
    """Of one connection. `now` is any clock in seconds that does not go back."""

    def __init__(self, now: float) -> None:
        self._left = BUDGET
        self._at = now
        self._head = bytearray()
        self._body_left = 0

    @property
    def is_spent(self) -> bool:
        """Whether the client has caused more than it may."""
        return self._left < 0

    def count(self, data: bytes, now: float) -> None:
        """Count the frames that begin in `data`, the next bytes after the preface."""
        self._left = min(BUDGET, self._left + (now - self._at) * REFILL_PER_S)
        self._at = now
        at = 0
        while at < len(data):
            skipped = min(self._body_left, len(data) - at)
            self._body_left -= skipped
            at += skipped
            taken = data[at : at + HEAD_BYTES - len(self._head)]
            self._head += taken
            at += len(taken)
            if len(self._head) == HEAD_BYTES:
                self._body_left = int.from_bytes(self._head[:3], "big")
                kind = self._head[3]
                if kind != DATA:
                    self._left -= _COSTS.get(kind, _OTHERS_COST)
                elif self._body_left < SMALL_DATA_BYTES:
                    self._left -= 1
                self._head.clear()

    def spend(self, cost: float) -> None:
        """Something that no frame tells by itself."""
        self._left -= cost

    def repay(self, amount: float) -> None:
        """The client took something."""
        self._left = min(BUDGET, self._left + amount)
