"""The socket options that have an effect here: keep-alive, user timeout and linger, as Linux reads them."""

from __future__ import annotations

import math
import socket as stdlib
import struct

RETRIES_S = 924.6
"""How long Linux repeats unacknowledged data by default (tcp_retries2 = 15)."""


class SocketOptions(dict[tuple[int, int], "int | bytes"]):
    """What was set on one socket, by level and name."""

    def _number(self, level: int, name: int, default: int) -> int:
        value = self.get((level, name), default)
        return value if isinstance(value, int) else default

    @property
    def is_kept_alive(self) -> bool:
        """Whether an idle connection is probed."""
        return bool(self._number(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 0))

    @property
    def idle_s(self) -> float:
        """From the last word of the peer until the first probe."""
        return self._number(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE, 7200)

    @property
    def silence_s(self) -> float:
        """From the last word of the peer until an idle connection that is probed ends.

        As Linux does: the first probe goes out after `idle_s`; the connection ends at a later
        probe's time, once `count` are unanswered or, if it is set, the user timeout is over.
        """
        interval_s = self._number(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPINTVL, 75)
        count = self._number(stdlib.IPPROTO_TCP, stdlib.TCP_KEEPCNT, 9)
        if user_s := self._user_s:
            count = max(1, math.ceil((user_s - self.idle_s) / max(1, interval_s)))
        return self.idle_s + interval_s * count

    @property
    def unacknowledged_s(self) -> float:
        """How long data may stay unacknowledged."""
        return self._user_s or RETRIES_S

    @property
    def _user_s(self) -> float:
        return self._number(stdlib.IPPROTO_TCP, stdlib.TCP_USER_TIMEOUT, 0) / 1000

    @property
    def lingers_zero(self) -> bool:
        """Whether closing resets the connection."""
        value = self.get((stdlib.SOL_SOCKET, stdlib.SO_LINGER))
        if not isinstance(value, bytes) or len(value) != 8:
            return False
        is_on, seconds = struct.unpack("ii", value)
        return bool(is_on) and seconds == 0
