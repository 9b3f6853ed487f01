"""What workers say about their load, and what a router knows of it.

`LoadSource` publishes a worker's load every second, numbered like all events (`sequenced.py`);
`LoadTable` keeps the last one of every instance that discovery knows. While the broker is away the last known load
stays; an instance that was never heard of has none, and the router counts its own requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import trio

from ..errors import RemoteProtocolError
from ..nurseries import open_nursery
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from ..protocol.undecodable import UNDECODABLE
from .sequenced import EventFollower, EventSource, topic_of

__all__ = ["LOAD_INTERVAL_S", "LoadReport", "LoadSource", "LoadTable"]

LOAD_INTERVAL_S: Final = 1.0


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """How busy an instance is, as it says itself."""

    active: int
    """Requests being served."""
    blocks_used: int = 0
    """KV blocks that running sequences hold; 0 where the engine keeps none."""
    blocks_total: int = 0
    """KV blocks that the engine has."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(LoadReport)


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


class LoadTable:
    """The last known load of every instance of one endpoint."""

    def __init__(self, events: EventPlane, endpoint: EndpointName) -> None:
        self._joined: dict[str, None] = {}
        self._reports: dict[str, LoadReport] = {}
        self._follower = EventFollower(
            events,
            topic_of("load", endpoint),
            on_event=self._take,
            on_snapshot=self._take_snapshot,
            follows=self._joined.__contains__,
        )

    @property
    def follower(self) -> EventFollower:
        """What was missed, and counted."""
        return self._follower

    def report(self, instance_id: str) -> LoadReport | None:
        """The last report of an instance; None if there was none."""
        return self._reports.get(instance_id)

    def active(self, instance_id: str) -> int | None:
        """How many requests the instance said it serves; None if it has said nothing."""
        report = self._reports.get(instance_id)
        return None if report is None else report.active

    def join(self, instance_id: str) -> None:
        """The instance is in the live set: believe its reports from now on."""
        self._joined[instance_id] = None

    def leave(self, instance_id: str) -> None:
        """The instance has left the live set: forget it, and what it still may say."""
        self._joined.pop(instance_id, None)
        self._reports.pop(instance_id, None)
        self._follower.forget(instance_id)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        await self._follower.run(task_status=task_status)

    def _take_snapshot(self, instance_id: str, bodies: tuple[bytes, ...]) -> None:
        for body in bodies:
            self._take(instance_id, body)

    def _take(self, instance_id: str, body: bytes) -> None:
        try:
            report = _decoder.decode(body)
        except UNDECODABLE as error:
            raise RemoteProtocolError(f"not a load report: {error}") from error
        if min(report.active, report.blocks_used, report.blocks_total) < 0:
            raise RemoteProtocolError(f"a load below nothing: {report}")
        self._reports[instance_id] = report
