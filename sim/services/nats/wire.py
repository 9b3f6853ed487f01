"""NATS's own protocol as its server reads and writes it: operations out of bytes, and messages. Sans-IO.

Source: docs.nats.io, "Client Protocol". What a client says beside it is an `Unknown`, and the server's
word for that goes to the client before it is cut off, as the real one does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import attrs

LINE_BYTES_MAX: Final = 4096
_HEAD: Final = "NATS/1.0"


@attrs.frozen
class Connect:
    """Who the client is, and what it understands."""

    options: dict[str, Any]


@attrs.frozen
class Ping:
    """Say that all before it was taken."""


@attrs.frozen
class Subscribe:
    """Deliver what matches `pattern` under `id`; of a group, to one of its members."""

    id: str
    pattern: str
    group: str = ""


@attrs.frozen
class Unsubscribe:
    """Deliver no more under `id`, or no more than so many in all."""

    id: str
    count: int = 0


@attrs.frozen
class Publish:
    """Deliver the payload to whoever is interested; `head` holds the headers as they came."""

    subject: str
    payload: bytes = attrs.field(repr=False, default=b"")
    reply: str = ""
    head: bytes = b""

    @property
    def headers(self) -> dict[str, str]:
        """The headers by name; of those that come twice the last one."""
        lines = self.head.decode("utf-8", "replace").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines if ":" in line)
        return {name: value.strip() for name, _, value in pairs}


@attrs.frozen
class Deliver:
    """A message for subscription `id` of one client."""

    id: str
    message: Publish

    def encoded(self) -> bytes:
        """As the client reads it."""
        message = self.message
        words = f"{message.subject} {self.id} {message.reply}".rstrip()
        size = len(message.head) + len(message.payload)
        if message.head:
            first = f"HMSG {words} {len(message.head)} {size}\r\n"
        else:
            first = f"MSG {words} {size}\r\n"
        return b"".join((first.encode(), message.head, message.payload, b"\r\n"))


@attrs.frozen
class Unknown:
    """No operation; what the server says to it."""

    words: str


Operation = Connect | Ping | Subscribe | Unsubscribe | Publish | Unknown


def status(code: int, words: str = "") -> bytes:
    """The head of a message that says no more than this, such as 503: nobody answers there."""
    return f"{_HEAD} {code} {words}".rstrip().encode() + b"\r\n\r\n"


def matches(pattern: list[str], subject: list[str]) -> bool:
    """Whether the subject is one of those that the pattern with its `*` and `>` means."""
    for place, wanted in enumerate(pattern):
        if wanted == ">":
            return len(subject) > place
        if place >= len(subject) or wanted not in ("*", subject[place]):
            return False
    return len(pattern) == len(subject)


class OperationDecoder:
    """Bytes of one client in, operations out, in order; ends with the first `Unknown`."""

    def __init__(self, *, payload_bytes_max: int) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Operation]:
        """What is complete by now."""
        self._buffer += data
        try:
            while (operation := self._next()) is not None:
                yield operation
                if isinstance(operation, Unknown):
                    return
        except (ValueError, IndexError, TypeError):
            yield Unknown("Parser Error")

    def _next(self) -> Operation | None:
        while True:
            end = self._buffer.find(b"\r\n", 0, LINE_BYTES_MAX)
            if end < 0:
                too_long = len(self._buffer) >= LINE_BYTES_MAX
                return Unknown("Maximum Control Line Exceeded") if too_long else None
            verb, _, rest = self._buffer[:end].decode().partition(" ")
            words = rest.split()
            match verb.upper():
                case "PUB":
                    return self._publish(end + 2, words, 0)
                case "HPUB":
                    return self._publish(end + 2, words, int(words[-2]))
                case name:
                    del self._buffer[: end + 2]
                    if name == "PONG":
                        continue
                    return self._short(name, rest, words)

    def _short(self, verb: str, rest: str, words: list[str]) -> Operation:
        """One that is a line alone."""
        match verb:
            case "CONNECT":
                return Connect(json.loads(rest))
            case "PING":
                return Ping()
            case "SUB":
                return Subscribe(words[-1], words[0], words[1] if len(words) > 2 else "")
            case "UNSUB":
                return Unsubscribe(words[0], int(words[1]) if len(words) > 1 else 0)
            case _:
                return Unknown("Unknown Protocol Operation")

    def _publish(self, start: int, words: list[str], head_bytes: int) -> Operation | None:
        size = int(words[-1])
        if not 0 <= head_bytes <= size <= self._payload_bytes_max:
            return Unknown("Maximum Payload Violation")
        if len(self._buffer) < start + size + 2:
            return None
        middle = start + head_bytes
        numbers = 2 if head_bytes else 1
        message = Publish(
            words[0],
            bytes(self._buffer[middle : start + size]),
            words[1] if len(words) > 1 + numbers else "",
            bytes(self._buffer[start:middle]),
        )
        del self._buffer[: start + size + 2]
        return message
