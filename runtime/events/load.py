"""What workers say about their load, once a second, numbered like all events (`source.py`).

A router keeps the last report with the instance (`caller/instances.py`). While the broker is away
that report stays; of an instance that has sent none, the router counts its own requests.
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
from .follower import EventFollower
from .source import EventSource
from .subjects import topic_of

__all__ = ["LOAD_INTERVAL_S", "LoadFollower", "LoadReport", "LoadSource"]

LOAD_INTERVAL_S: Final = 1.0


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """How busy an instance is, as it says itself."""

    active: int
    """Requests being served."""
    blocks_used: int = 0
    """KV blocks that running sequences hold; 0 where the engine keeps none."""
    blocks_total: int = 0
    """KV blocks that the engine has."""
    waiting_tokens: int = 0
    """Prompt tokens that are still to be computed."""


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


class LoadFollower:
    """Hands each report of an instance that `follows` names to `take(instance_id, report)`."""

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        *,
        follows: Callable[[str], bool],
        take: Callable[[str, LoadReport], None],
    ) -> None:
        self._take = take
        self.follower = EventFollower(
            events,
            topic_of("load", endpoint),
            on_event=self.receive,
            on_snapshot=self._receive_snapshot,
            follows=follows,
        )
        """What was missed, and counted."""

    def receive(self, instance_id: str, body: bytes) -> None:
        """Take one report as it was published; raises `RemoteProtocolError` for nonsense."""
        try:
            report = _decoder.decode(body)
        except UNDECODABLE as error:
            raise RemoteProtocolError(f"not a load report: {error}") from error
        if min(msgspec.structs.astuple(report)) < 0:
            raise RemoteProtocolError(f"a load below nothing: {report}")
        self._take(instance_id, report)

    def _receive_snapshot(self, instance_id: str, bodies: tuple[bytes, ...]) -> None:
        for body in bodies:
            self.receive(instance_id, body)
