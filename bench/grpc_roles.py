"""The peer: grpcio's asyncio API with generic bytes handlers, the leanest way to use it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
from roles import (
    STEP_S,
    TOKEN,
    Command,
    answer_commands,
    cpu,
    decode_any,
    decode_text,
    encode,
    measured,
)

SERVICE = "bench"


async def read_line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


class Engine:
    """The same handlers as trinamo's worker has."""

    def __init__(self) -> None:
        self.step = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            step, self.step = self.step, asyncio.Event()
            step.set()

    async def tokens(self, count: int, _: object) -> AsyncIterator[str]:
        for _number in range(count):
            yield TOKEN

    async def paced(self, count: int, _: object) -> AsyncIterator[str]:
        for _number in range(count):
            await self.step.wait()
            yield TOKEN

    async def echo(self, text: str, _: object) -> str:
        return text


def worker() -> None:
    asyncio.run(_worker())


async def _worker() -> None:
    engine = Engine()

    def streaming(method: object) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(method, decode_any, encode)

    handlers = {
        "tokens": streaming(engine.tokens),
        "paced": streaming(engine.paced),
        "echo": grpc.unary_unary_rpc_method_handler(engine.echo, decode_any, encode),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ticking = asyncio.create_task(engine.run())
    await answer_commands(read_line, {"cpu": cpu}, {"address": f"127.0.0.1:{port}"})
    ticking.cancel()
    await server.stop(None)


class Load:
    """What the client process is told to do."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.tokens = channel.unary_stream(f"/{SERVICE}/tokens", encode, decode_text)
        self.paced = channel.unary_stream(f"/{SERVICE}/paced", encode, decode_text)
        self.echo = channel.unary_unary(f"/{SERVICE}/echo", encode, decode_text)

    async def stream(self, streams: int, items: int, paced: bool) -> Command:
        method = self.paced if paced else self.tokens

        async def one() -> None:
            count = 0
            async for _ in method(items):
                count += 1
            assert count == items

        async def work() -> None:
            await asyncio.gather(*(one() for _ in range(streams)))

        return await measured(work)

    async def unary(self, in_flight: int, calls: int) -> Command:
        async def one() -> None:
            for _ in range(calls):
                await self.echo(TOKEN)

        async def work() -> None:
            await asyncio.gather(*(one() for _ in range(in_flight)))

        return await measured(work)


def client(address: str) -> None:
    asyncio.run(_client(address))


async def _client(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        load = Load(channel)
        commands = {"cpu": cpu, "stream": load.stream, "unary": load.unary}
        await answer_commands(read_line, commands, {})
