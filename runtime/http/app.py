"""The routes of a frontend, and those of a status port; every answer that is an error has OpenAI's body.

A status port has `/health`, `/live`, `/metrics`, `/traces` and `/requests`, without any model; a
frontend's `/status` and `/sd`, too. Both are served by the same server code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import attrs
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..config.http import HttpConfig
from ..config.keys import is_loopback
from ..errors import (
    LocalProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
    UnsupportedEndpointError,
)
from ..logs.access import AccessLog
from ..metrics.metrics import CONTENT_TYPE, Metrics
from ..protocol.openai.answers import Model
from ..traces.ring import Traces, view_requests
from ..view.overview import FrontendView
from ..view.requests import ask_places
from ..view.scraping import ScrapeTargets
from .admission.admission import Admission
from .admission.cors import PREFIX, AllowsOrigins
from .admission.keys import ApiKeys
from .chat import Inference
from .comments import Comments
from .endpoints import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
)
from .exchanges import Handler
from .models.models import ModelManager
from .routes.access import OUTCOME, NeedsKey, TellsRequests
from .routes.openapi import openapi_document
from .status import ForbiddenError, MethodNotAllowedError, PathNotFoundError, answer_error
from .transport import Fetch

_encode = msgspec.json.Encoder().encode
_OF_OPENAI: Final = tuple(
    f"/v1/{name}"
    for name in (
        *("chat/completions", "completions", "responses", "messages", "embeddings"),
        *("audio/", "images/", "videos", "moderations", "rerank", "files"),
        *("uploads", "batches", "fine_tuning/", "assistants", "threads", "vector_stores"),
    )
)
"""What other servers of this API have. Proxies that are told 404 put the model aside for everybody."""
OUT: Final = frozenset(("draining", "unavailable"))
"""Of what a process says at `/health`: in these states balancers are to ask another one."""


def build_handlers(
    manager: ModelManager,
    admission: Admission,
    comments: Comments,
    config: HttpConfig,
    traces: Traces,
) -> dict[tuple[bytes, bytes], Handler]:
    """What answers inference requests, by method and path, on the endpoints that `config` enables."""
    endpoints = [EMBEDDINGS, TOKENIZE, DETOKENIZE]
    if config.enable_chat_endpoints:
        endpoints += [CHAT, RESPONSES, MESSAGES, COUNT_TOKENS]
    if config.enable_cmpl_endpoints:
        endpoints.append(COMPLETIONS)
    return {
        (b"POST", each.path.encode()): Inference(each, manager, admission, comments, config, traces)
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

    `handlers` answer before it is asked; it knows that their paths take no other method. `view`,
    which must not wait, is what `/status` tells; with `targets` there is `/sd`.
    """

    def describe_model(request: Request) -> Model:
        model = request.path_params["model"]
        if not model:
            raise _nothing_at(request)
        return manager.describe(model)

    def check_health() -> HealthAnswer:
        # A plane that is away is no reason to take a frontend out: known workers are still asked.
        facts = {
            "models": manager.models(),
            "in_flight": admission.in_flight,
            "waiting": admission.queue.length,
        }
        return HealthAnswer(admission.status(has_instance=manager.has_instance), facts)

    # When it is asked for: most frontends never are, and it takes some milliseconds.
    @cache
    def document() -> dict[str, Any]:
        paths = [each.path.replace(":path}", "}") for each in routes]
        return openapi_document(paths, needs_key=admission.keys is not None)

    routes = [
        _telling("/v1/models", lambda _: manager.describe_all()),
        _telling("/v1/models/{model:path}", describe_model),
        *_process_routes(manager.metrics, traces, check_health),
        *operator_routes(view, targets),
        *handled_routes(handlers),
        _telling("/openapi.json", lambda _: document()),
    ]
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


def _telling(path: str, find: Callable[[Request], Any]) -> Route:
    """`GET` of what `find`, which must not wait, says."""

    async def tell(request: Request) -> Response:
        return json_response(find(request))

    return Route(path, tell)


