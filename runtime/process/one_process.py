"""Engines and HTTP in one process, with a dashboard, and nothing else: no etcd, no NATS, no worker.

For an engine on one machine, and for trying one. What a request does here it does in a cluster, but
for the way from the frontend to the worker (`roles.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config.config import Config
from ..config.keys import url_of
from ..engines.generation import GenerationEngine, show_engine
from ..env import Env
from ..http.metrics import FrontendMetrics
from ..http.service import HttpService
from ..http.status_app import tasks_routes
from ..http.transport import HttpTransport
from ..nurseries import open_nursery
from ..traces.ring import Traces
from .frontend.dashboard import dashboard_url, open_own_dashboard
from .roles import FrontendReady
from .stopping import StopRequest
from .tasks import TaskTree


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

    `ready` is called once HTTP is answered. Raises `ConfigError` if it cannot listen, and
    `ModelAlreadyExistsError` if two engines have one model.
    """
    traces = Traces(env.clock, config.traces.requests_max, role="frontend")
    service = HttpService(config.http, env, metrics, http, traces=traces)
    for engine in engines:
        show_engine(metrics, engine.info.model, engine)
        card = engine.info.card("", created=int(env.clock.wall()))
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
