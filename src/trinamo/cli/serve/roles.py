"""What one process of a cluster does: a worker, or a frontend, from start to orderly end."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import attrs
import trio

from trinamo.runtime.config.config import Config, config_notices
from trinamo.runtime.engines import GenerationEngine
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.http.models.discovery import watch_models
from trinamo.runtime.http.overview import Overview, describe_planes, overview
from trinamo.runtime.http.server.server import Server
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.http.status_app import Health, build_status_app
from trinamo.runtime.http.streaming import OnDisconnect
from trinamo.runtime.kv.cache import HoldsKv
from trinamo.runtime.logs.fields import name_process
from trinamo.runtime.metrics.metrics import FrontendMetrics
from trinamo.runtime.metrics.worker import WorkerMetrics
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.process.runtime import Runtime, open_runtime
from trinamo.runtime.process.stopping import stopped_by_signals
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import (
    ModelCard,
    bounded_request_type,
    payload_bytes_max_for,
)
from trinamo.transports.assembly.planes import RealTransports

from .engine import choose_engine, open_engine
from .output import LogLosses

__all__ = ["FrontendReady", "WorkerReady", "run_frontend", "run_worker"]

_log = logging.getLogger("trinamo.cli")


@attrs.frozen
class WorkerReady:
    """A worker serves."""

    instance_id: str
    model: str
    engine: str
    why: str
    """Why this engine."""
    status_url: str
    """Empty if there is no status port."""


@attrs.frozen
class FrontendReady:
    """A frontend serves."""

    url: str


async def run_worker(
    config: Config, *, ready: Callable[[WorkerReady], None], env: Env | None = None
) -> None:
    """Serve one model until SIGINT or SIGTERM, then leave in order.

    Raises `ConfigError` or `ConnectError`, with a sentence saying what to do, if it cannot start.
    """
    env = env or RealEnv()
    _tell_notices(config)
    section = config.worker
    choice = choose_engine(section)
    metrics = WorkerMetrics(env)
    metrics.registry.register(LogLosses())
    async with (
        stopped_by_signals() as stop,
        open_engine(section, choice.engine) as engine,
        open_runtime(
            config,
            env,
            RealTransports(),
            serving=True,
            metrics=metrics,
            kv=engine.kv if isinstance(engine, HoldsKv) else None,
        ) as runtime,
        open_nursery() as nursery,
    ):
        with stop.starting():
            ready(await _serve(config, runtime, engine, choice.why, nursery))
        await stop.wait()
        await runtime.shutdown()
        nursery.cancel_scope.cancel()


async def _serve(
    config: Config, runtime: Runtime, engine: GenerationEngine, why: str, nursery: trio.Nursery
) -> WorkerReady:
    """Open the status port, register the endpoint, publish the model's card."""
    assert runtime.instance_id is not None
    section, info = config.worker, engine.info
    endpoint = EndpointName(section.namespace, section.component, section.endpoint)
    status_url = ""
    if section.status_port is not None:
        status = _status_server(config, runtime, engine)
        port = await nursery.start(status.serve)
        status_url = f"http://{_bracketed(section.status_host)}:{port}"
    name_process(instance_id=runtime.instance_id, model=info.model)
    await runtime.serve(
        endpoint,
        engine.generate,
        request_type=bounded_request_type(info.context_tokens_max),
        payload_bytes_max=payload_bytes_max_for(info.context_tokens_max),
        metadata={
            "engine": info.engine,
            "model": info.model,
            "pid": str(os.getpid()),
            "status": status_url,
        },
        engine=engine,
    )
    card = ModelCard(
        name=info.model,
        endpoint=str(endpoint),
        context_tokens_max=info.context_tokens_max,
        engine=info.engine,
        fingerprint=info.fingerprint,
        created=int(runtime.env.clock.wall()),
    )
    await runtime.publish(model_key(card.name, runtime.instance_id), encode_card(card))
    return WorkerReady(runtime.instance_id, info.model, info.engine, why, status_url)


def _tell_notices(config: Config) -> None:
    for notice in config_notices(config):
        _log.warning("%s", notice)


def _status_server(config: Config, runtime: Runtime, engine: GenerationEngine) -> Server:
    worker = runtime.worker
    assert worker is not None

    def check_health() -> Health:
        state = runtime.registrar.state
        draining = worker.is_draining
        status = "draining" if draining else "ready" if state.lease_id else "unregistered"
        return Health(
            is_ready=not draining,
            status=status,
            facts={
                "instance_id": runtime.instance_id,
                "active": worker.active_count,
                "lease_id": f"{state.lease_id:x}",
                "incarnation": state.incarnation,
                **_describe_blocks(engine),
                **_describe_transfers(runtime),
                **describe_planes(runtime),
            },
        )

    assert config.worker.status_port is not None
    return Server(
        build_status_app(runtime.metrics, check_health),
        metrics=runtime.metrics,
        host=config.worker.status_host,
        port=config.worker.status_port,
        connections_max=64,
    )


def _describe_blocks(engine: GenerationEngine) -> dict[str, Any]:
    """How full the engine's KV memory is, where it has any."""
    total = engine.info.block_count
    used = engine.statistics().blocks_used
    return {"blocks": {"used": used, "total": total}} if total else {}


def _describe_transfers(runtime: Runtime) -> dict[str, Any]:
    """The chain of backends and what goes on over it, where the engine has KV memory."""
    transfers = runtime.transfers
    return {} if transfers is None else {"transfers": attrs.asdict(transfers.statistics())}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def run_frontend(
    config: Config, *, ready: Callable[[FrontendReady], None], env: Env | None = None
) -> None:
    """Serve HTTP until SIGINT or SIGTERM, then refuse new work, finish, and leave.

    Raises `ConfigError` or `ConnectError`, with a sentence saying what to do, if it cannot start.
    """
    env = env or RealEnv()
    _tell_notices(config)
    metrics = FrontendMetrics(env)
    metrics.registry.register(LogLosses())
    async with (
        stopped_by_signals() as stop,
        open_runtime(config, env, RealTransports(), metrics=metrics) as runtime,
        open_nursery() as watching,
    ):
        service = _http_service(config, env, metrics, lambda: overview(runtime))
        async with open_nursery() as serving:
            with stop.starting():
                manager = service.model_manager()
                await watching.start(watch_models, runtime.control, runtime, manager)
                port = await serving.start(service.run)
                ready(FrontendReady(f"http://{_bracketed(config.http.host)}:{port}"))
            await stop.wait()
            service.stop()
        watching.cancel_scope.cancel()


def _http_service(
    config: Config, env: Env, metrics: FrontendMetrics, look: Callable[[], Overview]
) -> HttpService:
    # The keys of `http` are the fields of the service's configuration, name by name.
    settings: dict[str, Any] = {
        name: getattr(config.http, name) for name in config.http.__struct_fields__
    }
    settings["on_disconnect"] = OnDisconnect(config.http.on_disconnect)
    builder = HttpService.builder().env(env).metrics(metrics).look(look)
    return builder.config(**settings).build()
