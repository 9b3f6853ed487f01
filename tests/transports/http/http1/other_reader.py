"""Requests as h11 reads them: another reader to hold our own to."""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

import h11

from trinamo.transports.http.http1.heads import (
    HOST_VALUE,
    find_fault_in_bytes,
    find_fault_in_fields,
)
from trinamo.transports.http.refusals import HeadFault

TRAILER_BYTES_MAX: Final = 8192
# h11 takes these in a value (RFC 9110, section 5.5, does not).
_CONTROL: Final = re.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
_VALUE: Final = HeadFault(400, "a header's value holds a control character")
_TRAILERS: Final = HeadFault(
    431, f"the trailers are longer than {TRAILER_BYTES_MAX} bytes, which is the limit"
)
_HOST: Final = HeadFault(400, "there must be one Host header, which is a name or an address")


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


class StrictParser(h11.Connection):
    """A server's parser. After a `fault`, as after an error of h11, there is no next event."""

    def __init__(self, *, header_bytes_max: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=header_bytes_max)
        self.fault: HeadFault | None = None
        self._line_end = b""

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """As h11's, but for empty lines before a request, which are none (RFC 9112, section 2.2).

        And what follows a last request is dropped: h11 would refuse that request for it.
        """
        data = bytes(data)
        if data and self.their_state is h11.MUST_CLOSE:
            return
        if data and self.their_state is h11.IDLE and not self.trailing_data[0]:
            data = self._line_end + data
            while data.startswith(b"\r\n"):
                data = data[2:]
            self._line_end = data if data == b"\r" else b""
            if self._line_end or not data:
                return
        super().receive_data(data)

    def next_event(self) -> Any:
        """What h11 makes of the bytes; raises `h11.RemoteProtocolError` with the status to answer."""
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        if self.their_state is h11.IDLE:
            self._refuse(find_fault_in_bytes(self.trailing_data[0]))
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._refuse(find_fault_in_fields(event.http_version, event.headers))
            self._refuse(_find_fault_in_values(event))
        elif isinstance(event, h11.EndOfMessage):
            self._refuse(_find_fault_in_values(event))
            size = sum(len(name) + len(value) for name, value in event.headers)
            self._refuse(_TRAILERS if size > TRAILER_BYTES_MAX else None)
        return event

    def _refuse(self, fault: HeadFault | None) -> None:
        self.fault = self.fault or fault
        if self.fault is not None:
            raise h11.RemoteProtocolError(self.fault.reason, self.fault.status)


def _find_fault_in_values(event: h11.Request | h11.EndOfMessage) -> HeadFault | None:
    for name, value in event.headers:
        if _CONTROL.search(value):
            return _VALUE
        # In trailers, which we drop unread, it says nothing.
        is_head = isinstance(event, h11.Request)
        if is_head and name == b"host" and not HOST_VALUE.fullmatch(value):
            return _HOST
    return None
