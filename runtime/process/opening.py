"""The nurseries that own it all, and the order in which they end.

`open_runtime` opens the planes, then one nursery per plane inside one cancel scope:

    one cancel scope for the process
    ├─ control plane   lease keeper, discovery watches
    ├─ event plane     subscriptions, publishers
    └─ data plane      request listeners, handlers

A process with KV memory also opens its transfers (`kv/transfer/engine.py`); they end after the
handlers, whose blocks they move.

Leaving the `async with` normally shuts down in order, every step bounded by `config.shutdown` and
visible in the log (`runtime.py`). Cancelling it instead ends everything at once; what the control
plane still holds then dies with the lease.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import trio

from ..config.config import CLOSE_TIMEOUT_S, Config
from ..env import Env, draw_id
from ..http.metrics import FrontendMetrics
from ..kv.regions import KvCache
from ..kv.transfer.engine import EngineTransfers, open_engine_transfers
from ..kv.transfer.metrics import TransferMetrics
from ..metrics.metrics import Metrics
from ..metrics.planes import show_planes
from ..nurseries import open_nursery
from ..planes import ControlPlane
from ..planes.transports import DataPlane
from ..traces.ring import Traces
from ..traces.spans import Tracing
from ..worker.metrics import WorkerMetrics
from ..worker.worker import Worker
from .runtime import Runtime
from .settings import REQUESTS_MAX, Settings
from .transports import Transports

_log = logging.getLogger("trinamo.runtime")
_SETTINGS_WAIT_S: Final = 1.0
"""How long a start waits for the settings before it goes on with their defaults."""


def _require_trio() -> None:
    # asyncio's own word: trio-asyncio answers for asyncio's functions in Python while trio runs.
    asyncio = sys.modules.get("_asyncio")
    around = None if asyncio is None else asyncio._get_running_loop()  # noqa: SLF001
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        what = "none runs here" if around is None else "asyncio runs here"
    else:
        if around is None:
            return
        what = "it runs inside an asyncio loop here"
    raise RuntimeError(
        f"trinamo needs trio, and {what}: call `trio.run(main)`; from asyncio or a notebook"
        " `await asyncio.to_thread(trio.run, main)`"
    )


@asynccontextmanager
async def open_runtime(
    config: Config,
    env: Env,
    transports: Transports,
    *,
    serving: bool = False,
    asks_workers: bool = True,
    metrics: Metrics | None = None,
    kv: KvCache | None = None,
) -> AsyncIterator[Runtime]:
    """Open every plane and yield the runtime; leaving it is the orderly shutdown.

    With `serving` the process gets an instance id, request listeners and a lease. One that neither
    serves nor `asks_workers` opens no data plane. The cache `kv` of its engine, which must stay
    open for longer, is what peers move blocks to and from; they find it under the instance id.
    Raises `ConfigError` or `ConnectError`, with a sentence that says what to do, if a plane cannot
    be opened; nothing is left behind then. Raises `RuntimeError` where trio does not run, or runs
    inside an asyncio loop.
    """
    _require_trio()
    instance_id = draw_id(env.rng) if serving else None
    if metrics is None:
        metrics = WorkerMetrics(env) if serving else FrontendMetrics(env)
    async with AsyncExitStack() as planes:
        everything = planes.enter_context(trio.CancelScope())
        opened = planes.enter_async_context
        # First, so that it ends last: what ends in an orderly way is told.
        traces = await opened(_open_traces(config, env, transports, instance_id))
        control = await opened(transports.open_control(config, env))
        events = await opened(transports.open_events(config, env))
        data = DataPlane()
        if serving or asks_workers:
            data = await opened(transports.open_data(config, env, events, serving=instance_id))
        show_planes(metrics, control, events, data.request_servers)
        worker = transfers = None
        if instance_id is not None:
            worker = _worker(config, env, data, instance_id, metrics, traces)
            transfers = await opened(
                _open_transfers(config, env, transports, control, kv, instance_id, metrics)
            )
        async with (
            open_nursery() as control_nursery,
            open_nursery() as event_nursery,
            open_nursery() as data_nursery,
        ):
            runtime = Runtime(
                config=config,
                env=env,
                control=control,
                events=events,
                data=data,
                http=transports.http,
                metrics=metrics,
                worker=worker,
                control_nursery=control_nursery,
                event_nursery=event_nursery,
                transfers=transfers,
                traces=traces,
            )
            control_nursery.start_soon(runtime.settings.follow)
            with trio.move_on_after(_SETTINGS_WAIT_S):
                await runtime.settings.wait_loaded()
            if worker is not None:
                await data_nursery.start(worker.run)
                control_nursery.start_soon(_follow_requests_max, runtime.settings, worker)
                for server in data.request_servers:
                    await data_nursery.start(server.serve, worker)
                await control_nursery.start(runtime.registrar.run)
            if transfers is not None:
                control_nursery.start_soon(transfers.watch)
                await transfers.offer(runtime.registrar)
            yield runtime
            await runtime.shutdown()
            everything.deadline = trio.current_time() + CLOSE_TIMEOUT_S
            for nursery in (data_nursery, event_nursery, control_nursery):
                nursery.cancel_scope.cancel()
    if everything.cancelled_caught:
        _log.warning("shutdown: the planes did not close within %g s", CLOSE_TIMEOUT_S)


@asynccontextmanager
async def _open_traces(
    config: Config, env: Env, transports: Transports, instance_id: str | None
) -> AsyncIterator[Traces]:
    """What becomes of requests here, told to a collector too if one is configured."""
    process = {} if instance_id is None else {"instance": instance_id}
    async with AsyncExitStack() as spans:
        tracing: Tracing | None = None
        if config.tracing.enabled:
            sink = await spans.enter_async_context(transports.open_spans(config, env, process))
            tracing = Tracing(sink, env, sample_ratio=config.tracing.sample_ratio)
        limit = config.traces.requests_max
        yield Traces(env.clock, limit, tracing, **(process or {"role": "frontend"}))


@asynccontextmanager
async def _open_transfers(
    config: Config,
    env: Env,
    transports: Transports,
    control: ControlPlane,
    kv: KvCache | None,
    instance_id: str,
    metrics: Metrics,
) -> AsyncIterator[EngineTransfers | None]:
    """The way of KV blocks to and from `kv`, if there are any and they may be moved."""
    if kv is None or not config.data_plane.transfer.enabled:
        yield None
        return
    counted = TransferMetrics(metrics, env.note)
    async with (
        transports.open_transfers(config, env) as chain,
        open_engine_transfers(
            chain, kv, config, env, control, engine_id=instance_id, metrics=counted
        ) as transfers,
    ):
        yield transfers


def _worker(
    config: Config,
    env: Env,
    data: DataPlane,
    instance_id: str,
    metrics: Metrics,
    traces: Traces,
) -> Worker:
    if not isinstance(metrics, WorkerMetrics):
        raise TypeError("a process that serves counts in `WorkerMetrics`")
    if data.call_home is None:
        raise TypeError("a process that serves has a data plane")
    section = config.worker
    return Worker(
        data.call_home,
        env,
        instance_id=instance_id,
        requests_max=section.requests_max,
        stop_grace_s=section.stop_grace_s,
        cancelled_ttl_s=section.cancelled_ttl_s,
        metrics=metrics,
        traces=traces,
    )


async def _follow_requests_max(settings: Settings, worker: Worker) -> None:
    """Let the cluster's setting replace the worker's own bound while there is one."""
    own, value = worker.requests_max, 0
    while True:
        value = await settings.wait_change(REQUESTS_MAX, value)
        worker.requests_max = value or own
