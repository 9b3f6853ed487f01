"""What workers say about their state: ready, or draining; told when it changes, as numbered events.

Discovery says the same, but only while the store is there: a worker that begins to drain while it is
away is passed over by who hears this (`caller/instances.py`).
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec
import trio

from ..nurseries import open_nursery
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from .source import EventSource, topic_of

STATUS_TOPIC: Final = "status"
_BEAT_S = 10.0


class WorkerState(enum.StrEnum):
    """Whether an instance takes requests, as it says itself."""

    READY = "ready"
    DRAINING = "draining"


_encode = msgspec.msgpack.Encoder().encode


class StatusSource:
    """Publishes the state of one instance of one endpoint."""

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        *,
        instance_id: str,
        incarnation: int,
    ) -> None:
        self._state = WorkerState.READY
        self._is_draining = trio.Event()
        self._source = EventSource(
            events,
            topic_of(STATUS_TOPIC, endpoint),
            publisher=instance_id,
            incarnation=incarnation,
            snapshot=lambda _part, _parts: _encode(self._state),
            beat_s=_BEAT_S,
        )

    def drain(self) -> None:
        """It drains from now on. Never waits."""
        self._is_draining.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        async with open_nursery() as nursery:
            await nursery.start(self._source.run)
            await self._source.publish(_encode(self._state))
            await self._is_draining.wait()
            self._state = WorkerState.DRAINING
            await self._source.publish(_encode(self._state))
            await trio.sleep_forever()
