"""trinamo's worker and client: `Worker` and `Client` over the tcp planes, discovery by hand."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from commands import (
    IDLE_STEP_S,
    PHASE_S,
    STEP_S,
    TOKEN,
    Command,
    answer_commands,
    cpu,
    measured,
)
from step_loop import open_loop

from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.router import Router
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.planes import Entry, Snapshot
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.openai.generate import Delta
from trinamo.runtime.sinks import Sink
from trinamo.runtime.worker.endpoint import Endpoint
from trinamo.runtime.worker.worker import Worker
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.tcp import (
    TcpOptions,
    open_client,
    open_request_plane,
    open_request_server,
    open_stream_server,
)

PUSHED_LOADS = ("pushed", "loop", "loop20")
NAMES = ("tokens", "paced", "phased", "pushed", "loop", "loop20", "echo", "hold")
ENDPOINTS = [EndpointName("bench", "engine", name) for name in NAMES]
TOKENS, PACED, PHASED, PUSHED, LOOP, LOOP_20, ECHO, HOLD = ENDPOINTS


async def read_line() -> str:
    return await trio.to_thread.run_sync(sys.stdin.readline)


# --- worker --------------------------------------------------------------------------------------


class Engine:
    """The handlers: tokens at once or by the step, an echo, and a prefill that never ends."""

    def __init__(self) -> None:
        self.step = trio.Event()
        self.paced_count = 0
        self.sinks: dict[Sink[str], tuple[int, trio.Event]] = {}
        self.turns: deque[trio.Event] = deque()
        self.cancelled_at: dict[int, float] = {}

    async def run(self) -> None:
        while True:
            await trio.sleep(STEP_S if self.paced_count or self.sinks else IDLE_STEP_S)
            self.step.set()
            self.step = trio.Event()
            for sink, (left, ended) in list(self.sinks.items()):
                sink.take([TOKEN])
                self.sinks[sink] = (left - 1, ended)
                if left == 1:
                    del self.sinks[sink]
                    ended.set()

    async def run_phases(self) -> None:
        """One stream after the other gets an item, one of them per `PHASE_S`."""
        while True:
            await trio.sleep(PHASE_S if self.turns else IDLE_STEP_S)
            if self.turns:
                self.turns.popleft().set()

    async def tokens(self, count: int, _: Context) -> AsyncGenerator[str, None]:
        for _number in range(count):
            yield TOKEN

    async def paced(self, count: int, _: Context) -> AsyncGenerator[str, None]:
        self.paced_count += 1
        try:
            for _number in range(count):
                await self.step.wait()
                yield TOKEN
        finally:
            self.paced_count -= 1

    async def pushed(self, count: int, _: Context, sink: Sink[str]) -> None:
        sink.on_room(lambda: None)
        ended = trio.Event()
        self.sinks[sink] = (count, ended)
        try:
            await ended.wait()
        finally:
            self.sinks.pop(sink, None)

    async def phased(self, count: int, _: Context) -> AsyncGenerator[str, None]:
        for _number in range(count):
            turn = trio.Event()
            self.turns.append(turn)
            await turn.wait()
            yield TOKEN

    async def echo(self, text: str, _: Context) -> str:
        return text

    async def hold(self, number: int, _: Context) -> AsyncGenerator[str, None]:
        try:
            yield TOKEN
            await trio.sleep_forever()
        finally:
            self.cancelled_at[number] = time.perf_counter()

    async def cancellations(self) -> Command:
        taken, self.cancelled_at = self.cancelled_at, {}
        return {"at": {str(number): at for number, at in taken.items()}}


def tcp_options() -> TcpOptions:
    """As they come, sealed where a secret is given."""
    return TcpOptions(secret=os.environ.get("BENCH_SECRET", "").encode())


def worker() -> None:
    trio.run(_worker)


async def _worker() -> None:
    options, env, engine = tcp_options(), RealEnv(), Engine()
    async with (
        open_request_server(options, env, instance_id="1") as server,
        open_loop() as loop,
        open_loop(0.02) as loop_20,
        open_client(options, env) as client,
        trio.open_nursery() as nursery,
    ):
        serving = Worker(client, env, instance_id="1", requests_max=4096)
        serving.add(Endpoint(TOKENS, stream=engine.tokens, request_type=int))
        serving.add(Endpoint(PACED, stream=engine.paced, request_type=int))
        serving.add(Endpoint(PHASED, stream=engine.phased, request_type=int))
        serving.add(Endpoint(PUSHED, push=engine.pushed, request_type=int))
        serving.add(Endpoint(LOOP, push=loop, request_type=int))
        serving.add(Endpoint(LOOP_20, push=loop_20, request_type=int))
        serving.add(Endpoint(HOLD, stream=engine.hold, request_type=int))
        serving.add(Endpoint(ECHO, unary=engine.echo, request_type=str))
        await nursery.start(serving.run)
        await nursery.start(server.serve, serving)
        nursery.start_soon(engine.run)
        nursery.start_soon(engine.run_phases)
        commands = {"cpu": cpu, "cancellations": engine.cancellations}
        await answer_commands(read_line, commands, {"address": server.address})
        nursery.cancel_scope.cancel()


# --- client --------------------------------------------------------------------------------------


@asynccontextmanager
async def open_clients(address: str) -> AsyncIterator[dict[str, Client]]:
    options, env = tcp_options(), RealEnv()

    async with (
        open_stream_server(options, env) as home,
        open_request_plane(options, env, home) as plane,
    ):

        def client(endpoint: EndpointName) -> Client:
            router = Router(MemoryControlPlane(), endpoint, env, request_planes={"tcp": plane})
            instance = Instance(endpoint=str(endpoint), id="1", transports={"tcp": address})
            router.apply(Snapshot(1, [Entry(instance.key, encode_instance(instance), 1, 1)]))
            return Client(router, home, env)

        yield {each.endpoint: client(each) for each in ENDPOINTS}


class Counter(Sink[Any]):
    """Takes whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def take(self, items: list[Any]) -> bool:
        self.count += len(items)
        return True


