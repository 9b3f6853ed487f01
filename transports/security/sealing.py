"""Messages by way of a broker, sealed: who has only the broker's token reads, changes and repeats none.

    key id (8) | process (16) | number (8) | AES-256-GCM of the message, with its tag

The key id says which secret it is of, so that members may know two while one takes the other's place.
Each process seals with a key of its own, HKDF-SHA256 of the secret over the random `process`, and
counts its messages: no key ever meets a nonce twice, and a simulated run seals the same bytes again.
What a message is about, such as its subject, is said by both ends and sent by neither: moved to
another place it does not open.

A message that may arrive once only is known by its number. Of each process the `WINDOW` numbers below the
newest are told apart, and what is older is refused; `PROCESSES_MAX` processes are remembered, which only
members can be. Numbers of a receiver that starts again begin anew, so what a message is about must
name this life of it.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from trinamo.runtime.errors import RemoteProtocolError

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


class Sealer:
    """Seals what this process says, and opens what members of its cluster said.

    Args:
        secrets: The first seals, all open; empty ones are none. With none messages pass as they are.
        rng: Where the name of this process comes from.
    """

    def __init__(self, secrets: Sequence[bytes], rng: random.Random) -> None:
        self.refused = 0
        """Messages that did not open, or came again."""
        self._secrets = {_derive(each, _ID_BYTES, b" id"): each for each in secrets if each}
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()
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

    def open(self, sealed: bytes, about: bytes, *, once: bool = False) -> bytes:
        """What was sealed, about this; raises `RemoteProtocolError`, and counts, where no member did.

        Refuses, if it is to come `once`, what came before.
        """
        if not self._secrets:
            return sealed
        own, number = sealed[:_SENDER_BYTES], sealed[_SENDER_BYTES:HEAD_BYTES]
        try:
            sender = self._senders.get(own) or _Sender(self._cipher_of(own))
            message = sender.cipher.decrypt(_NONCE_START + number, sealed[HEAD_BYTES:], about)
        except self._unopened:
            self.refused += 1
            raise RemoteProtocolError(
                "no member of this cluster sealed it for this place, or its security.secret_file is"
                " another"
            ) from None
        self._senders[own] = sender
        self._senders.move_to_end(own)
        if len(self._senders) > PROCESSES_MAX:
            self._senders.popitem(last=False)
        if once and not sender.takes(int.from_bytes(number, "big")):
            self.refused += 1
            raise RemoteProtocolError("it came before")
        return message

    def _cipher_of(self, own: bytes) -> AESGCM:
        """Of who begins its messages so; `KeyError` for a secret that is not known here."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        secret = self._secrets[own[:_ID_BYTES]]
        return AESGCM(_derive(secret, 32, b"", salt=own[_ID_BYTES:]))


class _Sender:
    """A process whose messages opened, and the numbers that came."""

    __slots__ = ("_newest", "_seen", "cipher")

    def __init__(self, cipher: AESGCM) -> None:
        self.cipher = cipher
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
