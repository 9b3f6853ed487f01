"""What processes tell of themselves by events, sealed: nobody but members of the cluster reads it or is believed.

Each message is sealed about its subject, so a publisher's name, its incarnation and its number are proven
with the body; what does not open is dropped before anybody decodes it. The same holds for a request for a snapshot,
and for its answer, whose subject was made for it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, cast

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.logs.notices import LogNotices
from trinamo.runtime.planes import EventPlane, Message, Subscription

from .sealing import SEALED_BYTES, Sealer

_log = logging.getLogger("trinamo.events")
_SUBJECT_CHARS_MAX: Final = 160


class SealedEvents:
    """The topics of an event plane. Its methods are those of `EventPlane` that topics need, and keep their promises."""

    def __init__(self, plane: EventPlane, sealer: Sealer) -> None:
        self._plane, self._sealer = plane, sealer
        self._notices = LogNotices(_log)
        self.unsigned_count = 0
        """Messages that were dropped."""

    @property
    def message_bytes_max(self) -> int:
        """See `EventPlane`."""
        return self._plane.message_bytes_max - SEALED_BYTES

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """See `EventPlane`."""
        sealed = self._sealer.seal(payload, _about(subject))
        await self._plane.publish(subject, sealed, reply=reply, headers=headers)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AsyncIterator[Subscription]:
        """See `EventPlane`; what no member has sealed does not come."""
        opening = self._plane.subscribe(subject, group=group, pending_max=pending_max)
        async with opening as messages:
            yield _Opened(messages, self)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> Message:
        """See `EventPlane`; answers that no member has sealed are passed over."""
        told: list[Message] = []

        def accept(reply: Message) -> bool:
            if reply.says_nobody:
                return True
            opened = self.opened(reply)
            told.extend([] if opened is None else [opened])
            return opened is not None

        sealed = self._sealer.seal(payload, _about(subject))
        await self._plane.request(subject, sealed, timeout_s=timeout_s, accept=accept)
        return told[0]

    def opened(self, message: Message) -> Message | None:
        """The message as it was published; None, and counted, if no member did that."""
        try:
            payload = self._sealer.open(message.payload, _about(message.subject))
        except RemoteProtocolError:
            self.unsigned_count += 1
            self._notices.warn("told by no member", message.subject[:_SUBJECT_CHARS_MAX])
            return None
        return Message(message.subject, payload, message.reply, message.headers)


def _about(subject: str) -> bytes:
    return b"event " + subject.encode()


def sealed_events(plane: EventPlane, sealer: Sealer) -> EventPlane:
    """`plane` for what processes tell of themselves; as it is where there is no secret."""
    return cast("EventPlane", SealedEvents(plane, sealer)) if sealer.seals else plane


class _Opened:
    """A subscription without what no member told."""

    def __init__(self, messages: Subscription, events: SealedEvents) -> None:
        self._messages, self._events = messages, events

    def __aiter__(self) -> _Opened:
        return self

    async def __anext__(self) -> Message:
        while True:
            message = self._events.opened(await anext(self._messages))
            if message is not None:
                return message

    @property
    def dropped(self) -> int:
        return self._messages.dropped
