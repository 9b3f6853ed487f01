"""The peer: Dynamo's worker and client in Python over its Rust runtime, found through files.

Run by the interpreter of `peers.py`, which is not trinamo's: nothing of trinamo is imported. The
frontend is Dynamo's own, `python -m dynamo.frontend`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from asyncio_engines import HttpEngine, RpcEngine
from commands import TOKEN, Command, answer_commands, cpu, measured
from dynamo.llm import (  # pyright: ignore[reportMissingImports]
    ModelInput,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import (  # pyright: ignore[reportMissingImports]
    Context,
    DistributedRuntime,
)
from http_roles import CHUNK

LOADS = ("tokens", "paced", "phased", "echo")


async def read_line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def open_runtime() -> DistributedRuntime:
    return DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")


def worker() -> None:
    asyncio.run(_worker())


async def _worker() -> None:
    runtime, engine = open_runtime(), RpcEngine()
    loads = {"tokens": engine.tokens, "paced": engine.paced, "phased": engine.phased}

    async def echo(text: str, context: Context) -> AsyncIterator[str]:
        yield text

    serving = [
        asyncio.ensure_future(runtime.endpoint(f"bench.engine.{name}").serve_endpoint(handler))
        for name, handler in {**loads, "echo": echo}.items()
    ]
    ticking = [asyncio.create_task(each()) for each in (engine.run, engine.run_phases)]
    await answer_commands(read_line, {"cpu": cpu}, {"address": "files"})
    for task in ticking + serving:
        task.cancel()
    runtime.shutdown()


class Load:
    """What the client process is told to do."""

    def __init__(self, clients: dict) -> None:
        self.clients = clients

    async def stream(self, load: str, streams: int, items: int) -> Command:
        client = self.clients[load]

        async def one() -> None:
            count = 0
            async for _ in await client.round_robin(items, annotated=False):
                count += 1
            assert count == items, (count, items)

        async def work() -> None:
            await asyncio.gather(*(one() for _ in range(streams)))

        return await measured(work)

    async def requests(self, in_flight: int, calls: int) -> Command:
        """Streams of one item, so many at once, one after the other."""
        client = self.clients["tokens"]

        async def one() -> None:
            for _ in range(calls):
                async for _item in await client.round_robin(1, annotated=False):
                    pass

        async def work() -> None:
            await asyncio.gather(*(one() for _ in range(in_flight)))

        return await measured(work)

    async def unary(self, in_flight: int, calls: int) -> Command:
        """Dynamo has no call without a stream, so this is one of one item, too."""
        client = self.clients["echo"]

        async def one() -> None:
            for _ in range(calls):
                async for _item in await client.round_robin(TOKEN, annotated=False):
                    pass

        async def work() -> None:
            await asyncio.gather(*(one() for _ in range(in_flight)))

        return await measured(work)


def client(_address: str) -> None:
    asyncio.run(_client())


async def _client() -> None:
    runtime = open_runtime()
    clients = {}
    for name in LOADS:
        clients[name] = await runtime.endpoint(f"bench.engine.{name}").client()
        await clients[name].wait_for_instances()
    load = Load(clients)
    commands = {"cpu": cpu, "stream": load.stream, "unary": load.unary, "requests": load.requests}
    await answer_commands(read_line, commands, {})
    runtime.shutdown()


def http_worker() -> None:
    """Serves the model `bench` to Dynamo's frontend; it makes the chunks, which is the cheapest way."""
    asyncio.run(_http_worker())


async def _http_worker() -> None:
    endpoint = open_runtime().endpoint("bench.engine.generate")
    steps = HttpEngine()
    running = asyncio.create_task(steps.run())
    last = {**CHUNK, "choices": [{**CHUNK["choices"][0], "finish_reason": "length"}]}

    async def generate(asked: dict, context: Context) -> AsyncIterator[dict]:
        end = asked["max_tokens"] - 1
        async for number in steps.tokens(asked):
            yield CHUNK if number < end else last

    await register_model(
        ModelInput.Text,
        ModelType.Chat,
        endpoint,
        "bench",
        "bench",
        worker_type=WorkerType.Aggregated,
        skip_model_assets=True,
    )
    await endpoint.serve_endpoint(generate)
    running.cancel()