class Load:
    """What the client process is told to do."""

    def __init__(self, clients: dict[str, Client], nursery: trio.Nursery) -> None:
        self.clients = clients
        self.nursery = nursery
        self.lost_at: dict[str, float] = {}

    async def stream(self, load: str, streams: int, items: int) -> Command:
        client = self.clients[load]

        item_type = Delta if load.startswith("loop") else str

        async def one() -> None:
            count = 0
            async with client.stream(items, item_type) as stream:
                if load in PUSHED_LOADS:
                    counter = Counter()
                    await stream.forward(counter)
                    count = counter.count
                else:
                    async for _ in stream:
                        count += 1
            assert count == items

        async def work() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(streams):
                    nursery.start_soon(one)

        return await measured(work)

    async def requests(self, in_flight: int, calls: int) -> Command:
        """Streams of one item, so many at once, one after the other."""
        client = self.clients["tokens"]

        async def one() -> None:
            for _ in range(calls):
                async with client.stream(1, str) as stream:
                    async for _ in stream:
                        pass

        async def work() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(in_flight):
                    nursery.start_soon(one)

        return await measured(work)

    async def unary(self, in_flight: int, calls: int) -> Command:
        client = self.clients["echo"]

        async def one() -> None:
            for _ in range(calls):
                await client.call(TOKEN, str)

        async def work() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(in_flight):
                    nursery.start_soon(one)

        return await measured(work)

    async def hold(self, count: int) -> Command:
        """Open streams that stay; what ends them is for `losses`."""
        opened = 0
        is_open = trio.Event()

        async def one(number: int) -> None:
            nonlocal opened
            try:
                async with self.clients["hold"].stream(number, str) as stream:
                    await anext(stream)
                    opened += 1
                    if opened == count:
                        is_open.set()
                    await anext(stream)
            except DisconnectedError:
                self.lost_at[str(number)] = time.perf_counter()

        for number in range(count):
            self.nursery.start_soon(one, number)
        await is_open.wait()
        return {}

    async def losses(self) -> Command:
        taken, self.lost_at = self.lost_at, {}
        return {"at": taken}

    async def kills(self, count: int, busy_streams: int) -> Command:
        at: dict[str, float] = {}
        async with trio.open_nursery() as nursery:
            for _ in range(busy_streams):
                nursery.start_soon(self._keep_busy)
            for number in range(count):
                async with self.clients["hold"].stream(number, str) as stream:
                    await anext(stream)
                    await trio.sleep(0.005)
                    at[str(number)] = time.perf_counter()
            await trio.sleep(0.2)
            nursery.cancel_scope.cancel()
        return {"at": at}

    async def _keep_busy(self) -> None:
        async with self.clients["paced"].stream(10**9, str) as stream:
            async for _ in stream:
                pass


def client(address: str) -> None:
    logging.getLogger("trinamo").setLevel(logging.ERROR)  # Lost streams are what is measured.
    trio.run(_client, address)


async def _client(address: str) -> None:
    async with open_clients(address) as clients, trio.open_nursery() as nursery:
        load = Load(clients, nursery)
        commands = {
            "cpu": cpu,
            "stream": load.stream,
            "requests": load.requests,
            "unary": load.unary,
            "hold": load.hold,
            "losses": load.losses,
            "kills": load.kills,
        }
        await answer_commands(read_line, commands, {})
        nursery.cancel_scope.cancel()
