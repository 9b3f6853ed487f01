"""A running service per test, over an engine that is just an async generator function."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import attrs
import httpx
import pytest
import trio
import trio.lowlevel

from trinamo.runtime.context import Context
from trinamo.runtime.http import HttpService
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    ModelCard,
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

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=20
        )

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> bytes:
        """The bytes of one request."""
        if "prompt" not in body:
            body.setdefault("messages", [{"role": "user", "content": "hi"}])
        data = json.dumps(body).encode()
        return (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        ).encode() + data

    def value(self, name: str, **labels: str) -> float:
        return self.service.metrics.value(name, **labels)

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait for something on the server's side; a real socket sets the pace."""
        with trio.fail_after(10):
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


@attrs.define
class PushEngine:
    """An engine that hands what it makes to the sink, each list at once."""

    lists: list[list[Delta]]

    async def forward(self, _: GenerateRequest, __: Context, sink: Sink[Delta]) -> None:
        sink.starts(lambda: None)
        for deltas in self.lists:
            assert sink.take(deltas)
            await trio.lowlevel.checkpoint()


async def say_hello(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("Hel", [1], None, 5)
    yield Delta("lo", [2, 3])
    yield Delta(" ✓", [4], FinishReason.STOP)


@pytest.fixture
def http_server() -> str:
    """Who speaks HTTP; parametrized where both must behave the same."""
    return "native"


@pytest.fixture
async def serve(http_server: str) -> AsyncIterator[Any]:
    """`await serve(function, **settings)` starts a service and returns it `Running`."""
    started: list[Running] = []
    async with trio.open_nursery() as nursery:

        async def start(function: Generate = say_hello, **settings: Any) -> Running:
            settings = {"port": 0, "server": http_server, **settings}
            service = HttpService.builder().config(**settings).build()
            engine = LocalEngine(function)
            service.model_manager().add_model(ModelCard(name="local", endpoint="a/b/c"), engine)
            running = Running(service, engine, await nursery.start(service.run))
            started.append(running)
            return running

        yield start
        for running in started:
            running.service.stop()
        nursery.cancel_scope.cancel()
    for running in started:
        assert running.service.admission.in_flight == 0
        assert running.engine.running == 0
        assert running.value("connections", kind="http") == 0
        for endpoint in ("chat", "completions"):
            assert running.value("requests_in_flight", model="local", endpoint=endpoint) == 0
