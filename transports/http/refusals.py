"""Answers that no application makes: whole, and the last on their connection."""

from __future__ import annotations

import http
import random
from collections.abc import Iterable
from email.utils import formatdate
from typing import Final

import attrs

from trinamo.runtime.env import Clock
from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.http.exchanges import JSON_TYPE, Headers, RequestIds
from trinamo.runtime.http.status import (
    CLIENT,
    ErrorAnswer,
    HostNotAllowedError,
    answer_error,
)
from trinamo.runtime.logs.access import AccessLog
from trinamo.runtime.logs.fields import log_fields
from trinamo.runtime.protocol.openai.answers import ErrorDetail

HEADERS_MAX: Final = 100
"""Of one request, whichever version of HTTP it speaks."""
HOST_ANSWER: Final = answer_error(
    HostNotAllowedError(
        "the Host header names another server; call this one by its address or by localhost, or"
        " add the name to 'http.hosts' of its configuration"
    )
)


@attrs.frozen
class HeadFault:
    """Why a head is refused, and the HTTP status that says so."""

    status: int
    reason: str


TOO_MANY: Final = HeadFault(431, f"there are more than {HEADERS_MAX} headers, which is the limit")


class Dates:
    """The Date header, made once a second."""

    __slots__ = ("_clock", "_second", "_value")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._second, self._value = -1, b""

    def value(self) -> bytes:
        second = int(self._clock.wall())
        if second != self._second:
            self._second = second
            self._value = formatdate(second, usegmt=True).encode()
        return self._value


class Refusals:
    """Makes those answers, and tells the access log of each: of a flood of them, not of all."""

    def __init__(self, clock: Clock, rng: random.Random, id_headers: Iterable[str] = ()) -> None:
        self.dates = Dates(clock)
        self._access, self._rng, self._id_headers = AccessLog(clock), rng, id_headers
        self._ids: RequestIds | None = None

    def overload(self, connections_max: int) -> bytes:
        """To a connection over the limit."""
        text = f"http.connections_max {connections_max} connections are open"
        error = OverloadedError(text, bound="connections_max", value=connections_max)
        return self._closing(answer_error(error))

    def fault(self, fault: HeadFault, method: bytes = b"-", path: bytes = b"-") -> bytes:
        """To a head or a body that is refused."""
        version = http.HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        code = "http_version_not_supported" if fault.status == version else "malformed_request"
        detail = ErrorDetail(message=fault.reason, type=CLIENT, code=code)
        return self._closing(ErrorAnswer(fault.status, detail), method, path)

    def tell(
        self, answer: ErrorAnswer, method: bytes | str, path: bytes | str, headers: Headers
    ) -> Headers:
        """A request with `headers` is refused with `answer`; what its head says of that besides."""
        if self._ids is None:
            # Not before it is needed: a simulated world's dice fall as if there were none of this.
            self._ids = RequestIds(self._rng, self._id_headers)
        request_id, _ = self._ids.make(headers)
        with log_fields(request_id=request_id):
            self._access.tell(
                method,
                path,
                answer.status,
                answer.code,
                began_at=self._access.now(),
                is_success=False,
                is_cheap=True,
                error=answer.detail.message,
            )
        return answer.headers + self._ids.answer_headers(headers, request_id)

    def _closing(self, answer: ErrorAnswer, method: bytes = b"-", path: bytes = b"-") -> bytes:
        body = answer.to_body()
        told = [
            (b"content-type", JSON_TYPE),
            (b"content-length", b"%d" % len(body)),
            *self.tell(answer, method, path, []),
            (b"connection", b"close"),
            (b"date", self.dates.value()),
        ]
        lines = b"".join(b"%b: %b\r\n" % each for each in told)
        status = f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\n"
        return b"%b%b\r\n%b" % (status.encode(), lines, body)
