"""An upstream that says what a test wants, over real sockets, and a cluster of one process before it."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import httptools
import httpx
import trio
import trio.lowlevel

from tests.runtime.one_process import OneProcess, config
from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.engines import GenerationEngine
from trinamo.runtime.env import RealEnv
from trinamo.runtime.process.roles import serve_frontend, serve_worker
from trinamo.runtime.process.stopping import StopRequest
from trinamo.transports.openai.engine import open_upstream_engine

Answer = Callable[["Asked", Any], Awaitable[None]]
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
FAST: dict[str, Any] = {
    "connect_timeout_s": 5.0,
    "health_interval_s": 0.05,
    "start_timeout_s": 10.0,
}


@attrs.define
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _Reader:
    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.done: list[Asked] = []
        self._begin()

    def _begin(self) -> None:
        self.path, self.body = "", b""
        self.headers: dict[str, str] = {}

    def on_message_begin(self) -> None:
        self._begin()

    def on_url(self, url: bytes) -> None:
        self.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        method = self.parser.get_method().decode()
        self.done.append(Asked(method, self.path, self.headers, self.body))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes | Any, status: int = 200, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def chat_chunk(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "chatcmpl-up",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    } | more


def events(*chunks: Any, done: bool = True) -> bytes:
    """As vLLM writes them: JSON behind `data: `, then `[DONE]`."""
    lines = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks]
    return b"".join([*lines, b"data: [DONE]\n\n" if done else b""])


HELLO = events(chat_chunk("Hel"), chat_chunk("lo"), chat_chunk(finish="stop"))


def says(data: bytes) -> Answer:
    """Answers every request with these bytes."""

    async def answer(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(data)

    return answer


def streams(body: bytes) -> Answer:
    """Answers every request with a stream of these events, and its proper end."""
    return says(STREAM_HEAD + chunk(body) + b"0\r\n\r\n")


@attrs.define(eq=False)
class FakeUpstream:
    """One server. What it is asked besides its health is in `asked`."""

    port: int = 0
    answer: Answer = attrs.field(factory=lambda: streams(HELLO))
    models: list[dict[str, Any]] | None = attrs.field(
        factory=lambda: [{"id": "m", "max_model_len": 4096}]
    )
    health: int = 200
    metrics: bytes | None = None
    tls: ssl.SSLContext | None = None
    asked: list[Asked] = attrs.field(factory=list)
    open_count: int = 0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/v1"

    async def accept(self, stream: trio.SocketStream) -> None:
        if self.tls is None:
            await self.serve(stream)
        else:
            await self.serve(
                trio.SSLStream(stream, self.tls, server_side=True, https_compatible=True)
            )

    async def serve(self, stream: trio.abc.Stream) -> None:
        reader = _Reader()
        self.open_count += 1
        try:
            while data := await stream.receive_some(65536):
                reader.parser.feed_data(data)
                while reader.done:
                    await self._answer(reader.done.pop(0), stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.open_count -= 1
            await trio.aclose_forcefully(stream)

    async def _answer(self, asked: Asked, stream: trio.abc.Stream) -> None:
        if asked.path == "/health":
            await stream.send_all(whole(b"", self.health))
        elif asked.path == "/v1/models":
            await stream.send_all(whole({"object": "list", "data": self.models}))
        elif asked.path == "/metrics":
            page = self.metrics
            await stream.send_all(whole(b"", 404) if page is None else whole(page))
        else:
            self.asked.append(asked)
            await self.answer(asked, stream)


@asynccontextmanager
async def open_fake(
    answer: Answer | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[FakeUpstream]:
    """A fake upstream that listens; leaving cuts every connection to it, with RST or FIN."""
    fake = FakeUpstream(tls=tls)
    if answer is not None:
        fake.answer = answer
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, fake.accept, 0, host="127.0.0.1"))
        fake.port = listeners[0].socket.getsockname()[1]
        yield fake
        nursery.cancel_scope.cancel()


async def until(is_so: Callable[[], object]) -> None:
    """A real socket sets the pace."""
    with trio.fail_after(120):
        while not is_so():
            await trio.sleep(0.005)


@attrs.define
class Front:
    """A frontend's address, and a client of it."""

    url: str
    client: httpx.AsyncClient

    async def chat(self, **body: Any) -> httpx.Response:
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
        return await self.client.post("/v1/chat/completions", json=asked)

    async def wait_model(self, name: str = "m") -> None:
        with trio.fail_after(120):
            while name not in [
                each["id"] for each in (await self.client.get("/v1/models")).json()["data"]
            ]:
                await trio.sleep(0.01)


