"""Notifications that have arrived at a transfer plane and wait to be received; a bounded queue."""

from __future__ import annotations

import trio

from ..errors import OverloadedError
from ..protocol.transfer import NOTIFICATIONS_MAX
from .transfer import Notification

__all__ = ["NotificationQueue"]


class NotificationQueue:
    """At most `NOTIFICATIONS_MAX`, in the order they arrived."""

    def __init__(self) -> None:
        self._sender, self._receiver = trio.open_memory_channel[Notification](NOTIFICATIONS_MAX)

    def put(self, notification: Notification) -> None:
        """One more; `OverloadedError`, which ends the sender's transfer, if too many wait."""
        try:
            self._sender.send_nowait(notification)
        except trio.WouldBlock:
            raise OverloadedError(
                f"{NOTIFICATIONS_MAX} notifications wait to be received",
                bound="notifications",
                value=NOTIFICATIONS_MAX,
            ) from None

    async def receive(self) -> Notification:
        """The next one. Cancelled, it loses none."""
        return await self._receiver.receive()
