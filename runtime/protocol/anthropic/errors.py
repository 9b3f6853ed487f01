"""Errors as Anthropic's clients read them: the type follows from the status.

https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..openai.answers import ErrorDetail

ERROR_EVENT: Final = b"error"
"""The name of the event that tells of one in a stream."""
_SERVERS: Final = 500
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_encode = msgspec.json.Encoder().encode


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an answer of `/v1/messages` that is an error, and the last event of a broken stream."""

    error: MessagesErrorDetail
    request_id: str


def error_body(status: int, error: ErrorDetail, request_id: str) -> bytes:
    """An error with `status` as JSON; which parameter is wrong, its message says."""
    kind = _TYPES.get(status, "api_error" if status >= _SERVERS else "invalid_request_error")
    return _encode(MessagesError(MessagesErrorDetail(kind, error.message), request_id))
