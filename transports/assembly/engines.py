"""Roles with an engine or with HTTP, each as one call of a program or of a script: apart, for what comes with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, cast

import msgspec
import trio

from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.engines import GenerationEngine
from trinamo.runtime.engines.own.definition import EngineDefinition, defined
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.logs.setup import setup_log
from trinamo.runtime.metrics.metrics import lag_measured, show_process
from trinamo.runtime.process import roles
from trinamo.runtime.process.roles import FrontendReady, serve_engines
from trinamo.runtime.process.stopping import StopRequest

from .http import Http
from .planes import RealTransports
from .process import asked_to_stop


async def serve_worker(
    engine: GenerationEngine | Sequence[GenerationEngine],
    *,
    config: Config | None = None,
    ready: Callable[[roles.WorkerReady], object] = lambda _: None,
    stop: StopRequest | None = None,
) -> None:
    """Serve the model of `engine` to all frontends until it is asked to stop; then leave in order.

    As `trinamo worker` does: under the name of `worker.namespace`, `component` and `endpoint`, with
    a status port. Of several engines each has an endpoint of its own, called after its model. The engine stays open, and yours. `ready` is called once the model can be found.
    What asks to stop, and what is raised, is as for `serve_stream` and `open_runtime`.
    """
    async with asked_to_stop(stop) as asked:
        await roles.serve_worker(
            config or load_config(), RealEnv(), RealTransports(), engine, asked, ready=ready
        )


async def serve_frontend(
    *,
    config: Config | None = None,
    ready: Callable[[roles.FrontendReady], object] = lambda _: None,
    stop: StopRequest | None = None,
) -> None:
    """Serve the OpenAI HTTP API for all models that are found until it is asked to stop; then drain.

    As `trinamo frontend` does; `ready` is called with its URL once it answers. What asks to stop,
    and what is raised, is as for `serve_stream` and `open_runtime`.
    """
    async with asked_to_stop(stop) as asked:
        await roles.serve_frontend(
            config or load_config(), RealEnv(), RealTransports(), asked, ready=ready
        )


AnyEngine = EngineDefinition | GenerationEngine | Callable[..., Any]
"""What `trinamo.engine` has made, what it would take, or an engine that is open already."""


async def serve(
    engine: AnyEngine | Sequence[AnyEngine],
    *,
    port: int | None = None,
    host: str | None = None,
    config: Config | None = None,
    ready: Callable[[FrontendReady], object] | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Answer OpenAI's HTTP API with an engine, or with several, in this process alone.

    Neither etcd nor NATS is needed, and nothing but the HTTP port is opened: it serves until SIGINT
    or SIGTERM, lets answers in flight end, and closes the engines that it has opened. A second signal,
    and cancellation, end it at once.

    Args:
        engine: Made by `trinamo.engine`; or an open `GenerationEngine`, which stays yours.
        port: Instead of `http.port`, 8787 unless configured; 0: the system chooses.
        host: Instead of `http.host`, which is loopback unless configured.
        config: What `load_config` returned; None: the defaults and the environment.
        ready: Called with the URL once it answers; None: the URL is printed.
        stop: What asks it to end instead of signals.

    Raises:
        ConfigError: An engine cannot be opened, or the port is taken; the sentence says why.
    """
    config = config or load_config()
    changes = {name: it for name, it in (("port", port), ("host", host)) if it is not None}
    http = msgspec.structs.replace(config.http, **changes)
    config = msgspec.structs.replace(config, http=http)
    env = RealEnv()
    metrics = FrontendMetrics(env)
    show_process(metrics, "frontend")
    given = engine if isinstance(engine, Sequence) else (engine,)
    async with (
        asked_to_stop(stop) as asked,
        lag_measured(metrics),
        AsyncExitStack() as opened,
    ):
        engines = [await _opened(each, opened) for each in given]
        models = ", ".join(each.info.model for each in engines)
        tell = ready or partial(_tell, models)
        await serve_engines(config, env, engines, asked, http=Http(), ready=tell, metrics=metrics)


def run(
    engine: AnyEngine | Sequence[AnyEngine],
    *,
    port: int | None = None,
    host: str | None = None,
    config: Config | None = None,
) -> None:
    """`serve` for a script that does nothing else: it starts trio, and returns once all has ended.

    It logs to standard error as `trinamo frontend` does, a line for each request too, as `log` is configured;
    in a program that has set a handler of its own for all lines, it leaves logging alone.
    """
    config = config or load_config()
    if not logging.getLogger().handlers:
        setup_log(config.log)
    trio.run(partial(serve, engine, port=port, host=host, config=config))


async def _opened(engine: AnyEngine, stack: AsyncExitStack) -> GenerationEngine:
    if isinstance(engine, EngineDefinition) or not hasattr(engine, "generate"):
        return await stack.enter_async_context(defined(engine).open())
    return cast("GenerationEngine", engine)


def _tell(models: str, ready: FrontendReady) -> None:
    print(f"{models} is served: {ready.url}/v1", flush=True)  # noqa: T201 -- for who started a script
    if ready.dashboard_url:
        print(f"Its dashboard: {ready.dashboard_url}", flush=True)  # noqa: T201 -- likewise
