"""What the processes of a simulated cluster run: the roles of `runtime.process.roles`, on a host each.

They are opened on simulated transports, and `Process.leave` stands for SIGTERM. The engine is
watched from outside, so that no line of the runtime knows it is being checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context, State
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.engines.mocker.engine import MockerOptions, open_mocker_engine
from trinamo.runtime.errors import EngineError, TrinamoError
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.metrics.metrics import FrontendMetrics, Metrics
from trinamo.runtime.metrics.worker import WorkerMetrics
from trinamo.runtime.process.opening import open_runtime
from trinamo.runtime.process.roles import serve_frontend, serve_worker
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import StopRequest
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.sinks import Sink

from ..core.env import SimEnv

if TYPE_CHECKING:
    from .planes import SimTransports

__all__ = [
    "HTTP_PORT",
    "MODEL",
    "Process",
    "request_name",
    "run_caller",
    "run_frontend",
    "run_worker",
]

HTTP_PORT = 8000
MODEL = "mocker"
CONTEXT_TOKENS_MAX = 32_768
RAISE_WORD = "raise-after-"
"""A prompt with this word and a number makes the engine raise after so many tokens."""


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


def request_name(request: GenerateRequest) -> str:
    """The name a load gave its request: the first word of the prompt."""
    text = request.messages[-1].content if request.messages else request.prompt or ""
    return text.split(" ", 1)[0]


class WatchedEngine:
    """An engine whose every token, and every end, is noted."""

    def __init__(self, process: Process, engine: EngineHost) -> None:
        self._process, self._engine = process, engine
        self.info, self.kv = engine.info, engine.kv
        self.statistics, self.listen_blocks = engine.statistics, engine.listen_blocks
        # What an engine must have; the worker takes `forward`, and so nobody sees these deltas.
        self.generate = engine.generate

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        """As the engine's, with notes, and with the failure a prompt asks for."""
        note, name, attempt = self._process.note, request_name(request), context.id
        watched = _WatchedSink(self._process, request, context, sink)
        outcome = "cancelled"

        def on_change(state: State) -> None:
            kind = "engine.killed" if state is State.KILLED else "engine.stopped"
            note(kind, request=name, attempt=attempt, reason=str(context.reason))

        note("engine.begin", request=name, attempt=attempt)
        context.on_change(on_change)
        try:
            if watched.raise_after == 0:
                raise EngineError("the engine was asked to fail before its first token")
            await self._engine.forward(request, context, watched)
            outcome = "complete"
        except TrinamoError as error:
            outcome = error.code
            raise
        finally:
            context.off_change(on_change)
            count = watched.count
            note("engine.end", request=name, attempt=attempt, outcome=outcome, tokens=count)


class _WatchedSink(Sink[Delta]):
    """Notes the tokens of one answer on their way to another sink."""

    def __init__(
        self, process: Process, request: GenerateRequest, context: Context, sink: Sink[Delta]
    ) -> None:
        super().__init__()
        self._note, self._sink = process.note, sink
        self._name, self._attempt = request_name(request), context.id
        self.raise_after = _raise_after(request)
        self.count = 0

    def starts(self, resume: Callable[[], None]) -> None:
        self._sink.starts(resume)

    def take(self, items: list[Delta]) -> bool:
        for delta in items:
            for token in delta.token_ids:
                self._note(
                    "engine.token",
                    request=self._name,
                    attempt=self._attempt,
                    index=self.count,
                    token=token,
                )
                self.count += 1
        has_room = self._sink.take(items)
        if self.raise_after is not None and self.count >= self.raise_after:
            raise EngineError(f"the engine was asked to fail after {self.count} tokens")
        return has_room


def _raise_after(request: GenerateRequest) -> int | None:
    text = request.messages[-1].content if request.messages else request.prompt or ""
    for word in text.split(" "):
        if word.startswith(RAISE_WORD):
            return int(word.removeprefix(RAISE_WORD))
    return None


async def run_worker(process: Process, config: Config, options: MockerOptions) -> None:
    """Serve the model until asked to leave."""
    metrics = process.metrics = WorkerMetrics(process.env)
    # A scenario with few blocks is about their reuse, and has short prompts.
    context_max = min(CONTEXT_TOKENS_MAX, options.num_gpu_blocks * options.block_size)
    section = msgspec.structs.replace(config.worker, status_port=None)
    mocker = open_mocker_engine(
        options, model=MODEL, env=process.env, context_tokens_max=context_max
    )

    def opened(runtime: Runtime) -> None:
        process.runtime = runtime

    with process.stop.everything:
        async with mocker as engine:
            process.engine = engine
            await serve_worker(
                msgspec.structs.replace(config, worker=section),
                process.env,
                process.transports,
                WatchedEngine(process, engine),
                process.stop,
                ready=lambda _: process.ready.set(),
                opened=opened,
                metrics=metrics,
            )


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
