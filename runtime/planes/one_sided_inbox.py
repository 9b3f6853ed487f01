"""Notifications of one-sided backends that have arrived and wait to be received."""

from __future__ import annotations

import logging

from ..errors import OverloadedError
from .transfer import Notification
from .transfer_inbox import NotificationQueue

__all__ = ["Inbox"]

_log = logging.getLogger("trinamo.transfer")


class Inbox:
    """Notifications that have arrived, bounded; what is over the bound is dropped and counted."""

    def __init__(self) -> None:
        self._queue = NotificationQueue()
        self.dropped_count = 0
        """The sender of a one-sided transfer cannot be told any more that nobody listens."""

    def put(self, peer: str, region: int, message: bytes) -> None:
        """One more, from trio's thread."""
        try:
            self._queue.put(Notification(peer=peer, region=region, message=message))
        except OverloadedError as error:
            self.dropped_count += 1
            _log.error("%s; one of %s is lost", error.message, peer)

    async def receive(self) -> Notification:
        """The next one."""
        return await self._queue.receive()
