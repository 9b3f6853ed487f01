"""Streams over HTTP that write down when each of their reads came: for questions of time, not of rate.

`load.c` asks for a great deal and sums up; here a few answers are followed read by read.
"""

from __future__ import annotations

import json
from time import perf_counter

import trio

READ_BYTES = 65_536
_EVENT = b'data: {"'
_ERROR = b'data: {"error"'


class Answer:
    """One streamed completion: when it was asked, and when each read with tokens came."""

    def __init__(self, port: int, model: str, prompt: str, tokens: int, **fields: object) -> None:
        self._port = port
        asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, **fields}
        self._body = json.dumps(asked).encode()
        self.asked_at = 0.0
        self.read_at: list[float] = []
        self.events = 0
        self.first = trio.Event()
        self._scope = trio.CancelScope()

    @property
    def first_ms(self) -> float:
        """From the question to the first token."""
        return (self.read_at[0] - self.asked_at) * 1e3

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Between reads, of those that overlap the time from `begin` to `end`."""
        pairs = zip(self.read_at, self.read_at[1:], strict=False)
        return [(b - a) * 1e3 for a, b in pairs if b > begin and a < end]

    async def run(self) -> None:
        """Ask, and read to the end; raises `SystemExit` for an answer that is none."""
        with self._scope:
            async with await trio.open_tcp_stream("127.0.0.1", self._port) as stream:
                self.asked_at = perf_counter()
                await stream.send_all(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                    % (len(self._body), self._body)
                )
                while data := await stream.receive_some(READ_BYTES):
                    self._take(bytes(data))
        if not self.read_at:
            raise SystemExit("an answer without a token")

    def leave(self) -> None:
        """Hang up, as a client that has seen enough."""
        self._scope.cancel()

    def _take(self, data: bytes) -> None:
        if _ERROR in data or b"HTTP/1.1 4" in data or b"HTTP/1.1 5" in data:
            raise SystemExit(data.decode("utf-8", "replace"))
        if count := data.count(_EVENT):
            self.events += count
            self.read_at.append(perf_counter())
            self.first.set()
