"""Exception to HTTP status and error body: the only table of an error's status.

Also the two forms an error takes on the wire: a JSON body before the first byte of an answer, an
event after it. Messages of our own bugs stay in the log; clients get a sentence without insides.
"""

from __future__ import annotations

import http
import math
import re
from collections.abc import Callable
from typing import ClassVar, Final

import attrs

from ..context import Reason
from ..errors import (
    ConfigError,
    ConnectError,
    ControlPlaneError,
    DeadlineError,
    DisconnectedError,
    EngineError,
    EventPlaneError,
    GrammarDeadEndError,
    KilledError,
    LocalProtocolError,
    ModelAlreadyExistsError,
    ModelNotFoundError,
    OverloadedError,
    ProtocolError,
    RateLimitedError,
    RefusedError,
    RequestError,
    TransportError,
    TrinamoError,
    UnavailableError,
    UpstreamError,
)
from ..nurseries import single
from ..protocol.anthropic.answers import ERROR_EVENT, error_body as messages_error_body
from ..protocol.openai.answers import DONE, ErrorDetail, error_body

RETRY_AFTER_S: Final = 1


class PathNotFoundError(RequestError):
    """The client asks for a path that is no route. It mends the URL."""

    code: ClassVar[str] = "path_not_found"


class MethodNotAllowedError(RequestError):
    """The client uses a route with the wrong method."""

    code: ClassVar[str] = "method_not_allowed"


class HostNotAllowedError(RequestError):
    """The client calls the server by a name that is not its own. It uses an allowed one."""

    code: ClassVar[str] = "host_not_allowed"


class MediaTypeError(RequestError):
    """The client sends what does not call itself JSON, or is compressed otherwise than we know. It sends JSON."""

    code: ClassVar[str] = "unsupported_media_type"


class BodyTooLargeError(RequestError):
    """The client's body is over the limit. It sends less, or the operator raises the limit."""

    code: ClassVar[str] = "body_too_large"


class UnauthorizedError(RequestError):
    """The client's key is missing or none of the server's. It sends one that its operator gave it."""

    code: ClassVar[str] = "invalid_api_key"


class ForbiddenError(RequestError):
    """The client's key is good, but not for this. It asks its operator."""

    code: ClassVar[str] = "operators_only"


class RateLimitExceededError(OverloadedError):
    """Requests come faster than the operator allows (429). The client waits as long as it is told."""

    code: ClassVar[str] = "rate_limit_exceeded"


class BodyTimeoutError(RequestError):
    """The client's body did not arrive in time. It sends faster."""

    code: ClassVar[str] = "body_timeout"


@attrs.frozen
class StatusRow:
    """What one class of errors means to an HTTP client."""

    status: int
    type: str
    retry_after_s: int | None = None
    helps: bool | None = None
    """Whether asking again helps, where programs that cannot tell ask again: for 408, 409, 429 and from
    500 on OpenAI's do. None: it may."""
    sentence: str = ""
    """What a client is told in place of the message, which then only the log has: an engine's or a
    library's text may hold paths, addresses and other people's prompts."""
    is_bug: bool = False
    """Whether the message stays in the log whatever the configuration says."""


CLIENT: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_BUG: Final = "an internal error"
_ADDRESS: Final = re.compile(
    # Each begins where its run of characters does: from within a run it would be read again and again.
    r"(?<![a-z0-9+.-])[a-z0-9+.-]+://[^\s'\",;)]+"  # A URL,
    r"|\[?(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[\w.%]*\]?(?:(?::| port )\d+)?"  # IPv6,
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b(?:(?::| port )\d+)?"  # IPv4,
    r"|(?<![\w.-])[\d_.-]*[a-z][\w.-]*(?::| port )\d{2,5}\b",  # or a host and its port.
    re.IGNORECASE,
)

# An exception has the row of the nearest class in its MRO.
# fmt: off
STATUS_TABLE: Final[dict[type[BaseException], StatusRow]] = {
    RequestError:            StatusRow(400, CLIENT),
    UnauthorizedError:       StatusRow(401, CLIENT),
    ForbiddenError:          StatusRow(403, CLIENT),
    ModelNotFoundError:      StatusRow(404, CLIENT),
    PathNotFoundError:       StatusRow(404, CLIENT),
    MethodNotAllowedError:   StatusRow(405, CLIENT),
    BodyTimeoutError:        StatusRow(408, CLIENT),
    ModelAlreadyExistsError: StatusRow(409, CLIENT, helps=False),
    BodyTooLargeError:       StatusRow(413, CLIENT),
    MediaTypeError:          StatusRow(415, CLIENT),
    HostNotAllowedError:     StatusRow(421, CLIENT),
    UnavailableError:        StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True),
    OverloadedError:         StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True),
    RateLimitedError:        StatusRow(429, CLIENT, RETRY_AFTER_S, helps=True),
    RateLimitExceededError:  StatusRow(429, "requests", RETRY_AFTER_S, helps=True),
    RefusedError:            StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True),
    ConnectError:            StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True, sentence="no worker could be reached"),
    ControlPlaneError:       StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True, sentence="discovery is away"),
    EventPlaneError:         StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True, sentence="the broker is away"),
    DisconnectedError:       StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True),
    TransportError:          StatusRow(502, _SERVER),
    UpstreamError:           StatusRow(502, _SERVER, sentence="the server behind failed"),
    ProtocolError:           StatusRow(502, _SERVER),
    DeadlineError:           StatusRow(504, _SERVER),
    EngineError:             StatusRow(500, _SERVER, helps=False, sentence="the engine failed"),
    GrammarDeadEndError:     StatusRow(500, _SERVER, helps=False),
    KilledError:             StatusRow(500, _SERVER, helps=False),
    LocalProtocolError:      StatusRow(500, _SERVER, helps=False, sentence=_BUG, is_bug=True),
    ConfigError:             StatusRow(500, _SERVER, helps=False, sentence=_BUG, is_bug=True),
    TrinamoError:            StatusRow(500, _SERVER, helps=False),
    BaseException:           StatusRow(500, _SERVER, helps=False, sentence=_BUG, is_bug=True),
}

