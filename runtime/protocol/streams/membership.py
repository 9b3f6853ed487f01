"""The greeting of a standing connection: both ends prove that they know the cluster's secret.

Sans-IO: bytes in, bytes to send out, one end's state. The dialler speaks first, so that a server of
another kind, which waits to be spoken to, answers at once with what is no challenge.

```
dialler -> listener   hello: magic, version, flags, nonce
listener -> dialler   challenge: version, flags, nonce
dialler -> listener   proof
listener -> dialler   welcome: proof, name of who it is
```

A proof is HMAC-SHA256 under the secret's SHA-256, over who says it, what the port is for, and all that both
have said, the listener's name included. Nonces are new each time, so no proof fits another
connection or the other end. A listener tells nothing to who has not proven itself; whoever is sent
something else than the table expects raises `RemoteProtocolError` and closes. The flags are zero and
proven with the rest: a later version can agree on encryption there, and nobody between can take it
out. Without a secret the same greeting runs under that of nothing, and still says who answers.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Final

from ...errors import RemoteProtocolError

NONCE_BYTES: Final = 16
_MAGIC: Final = b"trinamo\r\n\r\n"
"""Ends as the head of an HTTP request does, so that a server of HTTP does not wait for the rest."""
_VERSION_AND_FLAGS: Final = b"\x02\x00\x00"
_PROOF_BYTES: Final = 32
_HELLO_BYTES: Final = len(_MAGIC) + len(_VERSION_AND_FLAGS) + NONCE_BYTES
_CHALLENGE_BYTES: Final = len(_VERSION_AND_FLAGS) + NONCE_BYTES
_NAME_BYTES_MAX: Final = 255


class Purpose(enum.StrEnum):
    """What a port is for: a proof for one is none for another."""

    REQUESTS = "requests"
    TRANSFERS = "transfers"
    STREAMS = "streams"


class GreetingState(enum.Enum):
    """Where one end is."""

    NEW = "a dialler that has said nothing"
    AWAITS_HELLO = "a listener that has said nothing"
    AWAITS_CHALLENGE = "a dialler that has said hello"
    AWAITS_PROOF = "a listener that has sent its challenge"
    AWAITS_WELCOME = "a dialler that has proven itself"
    AWAITS_NAME = "a dialler that has the length of the listener's name"
    GREETED = "the other end is a member, and what follows is the connection's own"
    REFUSED = "the other end is a stranger"


class Greeting:
    """One end of one greeting. Made by `dialling` or `listening`.

    Read at most `wanted_bytes` at a time, so that nothing of what follows is taken, give them to
    `receive`, and send what it returns, until `is_over`.
    """

    def __init__(
        self, state: GreetingState, purpose: Purpose, secret: bytes, nonce: bytes, name: bytes
    ) -> None:
        assert len(nonce) == NONCE_BYTES
        assert len(name) <= _NAME_BYTES_MAX
        self.state = state
        self._purpose = purpose
        self._secret = secret
        self._nonce = nonce
        self._name = name
        self._said = b""
        """The hello and the challenge: what both ends prove."""
        self._heard = bytearray()
        self._wanted = _STEPS[state][0] if state in _STEPS else 0
        self._theirs = b""
        self.peer_name = ""
        """Who answers, once greeted; only a listener has a name."""

    @classmethod
    def dialling(cls, purpose: Purpose, secret: bytes, nonce: bytes) -> Greeting:
        """The end that connects."""
        return cls(GreetingState.NEW, purpose, secret, nonce, b"")

    @classmethod
    def listening(cls, purpose: Purpose, secret: bytes, nonce: bytes, name: str) -> Greeting:
        """The end that accepts, and says that it is `name`."""
        return cls(GreetingState.AWAITS_HELLO, purpose, secret, nonce, name.encode())

    @property
    def is_over(self) -> bool:
        """Whether the other end has proven itself and all is said."""
        return self.state is GreetingState.GREETED

    @property
    def wanted_bytes(self) -> int:
        """How many bytes are due now; none once it is over."""
        return self._wanted - len(self._heard)

    def begin(self) -> bytes:
        """What to send before anything is heard."""
        if self.state is not GreetingState.NEW:
            return b""
        self._said = _MAGIC + _VERSION_AND_FLAGS + self._nonce
        self._become(GreetingState.AWAITS_CHALLENGE)
        return self._said

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the other end, and return what to send; `RemoteProtocolError` for a stranger."""
        if len(data) > self.wanted_bytes:
            raise self._refuse("more bytes than are due")
        self._heard += data
        if self.wanted_bytes:
            return b""
        heard = bytes(self._heard)
        self._heard.clear()
        return _STEPS[self.state][1](self, heard)

    def _become(self, state: GreetingState) -> None:
        self.state = state
        self._wanted = _STEPS[state][0] if state in _STEPS else 0

    def _refuse(self, why: str) -> RemoteProtocolError:
        self._become(GreetingState.REFUSED)
        return RemoteProtocolError(f"not a greeting of this cluster: {why}")

    def _prove(self, end: bytes, name: bytes = b"") -> bytes:
        # The lengths of all parts but the last are fixed, or end with a byte that is in none of them.
        words = b"trinamo %s\0%s\0%s%s" % (end, self._purpose.encode(), self._said, name)
        return hmac.digest(_key(self._secret), words, "sha256")

    # --- what is heard, by state ---

    def take_hello(self, heard: bytes) -> bytes:
        """A dialler's first words."""
        if not heard.startswith(_MAGIC):
            raise self._refuse("it speaks another protocol")
        if heard[len(_MAGIC) :][: len(_VERSION_AND_FLAGS)] != _VERSION_AND_FLAGS:
            raise self._refuse("it speaks another version")
        challenge = _VERSION_AND_FLAGS + self._nonce
        self._said = heard + challenge
        self._become(GreetingState.AWAITS_PROOF)
        return challenge

    def take_challenge(self, heard: bytes) -> bytes:
        """The listener's nonce."""
        if not heard.startswith(_VERSION_AND_FLAGS):
            raise self._refuse("it speaks another protocol or version")
        self._said += heard
        self._become(GreetingState.AWAITS_WELCOME)
        return self._prove(b"dialler")

    def take_proof(self, heard: bytes) -> bytes:
        """A dialler's proof: from here on it is a member."""
        if not hmac.compare_digest(heard, self._prove(b"dialler")):
            raise self._refuse("its proof is wrong; security.secret_file differs")
        self._become(GreetingState.GREETED)
        return self._prove(b"listener", self._name) + bytes([len(self._name)]) + self._name

    def take_welcome(self, heard: bytes) -> bytes:
        """The listener's proof, and how long its name is."""
        self._theirs = heard[:_PROOF_BYTES]
        self._become(GreetingState.AWAITS_NAME)
        self._wanted = heard[_PROOF_BYTES]
        return self.receive(b"") if not self._wanted else b""

    def take_name(self, heard: bytes) -> bytes:
        """The listener's name, which its proof covers."""
        if not hmac.compare_digest(self._theirs, self._prove(b"listener", heard)):
            raise self._refuse("its proof is wrong; security.secret_file differs")
        try:
            self.peer_name = heard.decode()
        except UnicodeDecodeError:
            raise self._refuse("its name is no text") from None
        self._become(GreetingState.GREETED)
        return b""


_State = GreetingState
# fmt: off
_STEPS: Final[Mapping[GreetingState, tuple[int, Callable[[Greeting, bytes], bytes]]]] = {
    # What is due in a state, in bytes, and what takes it. No other bytes are taken in any state.
    _State.AWAITS_HELLO:     (_HELLO_BYTES, Greeting.take_hello),
    _State.AWAITS_PROOF:     (_PROOF_BYTES, Greeting.take_proof),
    _State.AWAITS_CHALLENGE: (_CHALLENGE_BYTES, Greeting.take_challenge),
    _State.AWAITS_WELCOME:   (_PROOF_BYTES + 1, Greeting.take_welcome),
    _State.AWAITS_NAME:      (0, Greeting.take_name),
}
# fmt: on


@lru_cache(maxsize=16)
def _key(secret: bytes) -> bytes:
    """HMAC itself fills keys up with zeros: sixteen of them would be the same as no secret."""
    return sha256(secret).digest()
