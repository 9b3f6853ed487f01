"""An engine that fails when it is told to, and its loop, for tests."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import trio
import trio.testing

from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import Dims, ExactEngine
from trinamo.runtime.engines.loop.host import EngineHost, open_engine_host
from trinamo.runtime.engines.loop.step import StepItem
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.sinks import Sink

Step = Callable[[Sequence[StepItem]], list[int | None]]


CONTEXT_TOKENS = 128
BLOCKS = 64
SMALL = Dims(layers=1, width=16, hidden=16, heads=2, kv_heads=1)


class Panic(BaseException):
    """As libraries in Rust raise it: no `Exception`."""


class FaultyEngine(ExactEngine):
    """An exact engine whose next steps can be made to fail."""

    failure: BaseException | None = None
    recovery_failure: BaseException | None = None
    release_failure: BaseException | None = None
    text_failure: BaseException | None = None
    lost_tokens = 0
    recoveries = 0
    is_closed = False

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        if self.failure is not None:
            raise self.failure
        return super().step(items)[self.lost_tokens :]

    def release(self, slot: int) -> None:
        if self.release_failure is not None:
            raise self.release_failure

    def token_bytes(self, token_id: int) -> bytes:
        if self.text_failure is not None:
            raise self.text_failure
        return super().token_bytes(token_id)

    def recover(self) -> None:
        if self.recovery_failure is not None:
            raise self.recovery_failure
        self.recoveries += 1
        self.failure = self.release_failure = None
        self.lost_tokens = 0

    def close(self) -> None:
        self.is_closed = True


class Gate:
    """A hop that lets a step happen only when the test says so."""

    def __init__(self) -> None:
        self.permits = trio.Semaphore(0)
        self.inside = 0

    async def hop(self, step: Step, items: Sequence[StepItem]) -> list[int | None]:
        self.inside += 1
        await self.permits.acquire()
        self.inside -= 1
        return step(items)

    async def let_steps_happen(self, count: int) -> None:
        for _ in range(count):
            self.permits.release()
            await trio.testing.wait_all_tasks_blocked()


async def inline_hop(step: Step, items: Sequence[StepItem]) -> list[int | None]:
    await trio.lowlevel.checkpoint()
    return step(items)


def make_engine(blocks: int = BLOCKS) -> FaultyEngine:
    return FaultyEngine(
        dims=SMALL, context_tokens_max=CONTEXT_TOKENS, block_tokens=4, block_count=blocks
    )


def open_host(
    engine: FaultyEngine | None = None, **options: Any
) -> AbstractAsyncContextManager[EngineHost]:
    options.setdefault("hop", inline_hop)
    return open_engine_host(engine or make_engine(), **options)


@asynccontextmanager
async def gated_host(**options: Any) -> AsyncIterator[tuple[EngineHost, Gate]]:
    gate = Gate()
    async with open_host(hop=gate.hop, **options) as host:
        yield host, gate


def request(prompt: str = "hello", max_tokens: int | None = 8, **fields: Any) -> GenerateRequest:
    fields.setdefault("temperature", 0)
    return GenerateRequest(model="exact", prompt=prompt, max_tokens=max_tokens, **fields)


class Gathering(Sink[Delta]):
    """A sink that keeps what it takes; full at `room` deltas, it says so."""

    def __init__(self, room: float = math.inf) -> None:
        super().__init__()
        self.deltas: list[Delta] = []
        self.room = room
        self.ends_after: list[int] = []
        """How many deltas there were each time that the end was told."""

    def take(self, items: list[Delta]) -> bool:
        self.deltas += items
        return len(self.deltas) < self.room

    def end(self) -> None:
        self.ends_after.append(len(self.deltas))


async def pull(host: EngineHost, asked: GenerateRequest, context: Context) -> list[Delta]:
    async with aclosing(host.generate(asked, context)) as deltas:
        return [delta async for delta in deltas]


async def push(host: EngineHost, asked: GenerateRequest, context: Context) -> list[Delta]:
    sink = Gathering()
    await host.forward(asked, context, sink)
    return sink.deltas


Way = Callable[[EngineHost, GenerateRequest, Context], Awaitable[list[Delta]]]
way: Way = pull
"""How `collect` asks: the fixture `each_way` has tests run with both."""


async def collect(
    host: EngineHost, asked: GenerateRequest, context: Context | None = None
) -> list[Delta]:
    return await way(host, asked, context or Context("r"))


def token_ids(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def settle(host: EngineHost) -> None:
    """Wait until the loop has nothing to do, and check that nothing is held."""
    await trio.testing.wait_all_tasks_blocked()
    found = host.statistics()
    assert (found.running, found.waiting, found.paused, found.blocks_used) == (0, 0, 0, 0)
    assert found.blocks_free == host.info.block_count