# A kill is not a fault in itself; why it was done decides. 499 is nginx's word for a client that
# left: nobody reads it but the metrics.
KILLED_TABLE: Final[dict[str, StatusRow]] = {
    Reason.CLIENT_DISCONNECT: StatusRow(499, CLIENT),
    Reason.FRONTEND_SHUTDOWN: StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True),
    Reason.WORKER_SHUTDOWN:   StatusRow(503, _SERVER, RETRY_AFTER_S, helps=True),
    Reason.DEADLINE:          StatusRow(504, _SERVER),
    Reason.PROTOCOL_ERROR:    StatusRow(502, _SERVER),
}
# fmt: on


@attrs.frozen
class Dialect:
    """What the clients of one API expect, beside its requests and answers."""

    error_body: Callable[[int, ErrorDetail, str], bytes] = error_body
    """An error as JSON, from its status, what is told of it and the request's id."""
    error_event: bytes = b""
    """The name of the event that tells of one in a stream."""
    stream_end: bytes = b""
    """What follows the last event of a stream that is whole."""
    id_header: bytes = b""
    """Where an answer tells the request's id, besides `X-Request-Id`."""


OPENAI: Final = Dialect(stream_end=DONE)
EVENTS_THAT_END: Final = Dialect()
"""OpenAI's, too, where the last event says that it is the last."""
ANTHROPIC: Final = Dialect(messages_error_body, ERROR_EVENT, id_header=b"request-id")


@attrs.frozen
class ErrorAnswer:
    """An error as HTTP knows it."""

    status: int
    detail: ErrorDetail
    retry_after_s: float | None = None
    helps: bool | None = None
    """Whether asking again does; None: nobody knows."""
    request_id: str = ""
    dialect: Dialect = OPENAI
    """How the client reads errors."""

    @property
    def code(self) -> str:
        """The outcome label of the metrics."""
        return self.detail.code or "internal"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            found.append((b"retry-after", b"%d" % math.ceil(self.retry_after_s)))
            found.append((b"retry-after-ms", b"%d" % math.ceil(self.retry_after_s * 1000)))
        if self.helps is not None:
            found.append((b"x-should-retry", b"true" if self.helps else b"false"))
        if self.status == http.HTTPStatus.UNAUTHORIZED:
            found.append((b"www-authenticate", b"Bearer"))
        return found

    def to_body(self) -> bytes:
        return self.dialect.error_body(self.status, self.detail, self.request_id)


def answer_error(
    error: BaseException,
    *,
    request_id: str = "",
    tells_detail: bool = False,
    dialect: Dialect = OPENAI,
) -> ErrorAnswer:
    """What a client is told about `error`; of a group, the error that stands for it.

    What the client is not told is in the log under `request_id`: addresses of servers, of which
    only its own mistakes tell, and a row's reasons for a sentence. With `tells_detail`
    (`http.engine_error_detail`) it is told all but our own bugs.
    """
    error = single(error)
    row = next(STATUS_TABLE[cls] for cls in type(error).__mro__ if cls in STATUS_TABLE)
    code = error.code if isinstance(error, TrinamoError) else TrinamoError.code
    if isinstance(error, KilledError):
        row = KILLED_TABLE.get(error.reason, row)
        code = error.reason or code
    message = str(error)
    if row.sentence and (row.is_bug or not tells_detail):
        where = f" under request id {request_id}" if request_id else ""
        message = f"{row.sentence}; the server's log has more{where}"
    elif not (tells_detail or isinstance(error, RequestError)):
        message = _ADDRESS.sub("a server", message)
    return ErrorAnswer(
        row.status,
        ErrorDetail(
            message=message or type(error).__name__,
            type=row.type,
            param=error.param if isinstance(error, RequestError) else None,
            code=code,
        ),
        getattr(error, "retry_after_s", 0) or row.retry_after_s,
        row.helps,
        request_id,
        dialect,
    )
