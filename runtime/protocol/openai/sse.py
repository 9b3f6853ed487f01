"""Server-sent events as they are written: chunks to `data:` lines. Sans-IO.

They are read by `transports/openai/events.py`. What a chunk says is `answers.py`'s business.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import msgspec

from ...errors import LocalProtocolError

DONE_DATA = b"[DONE]"
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
