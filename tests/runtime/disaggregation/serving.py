"""Decode and prefill workers in one process, as they are served: memory planes, real TCP, `exact`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import trio

from tests.runtime.disaggregation.own_memory import OwnMemory
from tests.runtime.one_process import OneProcess, config, open_process
from trinamo.runtime.caller.client import Client
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import Dims, ExactEngine
from trinamo.runtime.engines.loop.host import EngineHost, open_engine_host
from trinamo.runtime.engines.loop.step import StepEngine, StepItem
from trinamo.runtime.env import RealEnv
from trinamo.runtime.kv.memory import KvLayout
from trinamo.runtime.process.roles import serve_worker
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import StopRequest
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.worker.metrics import WorkerMetrics

MODES = ("decode_first", "prefill_first")
MODEL = EndpointName("trinamo", "backend", "generate")
SMALL = Dims(layers=1, width=16, hidden=16, heads=2, kv_heads=1)
BLOCK_TOKENS = 4
CHUNK_TOKENS = 32
SETTINGS: dict[str, Any] = {
    "disaggregation__mode": "decode_first",
    "disaggregation__prefill_tokens_local_max": 32,
    "disaggregation__queue_timeout_s": 60.0,
    "worker__status_port": None,
    "data_plane__transfer__quarantine_after_s": 1.0,
}


def make_engine(layout: KvLayout = KvLayout.BLOCK_FIRST) -> ExactEngine:
    return ExactEngine(
        dims=SMALL,
        context_tokens_max=1024,
        block_tokens=BLOCK_TOKENS,
        block_count=512,
        layout=layout,
    )


def make_engine_of_own_memory() -> OwnMemory:
    return OwnMemory(make_engine(KvLayout.PER_LAYER))


class Steps:
    """A hop that lets as many steps happen as the test allows: all, until it says otherwise."""

    def __init__(self) -> None:
        self.allowed = math.inf
        self.count = 0
        self.is_inside = False
        self._changed = trio.Event()

    def allow(self, count: float) -> None:
        self.allowed = count
        self._changed.set()
        self._changed = trio.Event()

    async def hop(
        self, step: Callable[[Sequence[StepItem]], list[int | None]], items: Sequence[StepItem]
    ) -> list[int | None]:
        self.is_inside = True
        await trio.lowlevel.checkpoint()
        while self.allowed < 1:
            await self._changed.wait()
        self.allowed -= 1
        self.count += 1
        self.is_inside = False
        return step(items)


@attrs.define(eq=False)
class Served:
    """One worker: what it runs, and what it counts."""

    role: str
    engine: EngineHost
    steps: Steps
    metrics: WorkerMetrics
    stop: StopRequest = attrs.field(factory=StopRequest)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    runtime: Runtime | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)

    @property
    def free_blocks(self) -> int:
        assert self.engine.kv is not None
        return self.engine.kv.pool.free_count

    @property
    def prompt_tokens(self) -> int:
        """Computed in prefill, by this engine."""
        return self.engine.statistics().prompt_tokens

    def kill(self) -> None:
        """End all its tasks where they are."""
        self.scope.cancel()

    def prefills(self, where: str, reason: str, mode: str) -> float:
        """Requests of a decode worker, by where their prompt was computed and why."""
        return self.metrics.value("prefills_total", mode=mode, where=where, reason=reason)

    def jobs(self, outcome: str, mode: str) -> float:
        """Prompts that a prefill worker was asked for."""
        return self.metrics.value("prefill_jobs_total", mode=mode, outcome=outcome)


@attrs.define(eq=False)
class Workers:
    """Those of one test, and a client of the model."""

    transports: OneProcess
    nursery: trio.Nursery
    client: Client
    all: list[Served]

    def of(self, role: str) -> Served:
        return next(each for each in self.all if each.role == role)

    async def wait_blocks_free(self) -> None:
        """Every block of every worker that lives is free again."""
        living = [each for each in self.all if not each.ended.is_set()]
        with trio.fail_after(120):
            while any(each.free_blocks != each.engine.info.block_count for each in living):
                await trio.sleep(0.005)

    async def ask(self, request: GenerateRequest, context: Context | None = None) -> list[Delta]:
        async with self.client.stream(request, Delta, context=context) as stream:
            return [delta async for delta in stream]


async def _serve(
    served: Served, transports: OneProcess, overrides: dict[str, Any], ready: trio.Event
) -> None:
    def opened(runtime: Runtime) -> None:
        served.runtime = runtime

    section = config(**{**SETTINGS, **overrides, "worker__role": served.role})
    with served.scope:
        await serve_worker(
            section,
            RealEnv(),
            transports,
            served.engine,
            served.stop,
            ready=lambda _: ready.set(),
            opened=opened,
            metrics=served.metrics,
        )
    served.ended.set()


@asynccontextmanager
async def open_workers(
    *roles: str,
    running_max: int = 32,
    make: Callable[[], StepEngine] = make_engine,
    **overrides: Any,
) -> AsyncIterator[Workers]:
    """Workers with these roles, and a caller; `overrides` are of the configuration."""
    transports = OneProcess()
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        caller = await stack.enter_async_context(open_process(transports))
        served = []
        for role in roles:
            steps = Steps()
            host = await stack.enter_async_context(
                open_engine_host(
                    make(),
                    hop=steps.hop,
                    running_max=running_max,
                    chunk_tokens_max=CHUNK_TOKENS,
                )
            )
            served.append(Served(role, host, steps, WorkerMetrics(RealEnv())))
        for each in served:
            ready = trio.Event()
            nursery.start_soon(_serve, each, transports, overrides, ready)
            with trio.fail_after(120):
                await ready.wait()
        client = await caller.client(MODEL)
        await client.router.wait_instances(sum(role != "prefill" for role in roles))
        yield Workers(transports, nursery, client, served)


def prompt(length: int, *, offset: int = 0) -> GenerateRequest:
    """A request of so many tokens."""
    return GenerateRequest(
        model="exact",
        token_ids=[(7 * number + offset) % 256 for number in range(length)],
        max_tokens=12,
        temperature=1.0,
        seed=11,
    )


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def alone(request: GenerateRequest) -> list[int]:
    """The tokens of one engine that does all by itself."""
    async with open_engine_host(make_engine()) as host:
        return tokens([delta async for delta in host.generate(request, Context("alone"))])


async def until(is_true: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
    """Poll what no event of ours announces."""
    with trio.fail_after(timeout_s):
        while not is_true():
            await trio.sleep(0.002)
