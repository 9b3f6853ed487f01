"""A status port: `/health`, `/live`, `/metrics`, `/traces` and `/requests`, without any model.

A frontend's has `/status` and `/sd`, too.

Served by the same server code as the frontend: `Server(build_status_app(…), …)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..config.keys import is_loopback
from ..errors import UnavailableError
from ..metrics.metrics import Metrics
from ..traces.ring import Traces, view_requests
from ..view.overview import FrontendView
from ..view.requests import ask_places
from ..view.scraping import ScrapeTargets
from .admission.keys import ApiKeys
from .app import (
    build_starlette,
    json_response,
    live,
    metrics_route,
    sd_route,
    status_route,
    trace_route,
)
from .status import ForbiddenError, PathNotFoundError
from .transport import Fetch


@attrs.frozen
class Health:
    """What `/health` says: 200 if ready, else 503, with the status in a word and any facts."""

    is_ready: bool
    status: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)


def build_status_app(
    metrics: Metrics,
    traces: Traces,
    check_health: Callable[[], Health],
    more: Sequence[BaseRoute] = (),
) -> Starlette:
    """The application of a status port; `check_health` is called per question and must not wait.

    `more` are routes that a role adds.
    """

    async def health(_: Request) -> Response:
        found = check_health()
        return json_response(
            {"status": found.status, **found.facts}, 200 if found.is_ready else 503
        )

    async def recent(_: Request) -> Response:
        return json_response(traces.recent())

    async def requests(_: Request) -> Response:
        return json_response(view_requests(traces))

    routes = [
        Route("/health", health),
        Route("/live", live),
        metrics_route(metrics),
        Route("/traces", recent),
        Route("/requests", requests),
        trace_route(traces),
        *more,
    ]
    return build_starlette(routes)


def operator_routes(view: Callable[[], FrontendView], targets: ScrapeTargets | None) -> list[Route]:
    """What a frontend's status port tells besides: all that it knows, and whom to scrape."""
    return [status_route(view), *([] if targets is None else [sd_route(targets)])]


def tasks_routes(
    view: Callable[[], Any],
    host: str,
    keys: ApiKeys | None,
    fetch: Fetch,
    places: Callable[[], Mapping[str, str]] = dict,
) -> list[Route]:
    """`GET /tasks`: what `view` tells of all tasks; `/tasks/NAME`: what the process at that of `places` tells.

    A server at `host` on loopback tells it everybody, another one whoever brings an operator's key,
    which is handed on to nobody.
    """

    async def tell(request: Request) -> Response:
        if not is_loopback(host):
            if keys is None:
                raise ForbiddenError(
                    "beyond loopback this needs the key of an operator, and this process has no keys:"
                    " http.api_keys_file or http.api_key_env"
                )
            keys.check_operator(request.headers.raw)
        name = request.path_params.get("name")
        if name is None:
            return json_response(view())
        if not (url := places().get(name)):
            raise PathNotFoundError("no process by that name tells its tasks")
        told, away = await ask_places(fetch, "/tasks", msgspec.Raw, {url: "the process"}, {})
        if away:
            raise UnavailableError(away[0])
        return json_response(told[0][1])

    return [Route("/tasks", tell), Route("/tasks/{name:path}", tell)]
