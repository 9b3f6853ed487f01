"""Notifications of all backends of a router as one stream, each heard once.

A task per backend takes one notification at a time and waits until it is received, so what nobody
receives stays in the backend, under the backend's bound. They run from the first `receive` on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import trio

from ..errors import RemoteProtocolError
from ..planes import TransferPlane
from ..protocol.transfer_notice import Notice, NoticeFilter, decode_notice

__all__ = ["Notices"]

_log = logging.getLogger("trinamo.transfer")


class Notices:
    """What peers' routers told us. Owned by the router, whose nursery runs the tasks."""

    def __init__(self, planes: Sequence[TransferPlane], nursery: trio.Nursery) -> None:
        self._planes = planes
        self._nursery = nursery
        self._filter = NoticeFilter()
        self._send, self._receive = trio.open_memory_channel[Notice](0)
        self._is_running = False
        self.repeated_count = 0
        """Notices that were said again and dropped."""
        self.malformed_count = 0
        """Notifications that were no notice and dropped."""

    async def receive(self) -> Notice:
        """The next one, in the order they arrived by each backend; cancelled, it loses none."""
        if not self._is_running:
            self._is_running = True
            for plane in self._planes:
                self._nursery.start_soon(self._pump, plane)
        return await self._receive.receive()

    async def _pump(self, plane: TransferPlane) -> None:
        while True:
            notification = await plane.receive()
            try:
                notice = decode_notice(notification.message)
            except RemoteProtocolError as error:
                self.malformed_count += 1
                if math.log2(self.malformed_count).is_integer():
                    _log.warning(
                        "%s of %s by %s; %d so far",
                        *(error.message, notification.peer, plane.backend, self.malformed_count),
                    )
                continue
            if self._filter.is_new(notice):
                await self._send.send(notice)
            else:
                self.repeated_count += 1
