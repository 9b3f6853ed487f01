"""What the processes of a cluster do: a worker, or a frontend, from start to orderly end.

The command line, a program that has an engine of its own (`trinamo.serve_worker`) and the simulator
call the same functions. They differ in the transports, in what asks the process to stop
(`stopping.py`), and in what they do once it is ready. Signals, output and the choice of an engine
are theirs.

What a worker and a frontend consist of stands here, in the order in which it starts. Each part is a
module in `worker/` or `frontend/`, which does what it needs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
from msgspec.structs import replace

from ..config.config import Config
from ..config.keys import url_of
from ..engines import GenerationEngine
from ..env import Env
from ..http.metrics import FrontendMetrics
from ..http.service import HttpService, check_files
from ..nurseries import open_nursery
from ..view.facts import FrontendFacts, frontend_facts
from ..view.looks import Place
from ..view.overview import Overview, overview
from ..view.scraping import ScrapeTargets
from ..worker.metrics import WorkerMetrics
from ..worker.reports import keeps_blocks
from .frontend.dashboard import dashboard_url, open_dashboard
from .frontend.models import follow_models
from .frontend.publishing import publish_frontend
from .frontend.upstreams import DirectUpstreams, alone
from .opening import open_runtime
from .runtime import Runtime
from .status import Describes, advertised_status, open_frontend_status, open_worker_status
from .stopping import StopRequest
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
    there is one, is answered until the end. `place` is what the dashboard says of where it stands. Raises `ConfigError`
    or `ConnectError`, with a sentence saying what to do, if it cannot start.
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
        service = _http_service(runtime, metrics, look)
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
                    watching.start_soon(publish_frontend, runtime, url, status)
                page = dashboard_url(config.http, url, status or status_url)
                address = runtime.data.home_address
                ready(FrontendReady(url, status or status_url, page, address))
            await stop.wait()
            env.note("frontend.told")
            service.stop()
        watching.cancel_scope.cancel()
    env.note("frontend.left")


def _http_service(
    runtime: Runtime, metrics: FrontendMetrics, look: Callable[[], Overview]
) -> HttpService:
    settings = runtime.live.values
    service = HttpService(
        runtime.config.http,
        runtime.env,
        metrics,
        runtime.http,
        lambda: replace(look(), settings=settings()),
        runtime.traces,
        ScrapeTargets(runtime.control, runtime.env.clock),
    )
    runtime.live.listen(lambda found: service.tune(found.http))
    return service
