"""What the processes of a cluster do: a worker, or a frontend, from start to orderly end.

The command line, a program that has an engine of its own (`trinamo.serve_worker`) and the simulator
call the same functions. They differ in the transports, in what asks the process to stop
(`stopping.py`), and in what they do once it is ready. Signals, output and the choice of an engine
are theirs.

What a worker and a frontend consist of stands here, in the order in which it starts. Each part is a
module in `worker/` or `frontend/`, which does what it needs by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
import trio
from msgspec.structs import asdict, replace

from ..caller.migration import MigrationPolicy, MigrationSeries
from ..config.config import REVOKE_TIMEOUT_S, Config
from ..config.keys import url_of
from ..engines import GenerationEngine
from ..engines.generation import show_engine
from ..env import Env, draw_id
from ..http.app import tasks_routes
from ..http.metrics import FrontendMetrics
from ..http.models.discovery import AWAY_S, watch_models
from ..http.models.models import ModelManager
from ..http.service import HttpService, check_files
from ..http.transport import HttpTransport
from ..nurseries import open_nursery
from ..protocol.discovery.instances import FrontendEntry, encode_frontend, frontend_key
from ..traces.ring import Traces
from ..view.facts import FrontendFacts, frontend_facts
from ..view.looks import Place
from ..view.overview import overview
from ..view.scraping import ScrapeTargets
from ..worker.metrics import WorkerMetrics
from ..worker.reports import keeps_blocks
from .frontend.dashboard import dashboard_url, open_dashboard, open_own_dashboard
from .frontend.upstreams import DirectUpstreams, alone
from .opening import open_runtime
from .runtime import Runtime
from .status import Describes, advertised_status, open_frontend_status, open_worker_status
from .stopping import StopRequest
from .tasks import TaskTree
from .transports import Transports
from .worker.disaggregated import check_role, choose_role
from .worker.models import movable_kv, offer_models
from .worker.weights import WorkerWeights, lend_weights


@attrs.frozen
class WorkerReady:
    """A worker serves: its models, or a prefill worker, can be found."""

    instance_id: str
    model: str
    """Its name; several are separated by commas, and so are their engines."""
    engine: str
    status_url: str
    """Empty if there is no status port."""
    addresses: Mapping[str, str] = attrs.field(factory=dict)
    """Where frontends are told to send requests, by transport."""


@attrs.frozen
class FrontendReady:
    """A frontend serves."""

    url: str
    status_url: str
    """Empty if there is no status port."""
    dashboard_url: str = ""
    """Empty if there is none."""
    home_address: str = ""
    """Where workers are told to call it; empty if none does."""


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
    kv = movable_kv(engines)
    async with (
        open_runtime(config, env, transports, serving=True, metrics=metrics, kv=kv) as runtime,
        open_nursery() as nursery,
    ):
        opened(runtime)
        env.note("worker.serve", instance=runtime.instance_id)
        role = choose_role(runtime, engines[0])
        lender = None if weights is None else weights.lender(runtime)
        with stop.starting():
            parts: dict[str, Describes | None] = {"disaggregation": role, "weights": lender}
            status_url = await open_worker_status(nursery, runtime, engines, parts)
            advertised = advertised_status(runtime, status_url)
            told = {**(metadata or {}), "status": advertised}
            if runtime.tells_load or all(map(keeps_blocks, engines)):
                told["reports"] = "load"
            await offer_models(nursery, runtime, engines, role, told)
            if weights is not None and lender is not None:
                nursery.start_soon(lend_weights, runtime, transports, weights, lender, told)
            env.note("worker.ready", instance=runtime.instance_id)
            ready(
                WorkerReady(
                    runtime.instance_id or "",
                    ", ".join(each.info.model for each in engines),
                    ", ".join(each.info.engine for each in engines),
                    advertised or status_url,
                    runtime.data.addresses,
                )
            )
        await stop.wait()
        env.note("worker.told")
        await runtime.shutdown()
        nursery.cancel_scope.cancel()
    env.note("worker.left")


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
    there is one, is answered until the end. `place` is what the dashboard says of where it stands.
    Raises `ConfigError` or `ConnectError`, with a sentence saying what to do, if it cannot start.
    """
    check_files(config.http, env, transports.http)
    metrics = metrics or FrontendMetrics(env)
    is_alone = bool(config.http.upstreams)
    if is_alone:
        config = alone(config)
    async with (
        open_runtime(
            config, env, transports, metrics=metrics, asks_workers=not is_alone
        ) as runtime,
        open_nursery() as watching,
    ):
        upstreams = DirectUpstreams(config, runtime) if is_alone else None
        look = partial(overview, runtime) if upstreams is None else upstreams.overview
        settings = runtime.live.values
        service = HttpService(
            config.http,
            env,
            metrics,
            runtime.http,
            lambda: replace(look(), settings=settings()),
            runtime.traces,
            ScrapeTargets(runtime.control, env.clock),
        )
        runtime.live.listen(lambda found: service.tune(found.http))
        opened(runtime, service)
        async with open_nursery() as serving:
            with stop.starting():
                if upstreams is not None:
                    service.model_manager().knows_all = upstreams.knows_all
                    await watching.start(upstreams.run)
                await follow_models(watching, runtime, service.model_manager())

                def facts() -> FrontendFacts:
                    return frontend_facts(service.full_view(), metrics, runtime.queues.tallies)

                dashboard = open_dashboard(watching, runtime, service, facts, place or Place())
                status_url = await open_frontend_status(
                    watching, runtime, facts, service, dashboard
                )
                port = await service.spawn(serving)
                env.note("frontend.ready")
                url = url_of(config.http.host, port, config.http.scheme)
                status = advertised_status(runtime, status_url)
                if dashboard is not None:
                    dashboard.serves_at(url, status)
                if status:
                    host = "" if place is None else place.host
                    watching.start_soon(_publish_frontend, runtime, url, status, host)
                page = dashboard_url(config.http, url, status or status_url)
                address = runtime.data.home_address
                ready(FrontendReady(url, status or status_url, page, address))
            await stop.wait()
            env.note("frontend.told")
            service.stop()
        watching.cancel_scope.cancel()
    env.note("frontend.left")