@asynccontextmanager
async def open_front(transports: OneProcess, **overrides: Any) -> AsyncIterator[Front]:
    """A frontend over the shared planes."""
    stop, started = StopRequest(), trio.Event()
    found: list[str] = []

    def ready(facts: Any) -> None:
        found.append(facts.url)
        started.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                serve_frontend,
                config(http__port=0, **overrides),
                RealEnv(),
                transports,
                stop,
                ready=ready,
            )
        )
        with trio.fail_after(120):
            await started.wait()
        async with httpx.AsyncClient(base_url=found[0], trust_env=False, timeout=120) as client:
            yield Front(found[0], client)
        stop.request()


@asynccontextmanager
async def open_worker(transports: OneProcess, url: str, **section: Any) -> AsyncIterator[None]:
    """A worker before the upstream at `url`."""
    model = section.pop("model_name", None)
    upstream = UpstreamConfig(url=url, **FAST | section)
    async with (
        open_upstream_engine(upstream, model=model) as engine,
        serving(transports, engine),
    ):
        yield


@asynccontextmanager
async def serving(transports: OneProcess, engine: GenerationEngine) -> AsyncIterator[None]:
    """A worker that serves `engine`, until it leaves in order."""
    stop, started = StopRequest(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                serve_worker,
                config(worker__status_port="null"),
                RealEnv(),
                transports,
                engine,
                stop,
                ready=lambda _: started.set(),
            )
        )
        with trio.fail_after(120):
            await started.wait()
        yield
        stop.request()


@asynccontextmanager
async def open_cluster(*urls: str, **section: Any) -> AsyncIterator[Front]:
    """A frontend and a worker before each upstream."""
    transports = OneProcess()
    async with trio.open_nursery() as nursery, open_front(transports, http__queue_max="0") as front:
        leave = trio.Event()

        async def work(url: str, *, task_status: trio.TaskStatus[None]) -> None:
            async with open_worker(transports, url, **section):
                task_status.started()
                await leave.wait()

        for url in urls:
            await nursery.start(work, url)
        await front.wait_model(section.get("model_name") or "m")
        yield front
        leave.set()


@asynccontextmanager
async def open_hop(*fakes: FakeUpstream, **overrides: Any) -> AsyncIterator[Front]:
    """A frontend that has found the model of each."""
    urls = ",".join(each.url for each in fakes)
    settings: dict[str, Any] = {"worker__upstream__health_interval_s": "0.05", **overrides}
    async with open_front(OneProcess(), http__upstreams=urls, **settings) as front:
        await front.wait_model()
        yield front


async def ask_until(front: Front, is_so: Any, **body: Any) -> None:
    with trio.fail_after(120):
        while not is_so():
            assert (await front.chat(stream=True, **body)).content == HELLO


@asynccontextmanager
async def open_two(**section: Any) -> AsyncIterator[tuple[Front, FakeUpstream, FakeUpstream]]:
    async with (
        open_fake() as one,
        open_fake() as other,
        open_cluster(one.url, other.url, **section) as front,
    ):
        # Both are chosen among from here on.
        await until(lambda: one.port and other.port)
        yield front, one, other


def texts_of(answer: str) -> str:
    data = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
    found = [json.loads(each) for each in data]
    choices = [choice for each in found for choice in each.get("choices", ())]
    return "".join(each["delta"].get("content") or "" for each in choices)
