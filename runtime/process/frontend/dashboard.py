"""Where the dashboard of a frontend is served: by default where nobody but this machine reaches it.

It names processes, addresses and requests, which is more than a client of the API should know. So a
listener that faces a network has it only if `http.dashboard` says so, while the status port, which
operators bind where they want it, has it unless it is switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from ...config.config import Config
from ...config.http import HttpConfig
from ...config.keys import is_loopback
from ...engines import GenerationEngine
from ...env import Env
from ...http.metrics import FrontendMetrics
from ...http.service import HttpService
from ...traces.ring import Traces
from ...view.dashboard import Dashboard
from ...view.facts import FrontendFacts, frontend_facts
from ...view.looks import Gatherer, Place, look_at_engines
from ...view.overview import PREFIX
from ..runtime import Runtime


def open_dashboard(
    nursery: trio.Nursery,
    runtime: Runtime,
    service: HttpService,
    facts: Callable[[], FrontendFacts],
    place: Place,
) -> Dashboard | None:
    """Have `nursery` run the dashboard, served by `service` if it may be; None: nobody would serve it."""
    section = runtime.config.http
    if not (_is_public(section) or _is_on_status_port(section)):
        return None
    dashboard = Dashboard(
        runtime.config,
        runtime.env.clock,
        look=Gatherer(
            runtime.config, runtime.control, service.full_view, place, service.http.fetch
        ).look,
        view=service.view,
        facts=facts,
        traces=runtime.traces,
        place=place,
        fetch=service.http.fetch,
    )
    if _is_public(section):
        service.add(dashboard.handlers, dashboard.routes)
    nursery.start_soon(dashboard.run)
    return dashboard


def open_own_dashboard(
    nursery: trio.Nursery,
    config: Config,
    env: Env,
    service: HttpService,
    engines: Sequence[GenerationEngine],
    traces: Traces,
    metrics: FrontendMetrics,
) -> Dashboard | None:
    """As `open_dashboard`, of a process that has engines and no cluster around it."""
    if not _is_public(config.http):
        return None
    dashboard = Dashboard(
        config,
        env.clock,
        look=partial(look_at_engines, service.view, engines),
        view=service.view,
        facts=lambda: frontend_facts(service.view(), metrics, engines=engines),
        traces=traces,
        place=Place(name="this process"),
        fetch=service.http.fetch,
    )
    service.add(dashboard.handlers, dashboard.routes)
    nursery.start_soon(dashboard.run)
    return dashboard


def dashboard_url(section: HttpConfig, url: str, status_url: str) -> str:
    """Where it is, of a frontend that answers at `url` and `status_url`; empty: nowhere."""
    if _is_public(section):
        return f"{url}{PREFIX}"
    return f"{status_url}{PREFIX}" if _is_on_status_port(section) else ""


def _is_public(section: HttpConfig) -> bool:
    """Whether the listener of the API has it."""
    if section.dashboard is None:
        # A browser sends no key of its own accord.
        return is_loopback(section.host) and not section.needs_key
    return section.dashboard


def _is_on_status_port(section: HttpConfig) -> bool:
    return section.status_port is not None and section.dashboard is not False
