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
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import trio

from ..config.config import Config
from ..env import Env
from ..kv.cache import KvCache
from ..kv.transfer.engine import EngineTransfers, open_engine_transfers
from ..metrics.metrics import FrontendMetrics, Metrics
from ..metrics.planes import show_planes
from ..metrics.transfers import TransferMetrics
from ..metrics.worker import WorkerMetrics
from ..nurseries import open_nursery
from ..planes.spans import SpanSink
from ..planes.transports import DataPlane, Transports
from ..traces.ring import Traces
from ..traces.spans import Tracing
from .runtime import Runtime

__all__ = ["open_runtime"]

_log = logging.getLogger("trinamo.runtime")
_ID_BITS: Final = 64
_SETTINGS_WAIT_S: Final = 1.0
"""How long a start waits for the settings before it goes on with their defaults."""


@asynccontextmanager
async def open_runtime(
    config: Config,
    env: Env,
    transports: Transports,
    *,
    serving: bool = False,
    asks_workers: bool = True,
    metrics: Metrics | None = None,
    kv: KvCache[Any] | None = None,
) -> AsyncIterator[Runtime]:
    """Open every plane and yield the runtime; leaving it is the orderly shutdown.

    With `serving` the process gets an instance id, request listeners and a lease. One that neither
    serves nor `asks_workers` opens no data plane. The cache `kv`
    of its engine, which must stay open for longer, is what peers move blocks to and from; they
    find it under the instance id. Raises `ConfigError` or `ConnectError`, with a sentence that says
    what to do, if a plane cannot be opened; nothing is left behind then.
    """
    instance_id = f"{env.rng.getrandbits(_ID_BITS):016x}" if serving else None
    if metrics is None:
        metrics = WorkerMetrics(env) if serving else FrontendMetrics(env)
    async with AsyncExitStack() as planes:
        everything = planes.enter_context(trio.CancelScope())
        spans: SpanSink | None = None
        if config.tracing.enabled:
            # First, so that it ends last: what ends in an orderly way is told.
            process = {} if instance_id is None else {"instance": instance_id}
            spans = await planes.enter_async_context(transports.open_spans(config, env, process))
        control = await planes.enter_async_context(transports.open_control(config, env))
        events = await planes.enter_async_context(transports.open_events(config, env))
        data = DataPlane()
        if serving or asks_workers:
            data = await planes.enter_async_context(
                transports.open_data(config, env, events, serving=instance_id)
            )
        show_planes(metrics, control, events, data.request_servers)
        transfers: EngineTransfers | None = None
        if kv is not None and instance_id is not None and config.data_plane.transfer.enabled:
            chain = await planes.enter_async_context(transports.open_transfers(config, env))
            transfers = await planes.enter_async_context(
                open_engine_transfers(
                    chain,
                    kv,
                    config,
                    env,
                    control,
                    engine_id=instance_id,
                    metrics=TransferMetrics(metrics.registry, env.note),
                )
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
                metrics=metrics,
                instance_id=instance_id,
                control_nursery=control_nursery,
                event_nursery=event_nursery,
                transfers=transfers,
                traces=_traces(config, env, instance_id, spans),
            )
            control_nursery.start_soon(runtime.settings.follow)
            with trio.move_on_after(_SETTINGS_WAIT_S):
                await runtime.settings.wait_loaded()
            if runtime.worker is not None:
                await data_nursery.start(runtime.worker.run)
                control_nursery.start_soon(runtime.follow_requests_max, runtime.worker)
                for server in data.request_servers:
                    await data_nursery.start(server.serve, runtime.worker)
                await control_nursery.start(runtime.registrar.run)
            if transfers is not None:
                control_nursery.start_soon(transfers.watch)
                await transfers.offer(runtime.registrar)
            yield runtime
            await runtime.shutdown()
            limit_s = config.shutdown.close_timeout_s
            everything.deadline = trio.current_time() + limit_s
            for nursery in (data_nursery, event_nursery, control_nursery):
                nursery.cancel_scope.cancel()
    if everything.cancelled_caught:
        _log.warning(
            "shutdown: the planes did not close within %g s", config.shutdown.close_timeout_s
        )


def _traces(config: Config, env: Env, instance_id: str | None, spans: SpanSink | None) -> Traces:
    process = {"role": "frontend"} if instance_id is None else {"instance": instance_id}
    ratio = config.tracing.sample_ratio
    tracing = None if spans is None else Tracing(spans, env, sample_ratio=ratio)
    return Traces(env.clock, config.traces.requests_max, tracing, **process)
