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
from msgspec import Raw

from trinamo.runtime.errors import (
    OverloadedError,
    RateLimitedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
    UpstreamError,
)
from trinamo.runtime.protocol.openai.answers import ErrorBody, ErrorDetail
from trinamo.runtime.protocol.openai.shaping import ABSENT, is_absent
from trinamo.runtime.protocol.undecodable import UNDECODABLE

_MESSAGE_CHARS_MAX: Final = 500
_RETRY_AFTER_MAX_S: Final = 3600


_ERROR_BYTES_MAX: Final = 1 << 16
"""A longer error is quoted as it is written: objects made of it would take 25 times its bytes."""


class _Refusal(msgspec.Struct, frozen=True):
    """Where servers say what is wrong; all else of a body is read over."""

    error: Raw = ABSENT
    message: Raw = ABSENT
    detail: Raw = ABSENT


_refusal_decoder = msgspec.json.Decoder(_Refusal)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def refusal_of(status: int, headers: Mapping[bytes, bytes], body: bytes) -> TrinamoError | None:
    """The error that an answer of `status` stands for; None if it is the client's own to read."""
    # Without its address: clients are told of some of these.
    said = f"the upstream answers {status}: {_message(body)}"
    try:
        # Whole seconds; a date, which nobody needs who asks at once, says nothing.
        told_s = float(headers.get(b"retry-after", b""))
    except ValueError:
        told_s = 0
    is_time = 0 < told_s < math.inf
    retry_after_s = min(math.ceil(told_s), _RETRY_AFTER_MAX_S) if is_time else 0
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


def error_of_event(told: Raw) -> TrinamoError:
    """The error that an event in the middle of an answer tells of."""
    error = _value(told)
    detail = error if isinstance(error, dict) else {"message": error}
    said = f"the upstream ended its answer with an error: {_text(detail.get('message'))}"
    code = detail.get("code")
    if code == 429:
        return RateLimitedError(said, bound="upstream", definite=False)
    if isinstance(code, int) and 400 <= code < 500:
        return RequestError(said, definite=False)
    return UpstreamError(said)


def refusal_unstreamed(body: bytes) -> TrinamoError | int:
    """What `body`, with a 200 in place of a stream, stands for: an error, or the client's status."""
    told = _read(body) or _Refusal()
    error = _value(told.error)
    if error is None:
        # The client's to mend, and no fault of the upstream, which understood the body otherwise.
        return RequestError("the upstream does not stream this answer", param="stream")
    code = error.get("code") if isinstance(error, dict) else None
    if type(code) is not int or code < 400:
        return 400
    return error_of_event(told.error) if code == 429 or code >= 500 else code


def as_json(status: int, body: bytes) -> bytes:
    """A refusal as OpenAI's clients read it: `body`, or an error that quotes it if it is no object."""
    if _read(body) is not None and body.translate(None, b" \t\r\n") != b"{}":
        return body
    said = f"the upstream answers {status}: {_message(body)}"
    detail = ErrorDetail(message=said, type="invalid_request_error", code="upstream_refusal")
    return msgspec.json.encode(ErrorBody(detail))


def _read(body: bytes) -> _Refusal | None:
    """What an object in JSON says is wrong; None for all else."""
    try:
        return _refusal_decoder.decode(body)
    except UNDECODABLE:
        return None


def _value(raw: Raw) -> Any:
    """What was left undecoded, or its text if it is too long, or nested too deep, to be made."""
    if is_absent(raw):
        return None
    try:
        if len(raw) <= _ERROR_BYTES_MAX:
            return _any_decoder.decode(raw)
    except UNDECODABLE:
        pass
    return bytes(memoryview(raw)[:_ERROR_BYTES_MAX]).decode("utf-8", "replace")


def _message(body: bytes) -> str:
    found = _read(body)
    if found is None:
        return _text(body[:_ERROR_BYTES_MAX].decode("utf-8", "replace"))
    error = _value(found.error)
    said = error.get("message") if isinstance(error, dict) else error
    return _text(said or _value(found.message) or _value(found.detail))


def _text(said: Any) -> str:
    text = said if isinstance(said, str) else "" if said is None else str(said)
    return " ".join(text[:_ERROR_BYTES_MAX].split())[:_MESSAGE_CHARS_MAX] or "without a reason"
