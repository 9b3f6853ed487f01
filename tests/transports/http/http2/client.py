"""A client of HTTP/2 that says what a test tells it to, well-behaved or not."""

from __future__ import annotations

import json
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import trio

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
FLOW_CONTROL_MAX = (1 << 31) - 1
FRAME_HEAD_BYTES: Final = 9


def frame(kind: int, stream_id: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """The bytes of one frame, right or wrong."""
    return (
        struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload
    )


@attrs.define
class Answer:
    """What came for one stream."""

    status: int = 0
    headers: dict[bytes, bytes] = attrs.field(factory=dict)
    body: bytes = b""
    is_whole: bool = False
    reset: int | None = None
    informational: list[int] = attrs.field(factory=list)


class Http2Client:
    """One connection. Nothing is read but in `until`; window is granted if `grants`."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        # What must not be sent is what is being tested.
        self.h2.config.validate_outbound_headers = False
        self.h2.config.normalize_outbound_headers = False
        self.answers: dict[int, Answer] = {}
        self.goaway: int | None = None
        self.goaway_reason = b""
        self._unread = b""
        self.is_over = False
        self.grants = True
        self._sending = trio.Lock()

    async def start(self, settings: dict[h2.settings.SettingCodes, int] | None = None) -> None:
        """Say the preface and settings."""
        if settings is not None:
            self.h2.local_settings = h2.settings.Settings(client=True, initial_values=settings)
        self.h2.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        """Send what the library has to say."""
        await self.send(self.h2.data_to_send())

    async def send(self, data: bytes) -> None:
        """Send bytes of any kind; those that nobody takes any more are dropped."""
        try:
            async with self._sending:
                await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.is_over = True

    async def ask(
        self,
        path: str = "/live",
        body: bytes | None = None,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        is_whole: bool = True,
        is_sent: bool = True,
        **pseudo: str,
    ) -> int:
        """Send a request, or leave that to the caller; the id of its stream."""
        stream_id = self.h2.get_next_available_stream_id()
        fields = {"method": "GET" if body is None else "POST", "path": path, "scheme": "https"}
        fields |= {"authority": "localhost"} | pseudo
        listed = [(f":{name}", value) for name, value in fields.items()]
        self.h2.send_headers(stream_id, [*listed, *headers], end_stream=is_whole and body is None)
        if body is not None:
            self.h2.send_data(stream_id, body, end_stream=is_whole)
        self.answers[stream_id] = Answer()
        if is_sent:
            await self.flush()
        return stream_id

    async def chat(self, *, stream: bool = True, is_sent: bool = True, **more: Any) -> int:
        """Ask for a chat completion."""
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, **more}
        kind = (("content-type", "application/json"),)
        data = json.dumps(body).encode()
        return await self.ask("/v1/chat/completions", data, headers=kind, is_sent=is_sent)

    async def until(self, is_so: Any, timeout_s: float = 120.0) -> None:
        """Read until something is so, or the connection is over."""
        with trio.fail_after(timeout_s):
            while not is_so() and not self.is_over:
                try:
                    data = bytes(await self.stream.receive_some(65_536))
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    data = b""
                if not data:
                    self.is_over = True
                    return
                self.take(data)
                await self.flush()

    def take(self, data: bytes) -> None:
        """Note what the server says, frame by frame: an error would take along the events before it."""
        self._unread += data
        while len(self._unread) >= FRAME_HEAD_BYTES:
            end = FRAME_HEAD_BYTES + int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < end:
                return
            frame, self._unread = self._unread[:end], self._unread[end:]
            try:
                for event in self.h2.receive_data(frame):
                    self._note(event)
            except h2.exceptions.ProtocolError:
                # The library reads no answer that comes after a last word.
                assert self.goaway is not None

    def _note(self, event: Any) -> None:
        answer = self.answers.setdefault(getattr(event, "stream_id", None) or 0, Answer())
        match event:
            case h2.events.ResponseReceived():
                answer.headers = dict(event.headers)
                answer.status = int(answer.headers[b":status"])
            case h2.events.InformationalResponseReceived():
                answer.informational.append(int(dict(event.headers)[b":status"]))
            case h2.events.DataReceived():
                answer.body += event.data
                if self.grants:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                answer.is_whole = True
            case h2.events.StreamReset():
                answer.reset = event.error_code
            case h2.events.ConnectionTerminated():
                self.goaway = event.error_code
                self.goaway_reason = event.additional_data or b""
            case _:
                pass

    async def answer(self, stream_id: int) -> Answer:
        """The whole answer of a stream, or what came until it was reset."""
        answer = self.answers[stream_id]
        await self.until(lambda: answer.is_whole or answer.reset is not None)
        return answer


async def connect(running: Any) -> Http2Client:
    """A connection that has agreed on HTTP/2 and said nothing yet."""
    trust: ssl.SSLContext = running.trust
    trust.set_alpn_protocols(["h2"])
    stream = await trio.open_ssl_over_tcp_stream(
        "127.0.0.1", running.port, ssl_context=trust, https_compatible=True
    )
    await stream.do_handshake()
    assert stream.selected_alpn_protocol() == "h2"
    return Http2Client(stream)


@contextmanager
def closing(client: Http2Client) -> Iterator[Http2Client]:
    """Reset the connection at the end, whatever is under way."""
    try:
        yield client
    finally:
        client.stream.transport_stream.socket.close()
