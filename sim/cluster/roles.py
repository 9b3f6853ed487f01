"""What the processes of a simulated cluster run: the roles of `runtime.process.roles`, on a host each.

They are opened on simulated transports, and `Process.leave` stands for SIGTERM. What
workers do is watched from outside (`engines.py`, `exchanges.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.engines.mocker.engine import MockerOptions, open_mocker_engine
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.process.opening import open_runtime
from trinamo.runtime.process.roles import serve_frontend, serve_worker
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import StopRequest
from trinamo.runtime.worker.metrics import WorkerMetrics

from ..env import SimEnv
from .engines import WatchedEngine
from .exchanges import serve_exchanges

if TYPE_CHECKING:
    from .planes import SimTransports


HTTP_PORT = 8000
MODEL = "mocker"
CONTEXT_TOKENS_MAX = 32_768


@attrs.define(eq=False)
class Process:
    """One life of a host: what it holds, for the census and the checkers."""

    name: str
    env: SimEnv
    transports: SimTransports
    stop: StopRequest = attrs.Factory(StopRequest)
    ready: trio.Event = attrs.Factory(trio.Event)
    runtime: Runtime | None = None
    service: HttpService | None = None
    engine: EngineHost | None = None
    metrics: Metrics | None = None

    def leave(self) -> None:
        """Ask for an orderly end, as SIGTERM does; asked again it goes on leaving."""
        if not self.stop.is_requested:
            self.stop.request()

    def note(self, kind: str, **fields: Any) -> None:
        self.env.note(kind, **fields)


async def run_worker(
    process: Process,
    config: Config,
    options: MockerOptions,
    takes_input: bool,  # noqa: FBT001 -- what a host's process is started with
) -> None:
    """Serve the model, and with `takes_input` exchanges, until asked to leave."""
    metrics = process.metrics = WorkerMetrics(process.env)
    # A scenario with few blocks is about their reuse, and has short prompts.
    context_max = min(CONTEXT_TOKENS_MAX, options.num_gpu_blocks * options.block_size)
    section = msgspec.structs.replace(config.worker, status_port=None)
    mocker = open_mocker_engine(
        options, model=MODEL, env=process.env, context_tokens_max=context_max
    )

    with process.stop.everything:
        async with mocker as engine, open_nursery() as nursery:

            def opened(runtime: Runtime) -> None:
                process.runtime = runtime
                if takes_input:
                    nursery.start_soon(serve_exchanges, runtime, process.note)

            process.engine = engine
            if engine.kv is not None:
                process.transports.memory.audit(process.name, engine.kv, process.note)
            await serve_worker(
                msgspec.structs.replace(config, worker=section),
                process.env,
                process.transports,
                WatchedEngine(process.note, engine),
                process.stop,
                ready=lambda _: process.ready.set(),
                opened=opened,
                metrics=metrics,
            )
            nursery.cancel_scope.cancel()


async def run_frontend(process: Process, config: Config) -> None:
    """Serve HTTP until asked to leave, then drain."""
    metrics = process.metrics = FrontendMetrics(process.env)
    section = msgspec.structs.replace(config.http, host="0.0.0.0", port=HTTP_PORT)  # noqa: S104 -- simulated

    def opened(runtime: Runtime, service: HttpService) -> None:
        process.runtime, process.service = runtime, service

    with process.stop.everything:
        await serve_frontend(
            msgspec.structs.replace(config, http=section),
            process.env,
            process.transports,
            process.stop,
            ready=lambda _: process.ready.set(),
            opened=opened,
            metrics=metrics,
        )


@asynccontextmanager
async def run_caller(process: Process, config: Config) -> AsyncIterator[Runtime]:
    """A process that calls workers through the runtime, without HTTP."""
    metrics = process.metrics = FrontendMetrics(process.env)
    async with open_runtime(config, process.env, process.transports, metrics=metrics) as runtime:
        process.runtime = runtime
        process.ready.set()
        process.note("caller.ready")
        yield runtime
