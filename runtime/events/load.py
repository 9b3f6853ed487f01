"""What workers say about their load, once a second, numbered like all events (`source.py`).

A router keeps the last report with the instance (`caller/instances.py`). While the broker is away
that report stays; of an instance that has sent none, the router counts its own requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import trio

from ..nurseries import open_nursery
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from .source import EventSource
from .subjects import topic_of

LOAD_INTERVAL_S: Final = 1.0


Count = Annotated[int, msgspec.Meta(ge=0)]


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """How busy an instance is, as it says itself."""

    active: Count
    """Requests being served."""
    blocks_used: Count = 0
    """KV blocks that running sequences hold; 0 where the engine keeps none."""
    blocks_total: Count = 0
    """KV blocks that the engine has."""
    waiting_tokens: Count = 0
    """Prompt tokens that are still to be computed."""


_encode = msgspec.msgpack.Encoder().encode


class LoadSource:
    """Publishes what `read` returns, for one instance of one endpoint."""

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        *,
        instance_id: str,
        incarnation: int,
        read: Callable[[], LoadReport],
        interval_s: float = LOAD_INTERVAL_S,
    ) -> None:
        self._read = read
        self._interval_s = interval_s
        self._source = EventSource(
            events,
            topic_of("load", endpoint),
            publisher=instance_id,
            incarnation=incarnation,
            snapshot=lambda _part, _parts: _encode(read()),
            # The reports come often enough to show that one was lost.
            beat_s=60.0,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled."""
        async with open_nursery() as nursery:
            await nursery.start(self._source.run)
            task_status.started()
            while True:
                await self._source.publish(_encode(self._read()))
                await trio.sleep(self._interval_s)
