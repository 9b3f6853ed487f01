"""The peer: grpcio's asyncio API with generic bytes handlers, the leanest way to use it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
from asyncio_engines import RpcEngine
from commands import (
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


def worker() -> None:
    asyncio.run(_worker())


async def _worker() -> None:
    engine = RpcEngine()

    def streaming(method: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(method, decode_any, encode)

    handlers = {
        "tokens": streaming(engine.tokens),
        "paced": streaming(engine.paced),
        "phased": streaming(engine.phased),
        "echo": grpc.unary_unary_rpc_method_handler(engine.echo, decode_any, encode),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ticking = [asyncio.create_task(each()) for each in (engine.run, engine.run_phases)]
    await answer_commands(read_line, {"cpu": cpu}, {"address": f"127.0.0.1:{port}"})
    for task in ticking:
        task.cancel()
    await server.stop(None)


class Load:
    """What the client process is told to do."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.loads = {
            load: channel.unary_stream(f"/{SERVICE}/{load}", encode, decode_text)
            for load in ("tokens", "paced", "phased")
        }
        self.echo = channel.unary_unary(f"/{SERVICE}/echo", encode, decode_text)

    async def stream(self, load: str, streams: int, items: int) -> Command:
        method = self.loads[load]

        async def one() -> None:
            count = 0
            async for _ in method(items):
                count += 1
            assert count == items

        async def work() -> None:
            await asyncio.gather(*(one() for _ in range(streams)))

        return await measured(work)

    async def requests(self, in_flight: int, calls: int) -> Command:
        """Streams of one item, so many at once, one after the other."""
        method = self.loads["tokens"]

        async def one() -> None:
            for _ in range(calls):
                async for _item in method(1):
                    pass

        async def work() -> None:
            await asyncio.gather(*(one() for _ in range(in_flight)))

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
        commands = {
            "cpu": cpu,
            "stream": load.stream,
            "unary": load.unary,
            "requests": load.requests,
        }
        await answer_commands(read_line, commands, {})
