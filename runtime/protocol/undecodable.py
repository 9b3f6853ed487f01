"""What decoding a stranger's bytes may raise, in one place, so that no decoder forgets one of them."""

from __future__ import annotations

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
        raise RemoteProtocolError(f"{what}: {decoding_fault(error)}") from error


_QUOTED_CHARS_MAX: Final = 80
_SENTENCE_CHARS_MAX: Final = 100
"""A decoder's own sentences are shorter; what is longer quotes an unknown member or a wrong value."""
_PATH_MARK: Final = " - at `$"
_MISSING: Final = "Object missing required field `"


def quoted(text: str) -> str:
    """The part of `text`, which somebody else wrote, that a refusal or a log line quotes."""
    return text if len(text) <= _QUOTED_CHARS_MAX else text[: _QUOTED_CHARS_MAX - 1] + "…"


def decoding_fault(error: Exception) -> str:
    """The sentence of a decoder that raised one of `UNDECODABLE`, cut: it may quote a whole body."""
    text = str(error)
    return text if len(text) <= _SENTENCE_CHARS_MAX else text[: _SENTENCE_CHARS_MAX - 1] + "…"


def explain(error: Exception, what: str, within: str = "") -> RequestError:
    """Return the refusal of a request that is not what its type says; it names the parameter if it can.

    `what` begins the sentence where it cannot; `within` is the parameter whose bytes were decoded.
    """
    # The decoder ends its sentence with the place. Members of a client may hold the same words, and
    # come before it, so the last one counts, and nothing else is searched.
    text, mark, path = str(error).rpartition(_PATH_MARK)
    if not mark:
        text, path = path, ""
    # Within `b`, `.a` is `b.a` and `[0]` is `b[0]`.
    param = quoted((within + path.removesuffix("`")).lstrip("."))
    if text.startswith(_MISSING):
        field = text[len(_MISSING) :].partition("`")[0]
        param = f"{param}.{field}" if param else field
        return RequestError(f"'{param}' is missing", param=param)
    text = decoding_fault(ValueError(text))
    if not param:
        return RequestError(f"{what}: {text}")
    return RequestError(f"'{param}' is wrong: {text}", param=param)
