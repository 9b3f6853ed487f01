"""What decoding a stranger's bytes may raise, in one place, so that no decoder forgets one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Self, TypeVar

import msgspec

from ..errors import RemoteProtocolError, RequestError

B = TypeVar("B")
T = TypeVar("T")

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""For `except`: bytes that are not the type asked for, no UTF-8, or nested too deep.

msgspec raises each of the three on peer input. Whoever catches them says whose bytes they were, by
a `RemoteProtocolError` or `RequestError`.
"""


UNSIGNED_REMEDY: Final = (
    "nobody looks at it. Start its process with this cluster's security.secret_file (with security.tls,"
    " and a certificate of its role) and this build; if it is nobody's, delete it, and see who may"
    " write to etcd"
)


class Unsigned(bytes):
    """In place of the value of an entry in discovery that no member of this cluster has signed: empty.

    So nobody who decodes it finds anything. `fault` says what was wrong, and `said` is what stood
    there, for the sentence of a refusal.
    """

    fault: str
    said: bytes

    def __new__(cls, fault: str, said: bytes) -> Self:
        made = super().__new__(cls)
        made.fault, made.said = fault, said
        return made


def check_signed(what: str, value: bytes) -> None:
    """Refuse an entry that no member has signed: `RemoteProtocolError`, whose text begins with `what`."""
    if isinstance(value, Unsigned):
        raise RemoteProtocolError(f"{what}: {value.fault}: {UNSIGNED_REMEDY}")


def decoded(decode: Callable[[B], T], data: B, what: str) -> T:
    """What `decode` makes of a peer's bytes; else `RemoteProtocolError`, whose text begins with `what`."""
    try:
        return decode(data)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{what}: {error}") from error


_PATH: Final = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `(?P<field>.*?)`")


def explain(error: Exception, what: str, within: str = "") -> RequestError:
    """The refusal of a request that is not what its type says: it names the parameter, if it can.

    `what` begins the sentence where it cannot; `within` is the parameter whose bytes were decoded.
    """
    message = str(error)
    found = _PATH.search(message)
    param = within + (found["path"] if found else "")
    text = message[: found.start()] if found else message
    missing = _MISSING.match(text)
    if missing:
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return RequestError(f"'{param}' is missing", param=param)
    if not param:
        return RequestError(f"{what}: {text}")
    return RequestError(f"'{param}' is wrong: {text}", param=param)
