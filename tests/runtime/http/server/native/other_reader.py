"""Requests as h11 reads them: another reader to hold our own to."""

from __future__ import annotations

from typing import Any, TypeAlias

import h11

from trinamo.runtime.http.server.hypercorn_server.parser import StrictParser

Request: TypeAlias = tuple[bytes, bytes, bytes]
"""Method, target, body."""


def read_by_h11(data: bytes, header_bytes_max: int) -> list[Request | None]:
    """The requests that h11 finds under our rules, up to the first fault or the end.

    None stands for one with a fault in its trailers, which we drop unread.
    """
    found: list[Request | None] = []
    parser = StrictParser(header_bytes_max=header_bytes_max)
    try:
        while True:
            while data.startswith(b"\r\n"):
                data = data[2:]
            parser.receive_data(data)
            request = parser.next_event()
            if not isinstance(request, h11.Request):
                return found
            body = b""
            while not isinstance(event := _next_of_body(parser), h11.EndOfMessage):
                if event is None:
                    return [*found, None]
                if not isinstance(event, h11.Data):
                    return found
                body += bytes(event.data)
            found.append((request.method, request.target, body))
            data = parser.trailing_data[0]
            parser = StrictParser(header_bytes_max=header_bytes_max)
    except h11.RemoteProtocolError:
        return found


def _next_of_body(parser: StrictParser) -> Any:
    try:
        return parser.next_event()
    except h11.RemoteProtocolError as error:
        if "Content-Length" in str(error) or "Transfer-Encoding" in str(error):
            return None
        raise


def normal(request: Request) -> Request:
    """As ASGI tells it, whoever has read it."""
    method, target, body = request
    if target.lower().startswith((b"http://", b"https://")):
        path = target.partition(b"//")[2]
        target = path[path.index(b"/") :] if b"/" in path else b"/"
    # ASGI does not tell an empty query from none.
    return method.upper(), target.removesuffix(b"?"), body
