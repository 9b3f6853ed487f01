"""What an upstream's error is to a client, a router and a migration. Sans-IO.

Four hundreds are the client's to mend, and 501 tells it what the upstream was not opened for, such as
llama.cpp's of embeddings: these pass through with their bodies. All others are errors of ours, of
which the table says whether another instance is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ...errors import (
    OverloadedError,
    RateLimitedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
    UpstreamError,
)

_MESSAGE_CHARS_MAX: Final = 500
_RETRY_AFTER_MAX_S: Final = 3600


class _Detail(msgspec.Struct, frozen=True):
    message: Any = None
    code: Any = None


class _Body(msgspec.Struct, frozen=True):
    error: _Detail | str | None = None
    message: Any = None
    detail: Any = None


_decoder = msgspec.json.Decoder(_Body)


def refusal_of(status: int, headers: Mapping[bytes, bytes], body: bytes) -> TrinamoError | None:
    """The error that an answer of `status` stands for; None if it is the client's own to read."""
    # Without its address: clients are told of some of these.
    said = f"the upstream answers {status}: {_message(body)}"
    retry_after_s = _retry_after_s(headers.get(b"retry-after", b""))
    if status in (401, 403):
        return UnavailableError(f"the upstream refuses our key ({status})")
    if status == 429:
        return RateLimitedError(said, bound="upstream", retry_after_s=retry_after_s)
    if status == 503:
        return OverloadedError(said, bound="upstream", retry_after_s=retry_after_s)
    if status == 501 or (400 <= status < 500 and status != 408):
        return None
    if status >= 500 or status == 408:
        return UpstreamError(said)
    return RemoteProtocolError(said)


def error_of_event(error: Any) -> TrinamoError:
    """The error that an event in the middle of an answer tells of."""
    detail = error if isinstance(error, dict) else {"message": error}
    said = f"the upstream ended its answer with an error: {_text(detail.get('message'))}"
    code = detail.get("code")
    if code == 429:
        return RateLimitedError(said, bound="upstream", definite=False)
    if isinstance(code, int) and 400 <= code < 500:
        return RequestError(said, definite=False)
    return UpstreamError(said)


def _message(body: bytes) -> str:
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _text(body.decode("utf-8", "replace"))
    error = found.error
    said = error.message if isinstance(error, _Detail) else error
    return _text(said or found.message or found.detail)


def _text(said: Any) -> str:
    text = said if isinstance(said, str) else "" if said is None else str(said)
    return " ".join(text.split())[:_MESSAGE_CHARS_MAX] or "without a reason"


def _retry_after_s(value: bytes) -> int:
    """Whole seconds; a date, which nobody needs who asks at once, says nothing."""
    try:
        seconds = float(value)
    except ValueError:
        return 0
    return min(math.ceil(seconds), _RETRY_AFTER_MAX_S) if 0 < seconds < math.inf else 0
