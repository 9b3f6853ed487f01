"""`serve_worker` and `serve_frontend` as commands: signals stop them, and losses of the log count."""

from __future__ import annotations

import logging
import os
import socket as stdlib_socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import trio

from trinamo.runtime.config.config import Config, config_notices
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.logs.fields import name_process
from trinamo.runtime.logs.setup import set_log_level
from trinamo.runtime.metrics.metrics import lag_measured, show_process
from trinamo.runtime.process.roles import (
    FrontendReady,
    WorkerReady,
    serve_frontend,
    serve_worker,
)
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import stopped_by_signals
from trinamo.runtime.view.looks import Place
from trinamo.runtime.weights.lender import WeightsMetrics
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.transports.assembly.planes import RealTransports

from ..running.frontends_file import find_neighbours
from .engine import choose_engine, open_engine, share_cores
from .output import show_losses
from .resources import NameLookups, memory_tended, settle_memory
from .weights import held_weights, take_missing_weights

_log = logging.getLogger("trinamo.cli")
T = TypeVar("T")


async def run_worker(
    config: Config, *, ready: Callable[[WorkerReady], None], is_supervised: bool = False
) -> None:
    """Serve one model, or several, until SIGINT or SIGTERM, then leave in order.

    Raises `ConfigError` or `ConnectError`, with a sentence saying what to do, if it cannot start.
    """
    trio.socket.set_custom_hostname_resolver(NameLookups())
    for notice in config_notices(config):
        _log.warning("%s", notice)
    env, transports = RealEnv(), RealTransports()
    metrics = WorkerMetrics(env)
    show_losses(metrics)
    show_process(metrics, "worker")
    counted = WeightsMetrics(metrics)
    async with (
        stopped_by_signals(is_supervised=is_supervised) as stop,
        lag_measured(metrics),
        memory_tended(),
        AsyncExitStack() as opened,
    ):
        await take_missing_weights(config, env, transports, counted)
        sections = config.worker.by_model()
        choices = [choose_engine(each).engine for each in sections]
        threads, why = share_cores(config.worker.threads, choices)
        if "llamacpp" in choices:
            _log.info("a step of llamacpp has %s", why)
        engines = [
            await opened.enter_async_context(open_engine(section, engine, threads=threads))
            for section, engine in zip(sections, choices, strict=True)
        ]
        models = ", ".join(each.info.model for each in engines)

        def told(runtime: Runtime) -> None:
            name_process(instance_id=runtime.instance_id or "", model=models)
            runtime.live.listen(_tune_log)

        await serve_worker(
            config,
            env,
            transports,
            engines,
            stop,
            ready=_settled(ready, maps_bodies=False),
            opened=told,
            metrics=metrics,
            metadata={"pid": str(os.getpid()), "host": _host_name()},
            weights=held_weights(list(zip(sections, engines, strict=True)), counted),
        )


async def run_frontend(
    config: Config,
    *,
    ready: Callable[[FrontendReady], None],
    name: str = "",
    is_supervised: bool = False,
) -> None:
    """Serve HTTP until SIGINT or SIGTERM, then refuse new work, finish, and leave.

    `name` is what it is called among several that share a port: its log and metrics say it. Raises
    `ConfigError` or `ConnectError`, with a sentence saying what to do, if it cannot start.
    """
    trio.socket.set_custom_hostname_resolver(NameLookups())
    for notice in config_notices(config, moves_blocks=False):
        _log.warning("%s", notice)
    env = RealEnv()
    metrics = FrontendMetrics(env)
    show_losses(metrics)
    show_process(metrics, "frontend")
    if name:
        name_process(process=name)
        # A scrape of a shared port must say whose numbers these are.
        info = metrics.counts("process_info", "Whose page this is", "process", "pid", may_fall=True)
        info.tally(name, str(os.getpid())).value = 1
    stopped = stopped_by_signals(is_supervised=is_supervised)
    async with stopped as stop, lag_measured(metrics), memory_tended():
        await serve_frontend(
            config,
            env,
            RealTransports(),
            stop,
            ready=_settled(ready, maps_bodies=True),
            opened=lambda runtime, _: runtime.live.listen(_tune_log),
            metrics=metrics,
            place=Place(
                name or "frontend", os.getpid(), partial(find_neighbours, config), _host_name()
            ),
        )


def _host_name() -> str:
    """This machine's, as people call it."""
    return stdlib_socket.gethostname()[:64]


def _tune_log(found: Config) -> None:
    set_log_level(found.log.level, found.log.access)


def _settled(ready: Callable[[T], None], *, maps_bodies: bool) -> Callable[[T], None]:
    """`ready`, before which the process is told that its start is over."""

    def told(of_what: T) -> None:
        settle_memory(maps_bodies=maps_bodies)
        ready(of_what)

    return told