async def _publish_frontend(runtime: Runtime, url: str, status: str, host: str) -> None:
    """Keep the entry while this runs: others ask for its status at `status`.

    It is gone at once when this is cancelled, if the store answers.

    A store that is away, or does not let us write, is tried again: nobody waits for the entry.
    """
    frontend_id = draw_id(runtime.env.rng)
    url = runtime.data.advertised_url(url) or url
    entry = encode_frontend(FrontendEntry(id=frontend_id, url=url, status=status, host=host))
    try:
        async with open_nursery() as nursery:
            nursery.start_soon(runtime.registrar.run)
            await runtime.registrar.register(frontend_key(frontend_id), lambda _: entry)
            await trio.sleep_forever()
    finally:
        with trio.move_on_after(REVOKE_TIMEOUT_S, shield=True):
            await runtime.registrar.revoke()


async def follow_models(nursery: trio.Nursery, runtime: Runtime, manager: ModelManager) -> None:
    """Keep `manager` equal to the published cards, in `nursery`; returns once they are known."""
    metrics, section = manager.metrics, runtime.config.router
    migration = MigrationPolicy(
        series=MigrationSeries(metrics.now, metrics),
        migrations_max=section.migrations_max,
        tokens_max=section.migration_tokens_max,
    )

    def tune(found: Config) -> None:
        """Requests that come from now on are replayed by the settings that are in force."""
        migration.migrations_max = found.router.migrations_max
        migration.tokens_max = found.router.migration_tokens_max

    runtime.live.listen(tune)
    # Whoever names the servers wants them back, however long that takes.
    away_s = math.inf if runtime.config.http.upstreams else AWAY_S
    await nursery.start(watch_models, runtime.control, runtime, manager, migration, away_s)


# --- engines and HTTP in one process ---


async def serve_engines(
    config: Config,
    env: Env,
    engines: Sequence[GenerationEngine],
    stop: StopRequest,
    *,
    http: HttpTransport,
    ready: Callable[[FrontendReady], object],
    metrics: FrontendMetrics,
) -> None:
    """Serve HTTP for the models of `engines`, which stay the caller's, until `stop`; then drain.

    With a dashboard, and nothing else: no etcd, no NATS, no worker. For an engine on one machine,
    and for trying one. What a request does here it does in a cluster, but for the way from the
    frontend to the worker.

    `ready` is called once HTTP is answered. Raises `ConfigError` if it cannot listen, and
    `ModelAlreadyExistsError` if two engines have one model.
    """
    traces = Traces(env.clock, config.traces.requests_max, role="frontend")
    service = HttpService(config.http, env, metrics, http, traces=traces)
    for engine in engines:
        show_engine(metrics, engine.info.model, engine)
        card = engine.info.card(
            "", created=int(env.clock.wall()), sampling=asdict(config.worker.sampling)
        )
        service.model_manager().add_model(card, engine)
    async with open_nursery() as watching:
        dashboard = open_own_dashboard(watching, config, env, service, engines, traces, metrics)
        tree = TaskTree(env.clock)
        service.add(
            {}, tasks_routes(tree.view, config.http.host, service.admission.keys, http.fetch)
        )
        async with open_nursery() as serving:
            with stop.starting():
                port = await service.spawn(serving)
                url = url_of(config.http.host, port, config.http.scheme)
                if dashboard is not None:
                    dashboard.serves_at(url)
                ready(FrontendReady(url, "", dashboard_url(config.http, url, "")))
            await stop.wait()
            service.stop()
        watching.cancel_scope.cancel()
