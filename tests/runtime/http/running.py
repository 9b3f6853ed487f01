"""A running service as tests see it, over an engine that is just an async generator function."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import attrs
import httpx
import pytest
import trio
import trio.lowlevel

from trinamo.runtime.context import Context
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
)
from trinamo.runtime.sinks import Sink

Generate = Callable[[GenerateRequest, Context], AsyncGenerator[Delta, None]]


@attrs.define
class LocalEngine:
    """An engine made of one function; remembers what it was asked and how it ended."""

    function: Generate
    requests: list[GenerateRequest] = attrs.field(factory=list)
    contexts: list[Context] = attrs.field(factory=list)
    running: int = 0

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.contexts.append(context)
        self.running += 1
        try:
            async with aclosing(self.function(request, context)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.running -= 1


@attrs.define
class Running:
    """A service that is up, with one model called `local`."""

    service: HttpService
    engine: LocalEngine
    port: int
    trust: ssl.SSLContext | None = None
    """With it clients speak TLS."""

    @property
    def url(self) -> str:
        return f"{self.service.config.scheme}://127.0.0.1:{self.port}"

    def client(self, *, http2: bool = False) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            trust_env=False,
            timeout=120,
            verify=self.trust or False,
            http1=not http2,
            http2=http2,
        )

    async def connect(self) -> Any:
        """A stream of the bytes of HTTP/1, over TLS if the server speaks it."""
        plain = await trio.open_tcp_stream("127.0.0.1", self.port)
        if self.trust is None:
            return plain
        secured = Secured(plain, self.trust)
        await secured.shake_hands()
        return secured

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> bytes:
        """The bytes of one request."""
        if "prompt" not in body and "input" not in body:
            body.setdefault("messages", [{"role": "user", "content": "hi"}])
        data = json.dumps(body).encode()
        return (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        ).encode() + data

    def send_now(self, stream: Any, data: bytes) -> None:
        """Let `data` be with the server's kernel, and the server not have had a turn yet."""
        if isinstance(stream, Secured):
            stream.send_now(data)
        else:
            assert os.write(stream.socket.fileno(), data) == len(data)

    def value(self, name: str, **labels: str) -> float:
        return self.service.metrics.value(name, **labels)

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait for something on the server's side; a real socket sets the pace."""
        with trio.fail_after(120):
            while not is_so():
                await trio.sleep(0.002)

    async def wait_quiet(self) -> None:
        """Wait until no request is in flight, no generator runs and no connection is open."""
        await self.wait_for(
            lambda: (
                self.service.admission.in_flight == 0
                and self.engine.running == 0
                and self.value("connections", kind="http") == 0
            )
        )


class Secured(trio.abc.Stream):
    """TLS on a real socket, which tests may reach through to."""

    def __init__(self, plain: trio.SocketStream, trust: ssl.SSLContext) -> None:
        self.socket = plain.socket
        self.plain = plain
        self._tls = trio.SSLStream(plain, trust, server_hostname="127.0.0.1", https_compatible=True)

    async def shake_hands(self) -> None:
        await self._tls.do_handshake()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._tls.send_all(data)

    def send_now(self, data: bytes) -> None:
        """As `send_all`, without a checkpoint."""
        seal_now(self._tls, data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._tls.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._tls.receive_some(max_bytes))

    async def send_eof(self) -> None:
        await self.plain.send_eof()

    async def aclose(self) -> None:
        await self._tls.aclose()


def seal_now(tls: trio.SSLStream[trio.SocketStream], data: bytes) -> None:
    """Send over TLS without a checkpoint."""
    tls._ssl_object.write(data)
    sealed = tls._outgoing.read()
    assert os.write(tls.transport_stream.socket.fileno(), sealed) == len(sealed)


@attrs.define
class PushEngine:
    """An engine that hands what it makes to the sink, each list at once."""

    lists: list[list[Delta]]

    async def forward(self, _: GenerateRequest, __: Context, sink: Sink[Delta]) -> None:
        sink.on_room(lambda: None)
        for deltas in self.lists:
            assert sink.take(deltas)
            await trio.lowlevel.checkpoint()


async def say_hello(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("Hel", [1], None, 5)
    yield Delta("lo", [2, 3])
    yield Delta(" ✓", [4], FinishReason.STOP)


SERVERS = ["native", "tls"]
on_every_server = pytest.mark.parametrize("http_server", SERVERS)
"""A test of what HTTP/1 must do in clear text and in TLS."""
with_tls = pytest.mark.parametrize("http_server", ["tls"])
"""A test of TLS alone. `serve.section` is the section `http.tls` then."""
