"""Messages by way of a broker, sealed: who has only the broker's token reads, changes and repeats none.

    key id (8) | process (16) | number (8) | AES-256-GCM of the message, with its tag

The key id says which secret it is of, so that members may know two while one takes the other's place.
Each process seals with a key of its own, HKDF-SHA256 of the secret over the random `process`, and
counts its messages: no key ever meets a nonce twice, and a simulated run seals the same bytes again.
What a message is about, such as its subject, is said by both ends and sent by neither: moved to
another place it does not open.

A message that may arrive once only is known by its number, at the place where it arrives (`Arrivals`). Numbers of
a receiver that starts again begin anew, so what a request is about must name this life of it; of
an event its own number tells.

What processes tell of themselves by events is sealed about its subject, so a publisher's name, its incarnation
and its number are proven with the body; what does not open is dropped before anybody decodes it. The same holds
for a request for a snapshot, and for its answer, whose subject was made for it.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar, cast

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.logs.notices import LogNotices
from trinamo.runtime.planes import EventPlane, Message, Subscription

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

WINDOW: Final = 4096
PROCESSES_MAX: Final = 4096
_ID_BYTES: Final = 8
_PROCESS_BYTES: Final = 16
_SENDER_BYTES: Final = _ID_BYTES + _PROCESS_BYTES
HEAD_BYTES: Final = _SENDER_BYTES + 8
"""In clear before each message, and unlike that of any other."""
SEALED_BYTES: Final = HEAD_BYTES + 16
"""By so much a message grows."""
_NONCE_START: Final = bytes(4)
T = TypeVar("T")


class Sealer:
    """Seals what this process says, and opens what members of its cluster said.

    Args:
        secrets: The first seals, all open; empty ones are none. With none messages pass as they are.
        rng: Where the name of this process comes from.
    """

    def __init__(self, secrets: Sequence[bytes], rng: random.Random) -> None:
        self.refused = 0
        """Messages that did not open, or came again; events, which `SealedEvents` counts, are none of them."""
        self._secrets = {_derive(each, _ID_BYTES, b" id"): each for each in secrets if each}
        self._ciphers: OrderedDict[bytes, AESGCM] = OrderedDict()
        """Of each process whose messages opened."""
        self._numbers = itertools.count()
        if self._secrets:
            # Who has no secret never needs it, and its import takes a while.
            from cryptography.exceptions import InvalidTag

            self._unopened = (KeyError, ValueError, InvalidTag)
            self._own = next(iter(self._secrets)) + rng.randbytes(_PROCESS_BYTES)
            self._cipher = self._cipher_of(self._own)

    @property
    def seals(self) -> bool:
        """Whether there is a secret to seal with."""
        return bool(self._secrets)

    def seal(self, message: bytes, about: bytes) -> bytes:
        """`message` for whoever expects one about this."""
        if not self._secrets:
            return message
        number = next(self._numbers).to_bytes(8, "big")
        return self._own + number + self._cipher.encrypt(_NONCE_START + number, message, about)

    def open(
        self, sealed: bytes, about: bytes, *, once: Arrivals | None = None, is_event: bool = False
    ) -> bytes:
        """What was sealed, about this; raises `RemoteProtocolError`, and counts, where no member did.

        Refuses what came before at the place where each is to come `once`.
        """
        if not self._secrets:
            return sealed
        own, number = sealed[:_SENDER_BYTES], sealed[_SENDER_BYTES:HEAD_BYTES]
        try:
            cipher = self._ciphers.get(own) or self._cipher_of(own)
            message = cipher.decrypt(_NONCE_START + number, sealed[HEAD_BYTES:], about)
        except self._unopened:
            self.refused += not is_event
            raise RemoteProtocolError(
                "no member of this cluster sealed it for this place, or its security.secret_file is"
                " another"
            ) from None
        _keep(self._ciphers, own, cipher)
        if once is not None and not once.takes(own, int.from_bytes(number, "big")):
            self.refused += not is_event
            raise RemoteProtocolError("it came before")
        return message

    def _cipher_of(self, own: bytes) -> AESGCM:
        """Of who begins its messages so; `KeyError` for a secret that is not known here."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        secret = self._secrets[own[:_ID_BYTES]]
        return AESGCM(_derive(secret, 32, b"", salt=own[_ID_BYTES:]))


def _keep(kept: OrderedDict[bytes, T], own: bytes, value: T) -> None:
    """The one that was silent for longest goes."""
    kept[own] = value
    kept.move_to_end(own)
    if len(kept) > PROCESSES_MAX:
        kept.popitem(last=False)


class Arrivals:
    """The numbers that came at one place, in about the order in which they were counted.

    Of each process the `WINDOW` numbers below the newest are told apart, and what is older came before;
    `PROCESSES_MAX` processes are remembered.
    """

    __slots__ = ("_senders",)

    def __init__(self) -> None:
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()

    def takes(self, own: bytes, number: int) -> bool:
        """Whether this one of who begins its messages so is not known to have come; it has from now on."""
        sender = self._senders.get(own) or _Sender()
        _keep(self._senders, own, sender)
        return sender.takes(number)


class _Sender:
    """The numbers that came of a process."""

    __slots__ = ("_newest", "_seen")

    def __init__(self) -> None:
        self._newest = -1
        self._seen = 0
        """A bit for each number: the lowest is of the newest."""

    def takes(self, number: int) -> bool:
        """Whether this number is not known to have come; it has from now on."""
        ahead = number - self._newest
        if ahead > 0:
            self._newest = number
            self._seen = (self._seen << ahead if ahead < WINDOW else 0) & _MASK | 1
            return True
        bit = 1 << -ahead
        if -ahead >= WINDOW or self._seen & bit:
            return False
        self._seen |= bit
        return True


_MASK: Final = (1 << WINDOW) - 1


def _derive(secret: bytes, length: int, what: bytes, *, salt: bytes | None = None) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), length, salt, b"trinamo broker" + what).derive(secret)


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
        return self._plane.message_bytes_max - SEALED_BYTES

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        sealed = self._sealer.seal(payload, _about(subject))
        await self._plane.publish(subject, sealed, reply=reply, headers=headers)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AsyncIterator[Subscription]:
        """See `EventPlane`; what no member has sealed does not come, nor a second time what one has."""
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

    def opened(self, message: Message, once: Arrivals | None = None) -> Message | None:
        """The message as it was published; None, and counted, if no member did that, or it came before."""
        try:
            about = _about(message.subject)
            payload = self._sealer.open(message.payload, about, once=once, is_event=True)
        except RemoteProtocolError:
            self.unsigned_count += 1
            what = "told by no member, or told again"
            self._notices.warn(what, message.subject[:_SUBJECT_CHARS_MAX])
            return None
        return Message(message.subject, payload, message.reply, message.headers)


def _about(subject: str) -> bytes:
    return b"event " + subject.encode()


def sealed_events(plane: EventPlane, sealer: Sealer) -> EventPlane:
    """`plane` for what processes tell of themselves; as it is where there is no secret."""
    return cast("EventPlane", SealedEvents(plane, sealer)) if sealer.seals else plane


class _Opened:
    """A subscription without what no member told, and with what one told once."""

    def __init__(self, messages: Subscription, events: SealedEvents) -> None:
        self._messages, self._events = messages, events
        self._once = Arrivals()

    def __aiter__(self) -> _Opened:
        return self

    async def __anext__(self) -> Message:
        while True:
            message = self._events.opened(await anext(self._messages), self._once)
            if message is not None:
                return message

    @property
    def dropped(self) -> int:
        return self._messages.dropped
