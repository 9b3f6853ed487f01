"""Server-sent events, both ways: chunks to `data:` lines, bytes back to events.

Sans-IO. The writing side is a few functions and a template; the reading side is an incremental,
bounded parser for `trinamo chat` and for tests. What a chunk says is `requests.py`'s business.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import attrs
import msgspec

from ...errors import LocalProtocolError, RemoteProtocolError

__all__ = ["DONE", "DONE_DATA", "ServerSentEvent", "SseParser", "TextTemplate", "encode_data"]

DONE_DATA = "[DONE]"
"""The data of the event that ends a complete OpenAI stream."""

DONE = b"data: [DONE]\n\n"

_encode_json = msgspec.json.Encoder().encode
_TEXT_MARK = "\x00trinamo-text\x00"


def encode_data(data: bytes) -> bytes:
    """One event whose data is `data`, which must be a single line such as compact JSON."""
    if b"\n" in data or b"\r" in data:
        raise LocalProtocolError("an event's data must be one line here; encode it as compact JSON")
    return b"data: " + data + b"\n\n"


class TextTemplate:
    """One event per token at a third of the cost: everything but the text is encoded once.

    `chunk` is any value that msgspec can encode and that holds `TextTemplate.MARK` exactly once,
    as a whole string, where the text belongs.
    """

    MARK = _TEXT_MARK

    __slots__ = ("_head", "_tail")

    def __init__(self, chunk: object) -> None:
        parts = _encode_json(chunk).split(_encode_json(_TEXT_MARK))
        if len(parts) != 2:
            raise LocalProtocolError(f"the template's mark occurs {len(parts) - 1} times, not once")
        self._head = b"data: " + parts[0]
        self._tail = parts[1] + b"\n\n"

    def render(self, text: str) -> bytes:
        """The whole event, with `text` escaped as a JSON string."""
        return self._head + _encode_json(text) + self._tail


@attrs.frozen
class ServerSentEvent:
    """One event as received; `event` is empty unless the server named one."""

    data: str
    event: str = ""


class SseParser:
    """Bytes in, events out, for any split of the bytes.

    Comments, ids and retry times are read over. At most `event_bytes_max` bytes are kept for an
    unfinished event; more raises `RemoteProtocolError`, and so does data that is not UTF-8. After
    an error the parser must not be fed again.
    """

    def __init__(self, *, event_bytes_max: int = 1 << 20) -> None:
        self._event_bytes_max = event_bytes_max
        self._line = bytearray()
        self._data: list[str] = []
        self._data_bytes = 0
        self._event = ""
        self._after_cr = False
        self._at_start = True

    @property
    def is_idle(self) -> bool:
        """True between events: an end of the connection here cuts nothing short."""
        return not (self._line or self._data or self._event)

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that `data` completes, in order."""
        if self._after_cr and data:
            self._after_cr = False
            # The line ended at the CR already; an LF right after it belongs to the same ending.
            if data.startswith(b"\n"):
                data = data[1:]
        if data.endswith(b"\r"):
            self._after_cr = True
        self._line += data
        lines = bytes(self._line).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._line = bytearray(lines.pop())
        events = [event for line in lines if (event := self._take_line(line)) is not None]
        self._check_bound()
        return events

    def _check_bound(self) -> None:
        kept = len(self._line) + self._data_bytes
        if kept > self._event_bytes_max:
            raise RemoteProtocolError(
                f"an event of more than {self._event_bytes_max} bytes without an end"
            )

    def _take_line(self, raw: bytes) -> ServerSentEvent | None:
        if self._at_start:
            self._at_start = False
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if not raw:
            return self._dispatch()
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"an event stream that is not UTF-8: {error}") from error
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
            self._data_bytes += len(raw)
            self._check_bound()
        elif field == "event":
            self._event = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        data, event = self._data, self._event
        self._data, self._event, self._data_bytes = [], "", 0
        if not data:
            return None
        return ServerSentEvent("\n".join(data), event)
