"""The greeting of a standing connection: what is spoken on it, what for, and who listens.

Sans-IO: what both ends say, and what they make of it. The dialler speaks first, so that a server of
another kind, which waits to be spoken to, answers at once with what is no welcome.

```
dialler -> listener   hello: magic, version, purpose, carrier
listener -> dialler   welcome: version, the hello as it was heard, name of who it is
```

Where both have the cluster's secret, hands are shaken by TLS between the two (`transports/tcp/greeting.py`):
the hello goes in clear, and the welcome is sealed, with all that follows. That it repeats the hello
shows that nobody between has changed it. Without a secret nothing is proven; ports are on loopback then.

`protocol/versions.py` says what a version is. Each end tells the newest that it speaks.
"""

from __future__ import annotations

import enum
from typing import Final

from ...errors import RemoteProtocolError
from ..versions import SPOKEN, Version, common_version

_MAGIC: Final = b"trinamo\r\n\r\n"
"""Ends as the head of an HTTP request does, so that a server of HTTP does not wait for the rest."""
_VERSION_BYTES: Final = 2
HELLO_BYTES: Final = len(_MAGIC) + _VERSION_BYTES + 2
_HEAD_BYTES: Final = _VERSION_BYTES + HELLO_BYTES + 1
NAME_BYTES_MAX: Final = 255


class Purpose(enum.StrEnum):
    """What a port is for: who wants another is not let in. Their initials differ."""

    REQUESTS = "requests"
    TRANSFERS = "transfers"
    STREAMS = "streams"

    def uri(self, name: str) -> str:
        """Who listens for this, or dials, as a certificate says it."""
        return f"trinamo://{self}/{name}"


def encode_hello(purpose: Purpose, *, sealed: bool, version: Version = SPOKEN[-1]) -> bytes:
    """A dialler's first words; `sealed` if it begins TLS right behind them."""
    return _MAGIC + bytes(version) + purpose[0].encode() + (b"\1" if sealed else b"\0")


def check_hello(heard: bytes, purpose: Purpose, *, sealed: bool) -> None:
    """Raise `RemoteProtocolError` for who does not want what a port is for, or not as it gives it.

    Of another version no more is asked: it is told ours, and `check_version` says the rest.
    """
    if not heard.startswith(_MAGIC):
        raise RemoteProtocolError("it speaks another protocol than a process of a cluster")
    wanted, carrier = heard[-2:-1], heard[-1:]
    if wanted != purpose[0].encode():
        raise RemoteProtocolError(f"it wants another port than that of {purpose}")
    if carrier != (b"\1" if sealed else b"\0"):
        theirs, ours = ("no", "one") if sealed else ("a", "none")
        raise RemoteProtocolError(
            f"it has {theirs} security.secret_file, and this process has {ours}: all processes of a"
            " cluster have the same, or none"
        )


def check_version(heard: bytes) -> None:
    """Raise `RemoteProtocolError` if a hello, or a welcome without its magic, is of a major not spoken."""
    theirs = Version(*heard.removeprefix(_MAGIC)[:_VERSION_BYTES])
    if common_version((str(theirs),)) is None:
        raise RemoteProtocolError(
            f"it speaks protocol {theirs}, and this process {SPOKEN[-1]}: the older of both is to be"
            " upgraded"
        )


def encode_welcome(hello: bytes, name: str, *, version: Version = SPOKEN[-1]) -> bytes:
    """What a listener called `name` says to a `hello`."""
    encoded = name.encode()
    assert len(encoded) <= NAME_BYTES_MAX
    return bytes(version) + hello + bytes([len(encoded)]) + encoded


def wanted_bytes(heard: bytes, hello: bytes) -> int:
    """How much is to come of the welcome to `hello`, of which so much was heard.

    Raises `RemoteProtocolError` as soon as it is none: the rest may never come.
    """
    if not hello.startswith(heard[_VERSION_BYTES : _HEAD_BYTES - 1]):
        raise RemoteProtocolError("it did not answer the greeting with a welcome")
    name_bytes = heard[_HEAD_BYTES - 1] if len(heard) >= _HEAD_BYTES else 0
    return _HEAD_BYTES + name_bytes - len(heard)


def decode_welcome(heard: bytes, hello: bytes) -> str:
    """The name in the welcome to `hello`; `RemoteProtocolError` if it is none, or of another major."""
    if wanted_bytes(heard, hello) != 0:
        raise RemoteProtocolError("its welcome has not the length that it says")
    check_version(heard)
    try:
        return heard[_HEAD_BYTES:].decode()
    except UnicodeDecodeError:
        raise RemoteProtocolError("its name is no text") from None