def _process_routes(
    metrics: Metrics, traces: Traces, check_health: Callable[[], HealthAnswer]
) -> list[Route]:
    """What every process tells: whether it is of use, that it runs its loop, metrics, one request."""

    async def health(_: Request) -> Response:
        found = check_health()
        return json_response(
            {"status": found.status, **found.facts}, 503 if found.status in OUT else 200
        )

    async def expose(_: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return [
        Route("/health", health),
        _telling("/live", lambda _: {"status": "live"}),
        Route("/metrics", expose),
        _telling("/traces/{request_id}", lambda r: traces.find(r.path_params["request_id"])),
    ]


def operator_routes(view: Callable[[], FrontendView], targets: ScrapeTargets | None) -> list[Route]:
    """`GET /status`, what a frontend knows, and `GET /sd`, whom Prometheus should scrape."""
    routes = [_telling("/status", lambda _: view())]
    if targets is not None:

        async def list_targets(request: Request) -> Response:
            return json_response(await targets.groups(request.headers.get("host", "")))

        routes.append(Route("/sd", list_targets))
    return routes


# --- status ports ---


@attrs.frozen
class HealthAnswer:
    """What `/health` says: the status in a word, 503 if it is `OUT`, else 200, and any facts."""

    status: str
    facts: Mapping[str, Any] = attrs.field(factory=dict)


def build_status_app(
    metrics: Metrics,
    traces: Traces,
    check_health: Callable[[], HealthAnswer],
    more: Sequence[BaseRoute] = (),
) -> Starlette:
    """The application of a status port; `check_health` is called per question and must not wait.

    `more` are routes that a role adds.
    """
    return build_starlette(
        [
            *_process_routes(metrics, traces, check_health),
            _telling("/traces", lambda _: traces.recent()),
            _telling("/requests", lambda _: view_requests(traces)),
            *more,
        ]
    )


def tasks_routes(
    view: Callable[[], Any],
    host: str,
    keys: ApiKeys | None,
    fetch: Fetch,
    places: Callable[[], Mapping[str, str]] = dict,
) -> list[Route]:
    """`GET /tasks`: what `view` tells of all tasks; `/tasks/NAME`: what the process there tells.

    `places` are where processes are, by name.

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
        told, away = await ask_places(fetch, "/tasks", msgspec.Raw, {url: "the process"})
        if away:
            raise UnavailableError(away[0])
        return json_response(told[0][1])

    return [Route("/tasks", tell), Route("/tasks/{name:path}", tell)]


# --- answers ---


def json_response(value: Any, status: int = 200) -> Response:
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
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    ours: RequestError
    if error.status_code == 405:
        asks_first = request.method == "OPTIONS" and path.startswith(PREFIX)
        hint = "; a page may ask whose origin stands in http.cors_origins" if asks_first else ""
        ours = MethodNotAllowedError(f"{request.method} is not allowed on {path}{hint}")
    elif error.status_code == 404:
        ours = _nothing_at(request)
    else:
        ours = RequestError(error.detail)
    response = await _answer_error(request, ours)
    response.headers.update(error.headers or {})
    return response


def _nothing_at(request: Request) -> RequestError:
    """Why a path is none: it is written otherwise, nobody does that here, or it is no path at all."""
    path = request.url.path
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    for meant in (path.rstrip("/"), f"/v1{path.rstrip('/')}"):
        if any(each.path == meant for each in routes):
            return PathNotFoundError(f"there is nothing at {path[:200]}; did you mean {meant}?")
    works = [each.path for each in routes if "POST" in (each.methods or ())]
    if works and path.startswith(_OF_OPENAI):
        return UnsupportedEndpointError.of("this server", path[:200], works)
    return PathNotFoundError(f"there is nothing at {path[:200]}")


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = answer_error(error)
    request.scope[OUTCOME] = answer.code
    response = Response(answer.to_body(), answer.status, media_type="application/json")
    response.raw_headers.extend(answer.headers)
    return response
