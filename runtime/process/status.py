"""The status ports of the processes: health, metrics and traces for operators and their tools."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import trio

from ..config.http import HttpConfig
from ..config.keys import is_loopback, url_of
from ..engines import GenerationEngine
from ..errors import ConfigError
from ..http.admission.keys import ApiKeys
from ..http.app import HealthAnswer, build_status_app, operator_routes, tasks_routes
from ..http.service import HttpService
from ..view.dashboard import Dashboard
from ..view.facts import FrontendFacts, worker_facts
from ..view.overview import describe_planes
from .runtime import Runtime
from .tasks import TaskTree

_CONNECTIONS_MAX: Final = 128
_log = logging.getLogger("trinamo.runtime")


class Describes(Protocol):
    """A part of a process that has something to say at `/health`."""

    def describe(self) -> Mapping[str, Any]:
        """Facts of this moment."""
        ...


async def open_worker_status(
    nursery: trio.Nursery,
    runtime: Runtime,
    engines: Sequence[GenerationEngine],
    parts: Mapping[str, Describes | None],
) -> str:
    """Answer on `worker.status_port`, in `nursery`; the URL, or nothing where there is no such port."""
    worker = runtime.worker
    assert worker is not None

    def check_health() -> HealthAnswer:
        state = runtime.registrar.state
        registered = "ready" if state.lease_id else "unregistered"
        return HealthAnswer(
            "draining" if worker.is_draining else registered,
            {
                "instance_id": runtime.instance_id,
                "active": worker.active_count,
                "lease_id": f"{state.lease_id:x}",
                "incarnation": state.incarnation,
                **worker_facts(
                    engines,
                    runtime.queues.tallies,
                    None if runtime.transfers is None else runtime.transfers.statistics(),
                ),
                **describe_planes(runtime),
                "settings": runtime.live.values(),
                **{name: part.describe() for name, part in parts.items() if part is not None},
            },
        )

    section = runtime.config.worker
    return await _open(nursery, runtime, check_health, section.status_host, section.status_port)


async def open_frontend_status(
    nursery: trio.Nursery,
    runtime: Runtime,
    facts: Callable[[], FrontendFacts],
    service: HttpService,
    dashboard: Dashboard | None,
) -> str:
    """Answer on `http.status_port`, in `nursery`; the URL, or nothing where there is no such port."""

    def check_health() -> HealthAnswer:
        own = facts() if dashboard is None else dashboard.facts()
        told = {**msgspec.to_builtins(own), **describe_planes(runtime)}
        status = told.pop("status")
        return HealthAnswer(status, told)

    section = runtime.config.http
    # `trinamo up` gives its one frontend no other port.
    view, places = (
        TaskTree(runtime.env.clock).view,
        dict if dashboard is None else dashboard.processes,
    )
    service.add(
        {}, tasks_routes(view, section.host, service.admission.keys, runtime.http.fetch, places)
    )
    return await _open(
        nursery, runtime, check_health, section.status_host, section.status_port, service, dashboard
    )


def advertised_status(runtime: Runtime, status_url: str) -> str:
    """What others are told of the status port at `status_url`; empty if they could not ask there."""
    told = runtime.data.advertised_url(status_url) if status_url else ""
    if status_url and not told and runtime.data.home_address:
        _log.warning(
            "the status port %s is on loopback, while peers are told %s: nobody on another machine"
            " can look at this process or scrape it, so the port is not registered; set"
            " worker.status_host and http.status_host",
            status_url,
            runtime.data.home_address,
        )
    return told


async def _open(
    nursery: trio.Nursery,
    runtime: Runtime,
    check_health: Callable[[], HealthAnswer],
    host: str,
    port: int | None,
    service: HttpService | None = None,
    dashboard: Dashboard | None = None,
) -> str:
    if port is None:
        return ""
    section = HttpConfig(host=host, port=port, connections_max=_CONNECTIONS_MAX)
    handlers = {} if dashboard is None else dashboard.handlers
    more = [] if dashboard is None else [*dashboard.routes]
    tree = TaskTree(runtime.env.clock)
    nursery.start_soon(tree.follow)
    keys = service.admission.keys if service is not None else _own_keys(nursery, runtime, host)
    places = dict if dashboard is None else dashboard.processes
    more += tasks_routes(tree.view, host, keys, runtime.http.fetch, places)
    if service is not None:
        more += operator_routes(service.full_view, service.targets)
    app = build_status_app(runtime.metrics, runtime.traces, check_health, more)
    server = runtime.http.make_server(
        app, section, metrics=runtime.metrics, rng=runtime.env.rng, handlers=handlers
    )
    return url_of(host, await nursery.start(server.serve))


def _own_keys(nursery: trio.Nursery, runtime: Runtime, host: str) -> ApiKeys | None:
    """The keys of clients, in a worker that asks for an operator's; without a usable file it has none."""
    if is_loopback(host) or not runtime.config.http.needs_key:
        return None
    try:
        keys = ApiKeys(runtime.config.http, runtime.env.rng, runtime.metrics)
    except ConfigError as error:
        _log.warning("nobody may ask for /tasks at this status port: %s", error.message)
        return None
    nursery.start_soon(keys.follow)
    return keys
