"""Notifications of one-sided backends that have arrived and wait to be received."""

from __future__ import annotations

import logging

import trio

from ..protocol.transfer import NOTIFICATIONS_MAX
from .transfer import Notification

__all__ = ["Inbox"]

_log = logging.getLogger("trinamo.transfer")


class Inbox:
    """Notifications that have arrived, bounded; what is over the bound is dropped and counted."""

    def __init__(self) -> None:
        self._sender, self._receiver = trio.open_memory_channel[Notification](NOTIFICATIONS_MAX)
        self.dropped_count = 0
        """The sender of a one-sided transfer cannot be told any more that nobody listens."""

    def put(self, peer: str, region: int, message: bytes) -> None:
        """One more, from trio's thread."""
        try:
            self._sender.send_nowait(Notification(peer=peer, region=region, message=message))
        except trio.WouldBlock:
            self.dropped_count += 1
            _log.error("%d notifications wait; one of %s is lost", NOTIFICATIONS_MAX, peer)

    async def receive(self) -> Notification:
        """The next one."""
        return await self._receiver.receive()
