"""What the processes of a simulated cluster run: the real worker and frontend, on a host each.

The same steps as the command line's roles, without its signals: `told` stands for SIGTERM. The
engine is watched from outside, so that no line of the runtime knows it is being checked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context, State
from trinamo.runtime.engines import GenerationEngine
from trinamo.runtime.engines.mocker.engine import MockerOptions, open_mocker_engine
from trinamo.runtime.errors import EngineError, TrinamoError
from trinamo.runtime.http.models.discovery import watch_models
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.http.streaming import OnDisconnect
from trinamo.runtime.metrics.metrics import FrontendMetrics, Metrics
from trinamo.runtime.metrics.worker import WorkerMetrics
from trinamo.runtime.process.runtime import Runtime, open_runtime
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    GenerateRequest,
    ModelCard,
    bounded_request_type,
    payload_bytes_max_for,
)

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
    told: trio.Event = attrs.Factory(trio.Event)
    """Set to ask for an orderly end, as SIGTERM does."""
    ready: trio.Event = attrs.Factory(trio.Event)
    runtime: Runtime | None = None
    service: HttpService | None = None
    engine: GenerationEngine | None = None
    metrics: Metrics | None = None

    def note(self, kind: str, **fields: Any) -> None:
        self.env.note(kind, **fields)


def request_name(request: GenerateRequest) -> str:
    """The name a load gave its request: the first word of the prompt."""
    text = request.messages[-1].content if request.messages else request.prompt or ""
    return text.split(" ", 1)[0]


class WatchedEngine:
    """An engine whose every token, and every end, is noted."""

    def __init__(self, process: Process, engine: GenerationEngine) -> None:
        self._process, self._engine = process, engine
        self.info = engine.info

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        """As the engine's, with notes, and with the failure a prompt asks for."""
        note, name, attempt = self._process.note, request_name(request), context.id
        raise_after = _raise_after(request)
        index, outcome = 0, "cancelled"

        def on_change(state: State) -> None:
            kind = "engine.killed" if state is State.KILLED else "engine.stopped"
            note(kind, request=name, attempt=attempt, reason=str(context.reason))

        note("engine.begin", request=name, attempt=attempt)
        context.on_change(on_change)
        try:
            if raise_after == 0:
                raise EngineError("the engine was asked to fail before its first token")
            async with aclosing(self._engine.generate(request, context)) as deltas:
                async for delta in deltas:
                    for token_id in delta.token_ids:
                        note(
                            "engine.token",
                            request=name,
                            attempt=attempt,
                            index=index,
                            token=token_id,
                        )
                        index += 1
                    yield delta
                    if raise_after is not None and index >= raise_after:
                        raise EngineError(f"the engine was asked to fail after {index} tokens")
            outcome = "complete"
        except TrinamoError as error:
            outcome = error.code
            raise
        finally:
            context.off_change(on_change)
            note("engine.end", request=name, attempt=attempt, outcome=outcome, tokens=index)


def _raise_after(request: GenerateRequest) -> int | None:
    text = request.messages[-1].content if request.messages else request.prompt or ""
    for word in text.split(" "):
        if word.startswith(RAISE_WORD):
            return int(word.removeprefix(RAISE_WORD))
    return None


async def run_worker(process: Process, config: Config, options: MockerOptions) -> None:
    """Serve the model until told to end, then leave in order."""
    env, section = process.env, config.worker
    metrics = process.metrics = WorkerMetrics(env)
    endpoint = EndpointName(section.namespace, section.component, section.endpoint)
    async with (
        _mocker(env, options) as engine,
        open_runtime(config, env, process.transports, serving=True, metrics=metrics) as runtime,
    ):
        process.engine, process.runtime = engine, runtime
        watched = WatchedEngine(process, engine)
        assert runtime.instance_id is not None
        process.note("worker.serve", instance=runtime.instance_id)
        context_tokens_max = engine.info.context_tokens_max
        await runtime.serve(
            endpoint,
            watched.generate,
            request_type=bounded_request_type(context_tokens_max),
            payload_bytes_max=payload_bytes_max_for(context_tokens_max),
            engine=engine,
        )
        card = ModelCard(name=MODEL, endpoint=str(endpoint), engine="mocker")
        await runtime.publish(model_key(card.name, runtime.instance_id), encode_card(card))
        process.ready.set()
        process.note("worker.ready", instance=runtime.instance_id)
        await process.told.wait()
        process.note("worker.told")
    process.note("worker.left")


def _mocker(env: SimEnv, options: MockerOptions) -> AbstractAsyncContextManager[GenerationEngine]:
    # A scenario with few blocks is about their reuse, and has short prompts.
    context_max = min(CONTEXT_TOKENS_MAX, options.num_gpu_blocks * options.block_size)
    return open_mocker_engine(options, model=MODEL, env=env, context_tokens_max=context_max)


async def run_frontend(process: Process, config: Config) -> None:
    """Serve HTTP until told to end, then drain."""
    env = process.env
    metrics = process.metrics = FrontendMetrics(env)
    async with (
        open_runtime(config, env, process.transports, metrics=metrics) as runtime,
        trio.open_nursery() as watching,
    ):
        process.runtime = runtime
        service = process.service = _http_service(config, env, metrics)
        await watching.start(watch_models, runtime.control, runtime, service.model_manager())
        async with trio.open_nursery() as serving:
            await serving.start(service.run)
            process.ready.set()
            process.note("frontend.ready")
            await process.told.wait()
            process.note("frontend.told")
            service.stop()
        watching.cancel_scope.cancel()
    process.note("frontend.left")


def _http_service(config: Config, env: SimEnv, metrics: FrontendMetrics) -> HttpService:
    settings: dict[str, Any] = {
        name: getattr(config.http, name) for name in config.http.__struct_fields__
    }
    settings |= {
        "on_disconnect": OnDisconnect(config.http.on_disconnect),
        "host": "0.0.0.0",  # noqa: S104 -- simulated
        "port": HTTP_PORT,
    }
    return HttpService.builder().env(env).metrics(metrics).config(**settings).build()


@asynccontextmanager
async def run_caller(process: Process, config: Config) -> AsyncIterator[Runtime]:
    """A process that calls workers through the runtime, without HTTP."""
    metrics = process.metrics = FrontendMetrics(process.env)
    async with open_runtime(config, process.env, process.transports, metrics=metrics) as runtime:
        process.runtime = runtime
        process.ready.set()
        process.note("caller.ready")
        yield runtime
