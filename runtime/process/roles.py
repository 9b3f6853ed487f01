"""What the processes of a cluster do: a worker, or a frontend, from start to orderly end.

The command line, a program that has an engine of its own (`trinamo.serve_worker`) and the simulator
call the same functions. They differ in the transports, in what asks the process to stop
(`stopping.py`), and in what they do once it is ready. Signals, output and the choice of an engine
are theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import msgspec
import trio

from ..caller.migration import MigrationPolicy
from ..config.config import Config, HttpConfig, WorkerConfig
from ..config.worker import endpoint_of_model
from ..engines import EngineInfo, GenerationEngine
from ..engines.generation import StandsBefore, forward_of
from ..env import Env
from ..http.dashboard.dashboard import Dashboard
from ..http.dashboard.facts import FrontendFacts
from ..http.dashboard.gathering import Place
from ..http.models.discovery import ClientSource, watch_models
from ..http.routes.scraping import ScrapeTargets
from ..http.server.hosts import url_of
from ..http.server.server import Server
from ..http.service import HttpService
from ..http.status_app import Health, build_status_app
from ..http.survey.overview import HasClients, describe_planes, overview
from ..kv.cache import HoldsKv, KvCache
from ..metrics.metrics import FrontendMetrics
from ..metrics.migrations import MigrationSeries
from ..metrics.worker import WorkerMetrics
from ..nurseries import open_nursery
from ..planes.transports import Transports
from ..protocol.discovery.instances import EndpointName, Instance
from ..protocol.discovery.model_cards import encode_card, model_key
from ..protocol.openai.generate import (
    GenerateRequest,
    bounded_request_type,
    payload_bytes_max_for,
)
from .dashboard import dashboard_url, open_dashboard
from .disaggregated import DecodeRole, PrefillRole, check_role
from .facts import frontend_facts, worker_facts
from .frontends import publish_frontend
from .opening import open_runtime
from .runtime import Runtime
from .stopping import StopRequest
from .upstreams import DirectUpstreams, alone
from .weights import WorkerWeights, lend_weights

__all__ = [
    "FrontendReady",
    "WorkerReady",
    "migration_policy",
    "serve_frontend",
    "serve_worker",
]

_log = logging.getLogger("trinamo.runtime")
_STATUS_CONNECTIONS_MAX = 128
_BODY_BYTES_MAX = 1 << 28


@attrs.frozen
class WorkerReady:
    """A worker serves: its models, or a prefill worker, can be found."""

    instance_id: str
    model: str
    """Its name; several are separated by commas, and so are their engines."""
    engine: str
    status_url: str
    """Empty if there is no status port."""


@attrs.frozen
class FrontendReady:
    """A frontend serves."""

    url: str
    status_url: str
    """Empty if there is no status port."""
    dashboard_url: str = ""
    """Empty if there is none."""


async def serve_worker(
    config: Config,
    env: Env,
    transports: Transports,
    engine: GenerationEngine | Sequence[GenerationEngine],
    stop: StopRequest,
    *,
    ready: Callable[[WorkerReady], object],
    opened: Callable[[Runtime], object] = lambda _: None,
    metrics: WorkerMetrics | None = None,
    metadata: Mapping[str, str] | None = None,
    weights: WorkerWeights | None = None,
) -> None:
    """Serve the model of `engine`, which stays the caller's, until `stop`; then leave in order.

    Of several engines each serves its model at an endpoint of its own, as `worker.models` says of
    that model, else called after it. Peers move KV blocks of the first one that has any.
    With `worker.role: prefill` it computes prompts for decode workers instead, and no frontend
    finds it.

    `opened` is called once the planes are open, `ready` once frontends find the model; `metadata`
    is for people, beside what the engine says of itself; `weights` are the model files to offer to
    peers. Raises `ConfigError` or `ConnectError`,
    with a sentence saying what to do, if it cannot start.
    """
    engines = engine if isinstance(engine, Sequence) else (engine,)
    check_role(config, engines)
    kv = _kv_of(engines)
    async with (
        open_runtime(config, env, transports, serving=True, metrics=metrics, kv=kv) as runtime,
        open_nursery() as nursery,
    ):
        opened(runtime)
        env.note("worker.serve", instance=runtime.instance_id)
        role = _role(runtime, engines[0])
        with stop.starting():
            status_url = ""
            parts: dict[str, Callable[[], Mapping[str, Any]]] = {}
            lend: Callable[[Mapping[str, str]], Awaitable[None]] | None = None
            if role is not None:
                parts["disaggregation"] = role.describe
            if weights is not None and weights.files and config.weights.enabled:
                lender = weights.lender(config, runtime)
                parts["weights"] = lender.describe
                lend = partial(lend_weights, config, runtime, transports, weights, lender)
            if config.worker.status_port is not None:
                port = await nursery.start(_status_server(config, runtime, engines, parts).serve)
                status_url = url_of(config.worker.status_host, port)
            told = {**(metadata or {}), "status": status_url}
            if runtime.tells_load:
                told["reports"] = "load"
            for section, each in _sections(config.worker, engines):
                await _offer(section, runtime, each, role, nursery, told)
            if lend is not None:
                nursery.start_soon(lend, told)
            env.note("worker.ready", instance=runtime.instance_id)
            ready(
                WorkerReady(
                    runtime.instance_id or "",
                    ", ".join(each.info.model for each in engines),
                    ", ".join(each.info.engine for each in engines),
                    status_url,
                )
            )
        await stop.wait()
        env.note("worker.told")
        await runtime.shutdown()
        nursery.cancel_scope.cancel()
    env.note("worker.left")


def _kv_of(engines: Sequence[GenerationEngine]) -> KvCache | None:
    """The KV memory that peers may move blocks to and from: a process describes one."""
    held = [each for each in engines if isinstance(each, HoldsKv) and each.kv is not None]
    for other in held[1:]:
        _log.warning(
            "KV blocks of %s are not moved: a process offers those of one model, here %s",
            *(other.info.model, held[0].info.model),
        )
    return held[0].kv if held else None


def _sections(
    section: WorkerConfig, engines: Sequence[GenerationEngine]
) -> list[tuple[WorkerConfig, GenerationEngine]]:
    """Each engine with what is configured for its model, its endpoint above all."""
    if len(engines) == 1 and not section.models:
        return [(section, engines[0])]
    by_name = {each.model_name: each for each in section.by_model()}

    def of(model: str) -> WorkerConfig:
        endpoint = endpoint_of_model(section.endpoint, model)
        return by_name.get(model) or msgspec.structs.replace(section, endpoint=endpoint)

    return [(of(each.info.model), each) for each in engines]


def _role(runtime: Runtime, engine: GenerationEngine) -> DecodeRole | PrefillRole | None:
    """What this worker is in disaggregated serving, if anything."""
    match runtime.config.worker.role:
        case "prefill":
            return PrefillRole(runtime, engine)
        case "decode":
            return DecodeRole(runtime, engine)
        case _:
            return None


async def _offer(
    section: WorkerConfig,
    runtime: Runtime,
    engine: GenerationEngine,
    role: DecodeRole | PrefillRole | None,
    nursery: trio.Nursery,
    metadata: Mapping[str, str],
) -> None:
    """Register the endpoint of one model, and publish its card, unless others answer for it."""
    info = engine.info
    about = {"engine": info.engine, "model": info.model, "role": section.role, **metadata}
    if isinstance(role, PrefillRole):
        await role.offer(nursery, about)
        return
    answering = engine if role is None else await nursery.start(role.run, about)
    endpoint = EndpointName(section.namespace, section.component, section.endpoint)
    instance = await runtime.serve_push(
        endpoint,
        forward_of(answering),
        **_bounds_of_request(info),
        metadata=about,
        engine=engine,
    )
    created = int(runtime.env.clock.wall())
    card = info.card(str(endpoint), created=created, aliases=section.model_aliases)
    await runtime.publish(model_key(card.name, instance.id), encode_card(card))
    standing: object = engine
    if isinstance(standing, StandsBefore):
        nursery.start_soon(_follow_health, runtime, instance, standing)


async def _follow_health(runtime: Runtime, instance: Instance, engine: StandsBefore) -> None:
    """While the server behind is away, let nobody choose this worker."""
    is_healthy = True
    while True:
        is_healthy = await engine.wait_health(seen=is_healthy)
        text = "the upstream of %s is well" if is_healthy else "the upstream of %s is away"
        _log.log(logging.INFO if is_healthy else logging.WARNING, text, instance.endpoint)
        await runtime.set_draining(instance, is_draining=not is_healthy)


def _bounds_of_request(info: EngineInfo) -> dict[str, Any]:
    if info.passes_through:
        # A client's body: frontends have bounded it, and nothing of it is decoded here.
        return {"request_type": GenerateRequest, "payload_bytes_max": _BODY_BYTES_MAX}
    return {
        "request_type": bounded_request_type(info.context_tokens_max),
        "payload_bytes_max": payload_bytes_max_for(info.context_tokens_max),
    }


def _status_server(
    config: Config,
    runtime: Runtime,
    engines: Sequence[GenerationEngine],
    parts: Mapping[str, Callable[[], Mapping[str, Any]]],
) -> Server:
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
                **worker_facts(runtime, engines),
                **{name: describe() for name, describe in parts.items()},
            },
        )

    section = config.worker
    return _status_port(runtime, check_health, section.status_host, section.status_port)


def _status_port(
    runtime: Runtime,
    check_health: Callable[[], Health],
    host: str,
    port: int | None,
    dashboard: Dashboard | None = None,
) -> Server:
    section = HttpConfig(host=host, port=port or 0, connections_max=_STATUS_CONNECTIONS_MAX)
    handlers = {} if dashboard is None else dashboard.handlers
    more = [] if dashboard is None else dashboard.routes
    app = build_status_app(runtime.metrics, runtime.traces, check_health, more)
    return Server(app, section, metrics=runtime.metrics, handlers=handlers)


async def serve_frontend(
    config: Config,
    env: Env,
    transports: Transports,
    stop: StopRequest,
    *,
    ready: Callable[[FrontendReady], object],
    opened: Callable[[Runtime, HttpService], object] = lambda _, __: None,
    metrics: FrontendMetrics | None = None,
    place: Place | None = None,
) -> None:
    """Serve HTTP until `stop`; then refuse new work, finish, and leave.

    `opened` is called once the planes are open, `ready` once HTTP is answered. The status port, if
    there is one, is answered until the end. `place` is what the dashboard says of where it stands. Raises `ConfigError`
    or `ConnectError`, with a sentence saying what to do, if it cannot start.
    """
    metrics = metrics or FrontendMetrics(env)
    if config.http.upstreams:
        config = alone(config)
    async with (
        open_runtime(
            config, env, transports, metrics=metrics, asks_workers=not config.http.upstreams
        ) as runtime,
        open_nursery() as watching,
    ):
        direct = DirectUpstreams(config, runtime, watching) if config.http.upstreams else None
        clients: ClientSource[Any] = runtime if direct is None else direct
        service = _http_service(config, runtime, metrics, direct or runtime)
        opened(runtime, service)
        async with open_nursery() as serving:
            with stop.starting():
                manager = service.model_manager()
                if direct is not None:
                    await watching.start(direct.run)
                migration = migration_policy(config, metrics)
                runtime.live.listen(partial(_tune_frontend, service, migration))
                await watching.start(watch_models, runtime.control, clients, manager, migration)
                status_url = ""
                facts = partial(frontend_facts, runtime, service, metrics)
                dashboard = open_dashboard(runtime, service, facts, place or Place())
                if dashboard is not None:
                    watching.start_soon(dashboard.run)
                if config.http.status_port is not None:
                    status = _frontend_status(config.http, runtime, facts, dashboard)
                    port = await watching.start(status.serve)
                    status_url = url_of(config.http.status_host, port)
                port = await serving.start(service.run)
                env.note("frontend.ready")
                url = url_of(config.http.host, port, config.http.scheme)
                if dashboard is not None:
                    dashboard.serves_at(url)
                if status_url:
                    watching.start_soon(publish_frontend, runtime, url, status_url)
                ready(FrontendReady(url, status_url, dashboard_url(config.http, url, status_url)))
            await stop.wait()
            env.note("frontend.told")
            service.stop()
        watching.cancel_scope.cancel()
    env.note("frontend.left")


def migration_policy(config: Config, metrics: FrontendMetrics) -> MigrationPolicy:
    """When the answer of a worker that left goes on elsewhere, as configured."""
    section = config.router
    return MigrationPolicy(
        series=MigrationSeries(metrics.now, metrics.registry),
        migrations_max=section.migrations_max,
        tokens_max=section.migration_tokens_max,
    )


def _tune_frontend(service: HttpService, migration: MigrationPolicy, found: Config) -> None:
    """What settings changed is in force for requests that come from now on."""
    service.tune(found.http)
    migration.migrations_max = found.router.migrations_max
    migration.tokens_max = found.router.migration_tokens_max


def _frontend_status(
    section: HttpConfig,
    runtime: Runtime,
    facts: Callable[[], FrontendFacts],
    dashboard: Dashboard | None,
) -> Server:
    def check_health() -> Health:
        told = {**msgspec.to_builtins(facts()), **describe_planes(runtime)}
        status = told.pop("status")
        return Health(is_ready=status == "ready", status=status, facts=told)

    return _status_port(runtime, check_health, section.status_host, section.status_port, dashboard)


def _http_service(
    config: Config, runtime: Runtime, metrics: FrontendMetrics, source: HasClients
) -> HttpService:
    builder = HttpService.builder().env(runtime.env).metrics(metrics).traces(runtime.traces)
    targets = ScrapeTargets(runtime.control, runtime.env.clock)
    looking = builder.look(lambda: overview(runtime, source)).targets(targets)
    return looking.config(config.http).build()
