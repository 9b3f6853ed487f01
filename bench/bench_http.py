"""HTTP streaming: CPU per server-sent event, our frontend's server beside two that do nothing else.

All stream the same OpenAI chunks from inside the process: ours through the whole HTTP edge
(hypercorn on trio, starlette, parsing, metrics, disconnect watching), uvicorn's through a bare ASGI
function, and `trio` is a task per connection that sleeps and writes to its socket: what the event
loop itself costs. So the ratios are the price of the edge, not of the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import trio

CHUNK = {
    "id": "chatcmpl-0",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "bench",
    "choices": [{"index": 0, "delta": {"content": "token "}, "finish_reason": None}],
}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CHUNK_EVENT = b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n"
KINDS = ("trinamo", "uvicorn", "trio")
OWN_PHASE = 1
"""As a request's seed: its events are due at the request's arrival plus whole pauses, so streams that
started apart stay apart. Without it each pause begins after the event before, and loops whose timers
have whole milliseconds draw the streams together."""


# --- the servers, each a process of its own ---------------------------------------------------


def serve_trinamo() -> None:
    from collections.abc import AsyncGenerator

    from trinamo.runtime.context import Context
    from trinamo.runtime.http.service import HttpService
    from trinamo.runtime.protocol.openai.generate import (
        Delta,
        FinishReason,
        GenerateRequest,
    )

    class Engine:
        async def generate(
            self, request: GenerateRequest, context: Context
        ) -> AsyncGenerator[Delta, None]:
            count = request.max_tokens or 1
            start = trio.current_time()
            for number in range(count):
                if request.seed == OWN_PHASE:
                    await trio.sleep_until(start + number * request.temperature)
                elif request.temperature:
                    await trio.sleep(request.temperature)
                reason = FinishReason.LENGTH if number == count - 1 else None
                yield Delta("token ", [number], reason)

    async def main() -> None:
        service = HttpService.builder().port(0).build()
        service.model_manager().add_chat_completions_model("bench", Engine())
        async with trio.open_nursery() as nursery:
            print(await nursery.start(service.run), flush=True)

    trio.run(main)


def serve_uvicorn() -> None:
    import asyncio

    import uvicorn

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        clock = asyncio.get_running_loop().time
        start = clock()
        for number in range(asked["max_tokens"]):
            if asked["seed"] == OWN_PHASE:
                await asyncio.sleep(max(0, start + number * asked["temperature"] - clock()))
            elif asked["temperature"]:
                await asyncio.sleep(asked["temperature"])
            await send({"type": "http.response.body", "body": CHUNK_EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="error", lifespan="off", access_log=False)
        await uvicorn.Server(config).serve(sockets=[listener])

    asyncio.run(main())


def serve_trio() -> None:
    chunk = b"%x\r\n%b\r\n" % (len(CHUNK_EVENT), CHUNK_EVENT)

    async def answer(stream: trio.SocketStream) -> None:
        asked = json.loads((await stream.receive_some(65_536)).split(b"\r\n\r\n", 1)[1])
        start = trio.current_time()
        with socket.socket(fileno=stream.socket.detach()) as plain:
            for number in range(asked["max_tokens"]):
                if asked["seed"] == OWN_PHASE:
                    await trio.sleep_until(start + number * asked["temperature"])
                elif asked["temperature"]:
                    await trio.sleep(asked["temperature"])
                left = chunk
                while left:
                    try:
                        left = left[plain.send(left) :]
                    except BlockingIOError:
                        await trio.lowlevel.wait_writable(plain)
            plain.setblocking(True)
            plain.sendall(b"data: [DONE]\n\n")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, answer, 0)
            print(listeners[0].socket.getsockname()[1], flush=True)

    trio.run(main)


SERVERS = {"trinamo": serve_trinamo, "uvicorn": serve_uvicorn, "trio": serve_trio}


# --- the load -------------------------------------------------------------------------------------


class Server:
    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


async def load(port: int, streams: int, tokens: int, pause_s: float, phase: int = 0) -> None:
    body = json.dumps(
        {
            "model": "bench",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "temperature": pause_s,
            "seed": phase,
            "stream": True,
        }
    ).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )

    async def one() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request)
            tail = b""
            while data := await stream.receive_some(262_144):
                tail = (tail + data)[-64:]
            assert b"[DONE]" in tail, tail

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(one)
            if phase == OWN_PHASE:
                await trio.sleep(pause_s / streams)


def measure(
    server: Server, streams: int, tokens: int, pause_s: float, phase: int = 0
) -> tuple[float, float]:
    """CPU microseconds per event, and events a second."""
    cpu, started = server.cpu_s(), time.perf_counter()
    trio.run(load, server.port, streams, tokens, pause_s, phase)
    wall = time.perf_counter() - started
    return (server.cpu_s() - cpu) / (streams * tokens) * 1e6, streams * tokens / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        SERVERS[options.serve]()
        return
    servers = {kind: Server(kind) for kind in KINDS}
    try:
        print("| load | server | events/s | CPU µs/event |\n|---|---|---|---|")
        # Enough events for the 10 ms ticks of the process clock.
        for name, streams, tokens, pause_s, phase in (
            ("burst, 16 streams", 16, 4000, 0.0, 0),
            ("paced at 20 ms, 64 streams", 64, 150, 0.02, 0),
            ("the same, each at its own phase", 64, 150, 0.02, OWN_PHASE),
        ):
            rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for number in range(options.rounds + 1):
                for kind, server in servers.items():
                    found = measure(server, streams, tokens, pause_s, phase)
                    if number:
                        rounds[kind].append(found)
            for kind in KINDS:
                cpu = statistics.median(each[0] for each in rounds[kind])
                rate = statistics.median(each[1] for each in rounds[kind])
                print(f"| {name} | {kind} | {rate:,.0f} | {cpu:.1f} |")
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    main()
