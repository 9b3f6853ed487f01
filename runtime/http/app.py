"""The routes of a frontend, and nothing else. Every answer that is an error has OpenAI's body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..config.http import HttpConfig
from ..errors import LocalProtocolError, RequestError, TrinamoError
from ..logs.access import AccessLog
from ..metrics.metrics import CONTENT_TYPE, Metrics
from ..traces.ring import Traces
from ..view.overview import FrontendView
from ..view.scraping import ScrapeTargets
from .admission.admission import Admission
from .admission.cors import AllowsOrigins
from .chat import Inference
from .exchanges import Handler
from .models.models import ModelManager
from .reading import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from .routes.access import OUTCOME, NeedsKey, TellsRequests
from .routes.openapi import openapi_document
from .status import MethodNotAllowedError, PathNotFoundError, answer_error

_encode = msgspec.json.Encoder().encode


def build_handlers(
    manager: ModelManager, admission: Admission, config: HttpConfig, traces: Traces
) -> dict[tuple[bytes, bytes], Handler]:
    """What answers inference requests, by method and path, on the endpoints that `config` enables."""
    endpoints = [EMBEDDINGS, RESPONSES]
    if config.enable_chat_endpoints:
        endpoints.append(CHAT)
    if config.enable_cmpl_endpoints:
        endpoints.append(COMPLETIONS)
    return {
        (b"POST", each.path.encode()): Inference(each, manager, admission, config, traces)
        for each in endpoints
    }


def build_app(
    manager: ModelManager,
    admission: Admission,
    handlers: Mapping[tuple[bytes, bytes], Handler],
    *,
    traces: Traces,
    view: Callable[[], FrontendView],
    targets: ScrapeTargets | None = None,
) -> Starlette:
    """The frontend's application over the models of `manager`.

    `handlers` answer before it is asked; it knows that their paths take no other method. `view`, which must not wait, is what `/status` tells; with `targets` there is `/sd`.
    """

    async def list_models(_: Request) -> Response:
        return json_response(manager.describe_all())

    async def describe_model(request: Request) -> Response:
        return json_response(manager.describe(request.path_params["model"]))

    async def health(_: Request) -> Response:
        # A plane that is away is no reason to take a frontend out: known workers are still asked.
        told = status_of(manager, admission)
        return json_response(
            {
                "status": told,
                "models": manager.models(),
                "in_flight": admission.in_flight,
                "waiting": admission.queue.length,
            },
            200 if told == "ready" else 503,
        )

    routes = [
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", describe_model),
        Route("/health", health),
        status_route(view),
        Route("/live", live),
        metrics_route(manager.metrics),
        trace_route(traces),
    ]
    if targets is not None:
        routes.append(sd_route(targets))
    routes += handled_routes(handlers)
    routes.append(_document_route(routes, needs_key=admission.keys is not None))
    built = build_starlette(routes)
    if admission.keys is not None:
        built.add_middleware(NeedsKey, keys=admission.keys)
    built.add_middleware(TellsRequests, access=AccessLog(manager.env.clock))
    if admission.cors is not None:
        # Outermost: a preflight brings no key, and what is refused within is to be read, too.
        built.add_middleware(AllowsOrigins, cors=admission.cors)
    return built


def handled_routes(handlers: Iterable[tuple[bytes, bytes]]) -> list[Route]:
    """The places of `handlers`, by method and path, which a server asks itself: other methods get a 405."""

    async def answered_before(_: Request) -> Response:
        raise LocalProtocolError("a server asks its handlers before the application")

    return [
        Route(path.decode(), answered_before, methods=[method.decode()])
        for method, path in handlers
    ]


def status_of(manager: ModelManager, admission: Admission) -> str:
    """A frontend's own state: `draining`, `ready`, or `unavailable` while nobody could answer."""
    if admission.is_leaving:
        return "draining"
    return "ready" if manager.has_instance else "unavailable"


async def live(_: Request) -> Response:
    """The process runs its loop; whether it is of use is what `/health` says."""
    return json_response({"status": "live"})


def metrics_route(metrics: Metrics) -> Route:
    """`GET /metrics` in Prometheus' text format."""

    async def expose(_: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return Route("/metrics", expose)


def status_route(view: Callable[[], FrontendView]) -> Route:
    """`GET /status`: what `view`, which must not wait, tells."""

    async def tell(_: Request) -> Response:
        return json_response(view())

    return Route("/status", tell)


def sd_route(targets: ScrapeTargets) -> Route:
    """`GET /sd`: whom Prometheus should scrape."""

    async def list_targets(request: Request) -> Response:
        return json_response(await targets.groups(request.headers.get("host", "")))

    return Route("/sd", list_targets)


def _document_route(routes: Sequence[Route], *, needs_key: bool) -> Route:
    """`GET /openapi.json`: which of the routes there are, and what they take and answer."""
    path = "/openapi.json"
    paths = [each.path.replace(":path}", "}") for each in routes]

    # When it is asked for: most frontends never are, and it takes some milliseconds.
    @cache
    def document() -> Response:
        return json_response(openapi_document([*paths, path], needs_key=needs_key))

    async def describe(_: Request) -> Response:
        return document()

    return Route(path, describe)


def trace_route(traces: Traces) -> Route:
    """`GET /traces/{id}`: what became of one request here, for whoever knows one of its ids."""

    async def find(request: Request) -> Response:
        return json_response(traces.find(request.path_params["request_id"]))

    return Route("/traces/{request_id}", find)


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(_encode(value), status, media_type="application/json")


def build_starlette(routes: Sequence[BaseRoute]) -> Starlette:
    """An application whose errors all have OpenAI's body."""
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        HTTPException: _answer_http_error,
        TrinamoError: _answer_error,
        Exception: _answer_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    # A redirect to a path with or without a slash would lose the body of a POST on the way.
    app.router.redirect_slashes = False
    return app


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """What starlette's router says, in our words."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    ours: RequestError
    if error.status_code == 405:
        ours = MethodNotAllowedError(f"{request.method} is not allowed on {path}")
    elif error.status_code == 404:
        ours = PathNotFoundError(f"there is nothing at {path}")
    else:
        ours = RequestError(error.detail)
    response = await _answer_error(request, ours)
    response.headers.update(error.headers or {})
    return response


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = answer_error(error)
    request.scope[OUTCOME] = answer.code
    response = Response(answer.to_body(), answer.status, media_type="application/json")
    response.raw_headers.extend(answer.headers)
    return response
