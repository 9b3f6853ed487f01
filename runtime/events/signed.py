"""What processes tell of themselves by events, with proof that a member of the cluster told it.

Behind each message is a code over its subject and its bytes, by a key that only members have: so a publisher's
name, its incarnation and its number are proven with the body. What has no right code is dropped before
anybody decodes it. The same holds for a request for a snapshot, and for its answer, whose subject
was made for it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from hmac import compare_digest
from typing import Final, cast

from ..errors import RemoteProtocolError
from ..logs.notices import LogNotices
from ..planes import EventPlane, Message, Subscription

_log = logging.getLogger("trinamo.events")
_CODE_BYTES: Final = 16
_SUBJECT_CHARS_MAX: Final = 160


class SignedEvents:
    """The topics of an event plane, to those who have one of `keys` (32 bytes each); it signs with the first.

    Its methods are those of `EventPlane` that topics need, and keep their promises.
    """

    def __init__(self, plane: EventPlane, keys: Sequence[bytes]) -> None:
        self._plane = plane
        self._codes = [blake2b(key=key, digest_size=_CODE_BYTES) for key in keys]
        self._notices = LogNotices(_log)
        self.unsigned_count = 0
        """Messages that were dropped."""

    @property
    def message_bytes_max(self) -> int:
        """See `EventPlane`."""
        return self._plane.message_bytes_max - _CODE_BYTES

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """See `EventPlane`."""
        signed = payload + self._code(0, subject, payload)
        await self._plane.publish(subject, signed, reply=reply, headers=headers)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AsyncIterator[Subscription]:
        """See `EventPlane`; what no member has signed does not come."""
        opening = self._plane.subscribe(subject, group=group, pending_max=pending_max)
        async with opening as messages:
            yield _Signed(messages, self)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> Message:
        """See `EventPlane`; raises `RemoteProtocolError` for an answer that no member has signed."""
        signed = payload + self._code(0, subject, payload)
        reply = self.opened(await self._plane.request(subject, signed, timeout_s=timeout_s))
        if reply is None:
            raise RemoteProtocolError(f"the answer on {subject} is signed by no member")
        return reply

    def opened(self, message: Message) -> Message | None:
        """The message without its code; None, and counted, if no member has made that."""
        payload, code = message.payload[:-_CODE_BYTES], message.payload[-_CODE_BYTES:]
        for number in range(len(self._codes)):
            if compare_digest(code, self._code(number, message.subject, payload)):
                return Message(message.subject, payload, message.reply, message.headers)
        self.unsigned_count += 1
        self._notices.warn("not signed by a member", message.subject[:_SUBJECT_CHARS_MAX])
        return None

    def _code(self, number: int, subject: str, payload: bytes) -> bytes:
        code = self._codes[number].copy()
        # No subject has a zero in it.
        code.update(subject.encode() + b"\0")
        code.update(payload)
        return code.digest()


def signed_events(plane: EventPlane, keys: Sequence[bytes]) -> EventPlane:
    """`plane` as those tell and hear of themselves who have one of `keys`; without any, as it is."""
    return cast("EventPlane", SignedEvents(plane, keys)) if keys else plane


class _Signed:
    """A subscription without the messages that no member has signed."""

    def __init__(self, messages: Subscription, events: SignedEvents) -> None:
        self._messages, self._events = messages, events

    def __aiter__(self) -> _Signed:
        return self

    async def __anext__(self) -> Message:
        while True:
            message = self._events.opened(await anext(self._messages))
            if message is not None:
                return message

    @property
    def dropped(self) -> int:
        return self._messages.dropped
