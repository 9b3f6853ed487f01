"""Following what each instance says of itself where only the latest word counts: load, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from ..errors import RemoteProtocolError
from ..planes import EventPlane
from ..protocol.undecodable import UNDECODABLE
from .follower import EventFollower

T = TypeVar("T")


class ReportFollower(Generic[T]):
    """Hands each report of an instance that `follows` names to `take(instance_id, report)`.

    `topic` is that of the reports, each a MessagePack `report_type`; what does not decode is an
    event that makes no sense, and counted by `follower`.
    """

    def __init__(
        self,
        events: EventPlane,
        topic: str,
        report_type: type[T],
        *,
        follows: Callable[[str], bool],
        take: Callable[[str, T], None],
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(report_type)
        self._take = take
        self.follower = EventFollower(
            events,
            topic,
            on_event=self.receive,
            on_snapshot=self._receive_snapshot,
            follows=follows,
        )
        """What was missed, and counted."""

    def receive(self, instance_id: str, body: bytes) -> None:
        """Take one report as it was published; raises `RemoteProtocolError` for nonsense."""
        try:
            report = self._decoder.decode(body)
        except UNDECODABLE as error:
            raise RemoteProtocolError(f"not a report: {error}") from error
        self._take(instance_id, report)

    def _receive_snapshot(self, instance_id: str, bodies: tuple[bytes, ...]) -> None:
        for body in bodies:
            self.receive(instance_id, body)
