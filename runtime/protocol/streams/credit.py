"""Credit: how many bytes of items one stream may send before its reader has taken them.

Sans-IO. A stream starts with a window, and what its reader has taken is given back in halves of it:
a stream that is read runs without a pause, one that is not stands still by itself. A sender with any
credit left may send one whole item, whatever its size, so credit is never more than one item below
zero.
"""

from __future__ import annotations

from ...errors import RemoteProtocolError


class SendCredit:
    """The sender's end: what it may still send."""

    __slots__ = ("left_bytes", "window_bytes")

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.left_bytes = window_bytes

    def spend(self, item_bytes: int) -> bool:
        """Send one item; whether another may follow. Only while `left_bytes` is above zero."""
        assert self.left_bytes > 0, "an item without credit"
        self.left_bytes -= item_bytes
        return self.left_bytes > 0

    def grant(self, given_bytes: int) -> None:
        """The reader gives credit back; `RemoteProtocolError` if so much was not spent."""
        if given_bytes <= 0 or self.left_bytes + given_bytes > self.window_bytes:
            raise RemoteProtocolError(
                f"{given_bytes} bytes of credit on top of {self.left_bytes}; "
                f"the window is {self.window_bytes}"
            )
        self.left_bytes += given_bytes


class ReceiveCredit:
    """The reader's end: what may still come, and what was taken and is not given back yet."""

    __slots__ = ("left_bytes", "taken_bytes", "window_bytes")

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.left_bytes = window_bytes
        self.taken_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self.window_bytes - self.left_bytes - self.taken_bytes

    def arrive(self, items: list[bytes]) -> bool:
        """Items came; whether there was credit for each of them."""
        if len(items) == 1:
            # As it mostly is: one token of a step.
            had_credit = self.left_bytes > 0
            self.left_bytes -= len(items[0])
            return had_credit
        last_bytes = item_bytes = 0
        for item in items:
            last_bytes = len(item)
            item_bytes += last_bytes
        self.left_bytes -= item_bytes
        return self.left_bytes + last_bytes > 0

    def take(self, count: int) -> int:
        """The consumer took `count` bytes; how many to give back now: half a window or more, or none."""
        self.taken_bytes += count
        if self.taken_bytes * 2 < self.window_bytes:
            return 0
        given, self.taken_bytes = self.taken_bytes, 0
        self.left_bytes += given
        return given
