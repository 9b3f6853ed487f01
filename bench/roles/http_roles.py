"""The servers that are measured over HTTP, trinamo's own and bare ones; see `roles.py`.

What a request asks of the engine is in `load/load.py`: how many tokens, how long each takes
(`temperature`, in seconds), and whether the stream sleeps by itself (`seed` 1) or its tokens come
with those of all others, as from an engine that steps.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from asyncio_engines import HttpEngine, tokens_of
from commands import IDLE_STEP_S

TEXT = "~tok "
CHUNK = {
    "id": "chatcmpl-0",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "bench",
    "choices": [{"index": 0, "delta": {"content": TEXT}, "finish_reason": None}],
}
EVENT = b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"
CHUNKED = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
MODELS = b'{"object":"list","data":[{"id":"bench","object":"model"}]}'


def whole(tokens: int) -> bytes:
    """The answer that is not streamed."""
    message = {"role": "assistant", "content": TEXT * tokens}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    choices = [{"index": 0, "message": message, "finish_reason": "length"}]
    answer = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": "bench"}
    return json.dumps({**answer, "choices": choices, "usage": usage}).encode()


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


@contextmanager
def profiled(role: str) -> Iterator[None]:
    """With BENCH_PROFILE=DIRECTORY: where the time of this process goes after SIGUSR1."""
    directory = os.environ.get("BENCH_PROFILE")
    if not directory:
        yield
        return
    import cProfile
    import signal
    import time

    profile = cProfile.Profile(time.thread_time)
    # By a signal, so that what only the start needs is not in it.
    signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
    try:
        yield
    finally:
        profile.disable()
        profile.dump_stats(f"{directory}/{role}-{os.getpid()}.prof")


def tunnel(port: str, behind: str, authority: str = "") -> None:
    """To the server on port `behind` for whoever connects to `port`; in TLS, where it has an authority."""
    import ssl

    trust = ssl.create_default_context(cafile=authority) if authority else None

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection("127.0.0.1", int(behind), ssl=trust)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, far[1]), pump(far[0], writer))

    async def main() -> None:
        server = await asyncio.start_server(carry, "127.0.0.1", int(port), backlog=1024)
        await server.serve_forever()

    asyncio.run(main())


# --- trinamo -------------------------------------------------------------------------------------


def trinamo_control() -> None:
    """An etcd for as long as standard input is open."""
    import trio

    from trinamo import open_etcd_server

    async def main() -> None:
        async with open_etcd_server() as etcd:
            say(address=etcd.endpoint)
            await trio.to_thread.run_sync(sys.stdin.readline)

    trio.run(main)


def trinamo_servers() -> None:
    """An etcd and a NATS, likewise."""
    import trio

    from trinamo import open_etcd_server, open_nats_server

    async def main() -> None:
        async with open_etcd_server() as etcd, open_nats_server() as nats:
            say(etcd=etcd.endpoint, nats=nats.url, token=nats.token)
            await trio.to_thread.run_sync(sys.stdin.readline)

    trio.run(main)


def trinamo_worker(model: str) -> None:
    """A worker whose model is `plain`, an ordinary generator, or `steps`, an engine that pushes."""
    import trio
    from engines import PlainEngine, StepsEngine

    from trinamo import load_config, serve_worker

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            engine = StepsEngine() if model == "steps" else PlainEngine()
            nursery.start_soon(engine.run)
            await serve_worker(engine, config=load_config(), ready=lambda _: say(model=model))
            nursery.cancel_scope.cancel()

    with profiled(f"worker-{model}"):
        trio.run(main)


def trinamo_frontend(port: str) -> None:
    """`trinamo frontend`, as it is."""
    from trinamo.cli.main import app

    with profiled("frontend"):
        app(["frontend", "--port", port], standalone_mode=False)


# --- bare servers --------------------------------------------------------------------------------


def bare_uvicorn(port: str) -> None:
    """A function on uvicorn, with httptools and uvloop where they are installed."""
    import uvicorn

    steps = HttpEngine()
    running = set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            running.add(asyncio.create_task(steps.run()))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body) if body else {}
        if not asked.get("stream"):
            answer = whole(tokens_of(asked)) if asked else MODELS
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(answer)),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for _ in steps.tokens(asked):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    uvicorn.run(app, port=int(port), log_level="error", access_log=False, backlog=4096)


def bare_upstream(port: str) -> None:
    """The cheapest server that a router can forward to: an asyncio protocol that writes."""
    steps = HttpEngine()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Upstream(steps), "127.0.0.1", int(port), backlog=4096
        )
        async with server:
            await asyncio.gather(steps.run(), server.serve_forever())

    with suppress(ImportError):
        import uvloop  # pyright: ignore[reportMissingImports]

        uvloop.install()
    asyncio.run(main())


class Upstream(asyncio.Protocol):
    """One connection: requests in turn, any path that is not a completion is answered at once."""

    def __init__(self, steps: HttpEngine) -> None:
        self.steps = steps
        self.buffer = b""
        self.answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answering:
            self.answering.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lengths = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
        length = int(lengths[0].split(b":")[1]) if lengths else 0
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        if not head.startswith(b"POST"):
            self.transport.write(response(MODELS))
            return
        asked = json.loads(rest[:length])
        if asked.get("stream"):
            self.answering = asyncio.create_task(self.stream(asked))
        else:
            self.transport.write(response(whole(tokens_of(asked))))

    async def stream(self, asked: dict) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        count = 0
        async for _ in self.steps.tokens(asked):
            self.transport.write(CHUNKED)
            if (count := count + 1) % 16 == 0 and not asked["temperature"]:
                await asyncio.sleep(0)  # A burst lets the others in.
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))


def response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def trio_floor(port: str) -> None:
    """The system calls of a frontend whose tokens arrive together, and nothing else.

    One task steps; it sends each stream's event with one `send`. A request is one `recv` and one
    `send`. Below this no frontend in Python on trio can be.
    """
    import trio

    streams: dict[socket.socket, int] = {}
    step_s = 0.0

    async def run() -> None:
        due = trio.current_time()
        while True:
            due = max(due + (step_s if streams else IDLE_STEP_S), trio.current_time())
            await trio.sleep_until(due)
            for each in list(streams):
                streams[each] -= 1
                try:
                    if streams[each] >= 0:
                        each.send(CHUNKED)
                    else:
                        del streams[each]
                        each.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))
                except OSError:
                    streams.pop(each, None)

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal step_s
        plain = socket.socket(fileno=os.dup(stream.socket.fileno()))
        plain.setblocking(False)
        with plain:
            while data := await stream.receive_some(65_536):
                body = data.partition(b"\r\n\r\n")[2]
                asked = json.loads(body) if body else {}
                if not asked.get("stream"):
                    plain.send(response(whole(tokens_of(asked)) if asked else MODELS))
                    continue
                plain.send(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                    b"transfer-encoding: chunked\r\n\r\n"
                )
                step_s = asked["temperature"]
                streams[plain] = asked["max_tokens"]
            streams.pop(plain, None)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.serve_tcp(serve, int(port), host="127.0.0.1", backlog=4096)

    trio.run(main)
