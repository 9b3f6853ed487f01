"""Log lines about the connection, at most one of a kind every few seconds.

A server that is away or a client that is slow produces the same error hundreds of times a second.
"""

from __future__ import annotations

import logging

from trinamo.runtime.logs.notices import LogNotices

logger = logging.getLogger("trinamo.nats")

INTERVAL_S = 5.0


class Notices(LogNotices):
    """Rate-limited warnings on the logger `trinamo.nats`, counted by kind."""

    def __init__(self, *, interval_s: float = INTERVAL_S) -> None:
        super().__init__(logger, interval_s=interval_s)
