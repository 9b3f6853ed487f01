"""`/openapi.json`: what a frontend answers, as an OpenAPI 3.1 document made of the structs it uses.

The document says what is taken and what comes back; what each field does, and what becomes of all
others, says the table of fields (`protocol/openai/fields.py`). Which of them a model's engine refuses,
`/v1/models` says.
https://spec.openapis.org/oas/v3.1.1.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Annotated, Any, Final, Literal

import attrs
import msgspec
from msgspec import Raw

from ...protocol.anthropic.answers import MessageAnswer, MessagesError, TokenCount
from ...protocol.anthropic.messages import CountTokensRequest, MessagesRequest
from ...protocol.openai.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    ErrorBody,
    Model,
    ModelList,
)
from ...protocol.openai.fields import ENDPOINTS, Field
from ...protocol.openai.requests import ChatCompletionRequest, CompletionRequest
from ...protocol.openai.responses import ResponsesRequest
from ...protocol.openai.responses_answer import Response
from ...protocol.openai.tasks import (
    Detokenized,
    DetokenizeRequest,
    Embeddings,
    EmbeddingsRequest,
    TokenizeRequest,
    Tokens,
)
from ...traces.ring import ProcessView
from ...view.overview import FrontendView
from ...view.scraping import TargetGroup
from .access import OPEN

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"
_REFERENCE: Final = "#/components/schemas/{name}"


class Health(msgspec.Struct):
    """A frontend's own state."""

    status: Literal["ready", "waiting", "unavailable", "draining"]
    models: list[str]
    in_flight: int
    waiting: int


class Live(msgspec.Struct):
    """The process runs its loop."""

    status: Literal["live"]


@attrs.frozen
class _Operation:
    id: str
    summary: str
    answers: Mapping[str, Any]
    """The schema of an answer with 200, by its content type."""
    body: Any = None
    method: str = "get"
    refusals: Mapping[str, str] = attrs.field(factory=dict)
    """Other statuses than 200, and when they come."""
    error: Any = ErrorBody
    """The schema of an answer that is an error."""


_INFERENCE: Final = {
    "400": "The body is no request, or asks for what the model cannot do.",
    "404": "No such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is no JSON.",
    "429": "Requests come faster than the operator allows; `Retry-After` says when to ask again.",
    "503": "Overloaded, draining, or no worker is left; `Retry-After` says when to ask again.",
    "504": "The time for the answer was up.",
}
_EVENT_STREAM: Final = {
    "type": "string",
    "description": "With `stream: true`: one JSON object in each `data:` line, then `data: [DONE]`, or in"
    " the newer APIs the event that says so. An answer that broke ends with an error object instead.",
}


def _inference(
    name: str, summary: str, body: Any, *answers: Any, error: Any = ErrorBody
) -> _Operation:
    """An endpoint that models answer: whole, and, where there is a second schema, as events."""
    told: dict[str, Any] = dict(zip((JSON, EVENTS), answers, strict=False))
    return _Operation(name, summary, told, body, "post", _INFERENCE, error)


OPERATIONS: Final[Mapping[str, _Operation]] = {
    "/v1/chat/completions": _inference(
        "createChatCompletion",
        "Answer a chat, whole or as a stream of chunks.",
        *(ChatCompletionRequest, ChatCompletion, ChatChunk),
    ),
    "/v1/completions": _inference(
        "createCompletion",
        "Continue a prompt, whole or as a stream of chunks.",
        *(CompletionRequest, Completion, Completion),
    ),
    "/v1/embeddings": _inference(
        "createEmbedding", "Embed texts, each by itself.", EmbeddingsRequest, Embeddings
    ),
    "/tokenize": _inference(
        "tokenize",
        "The tokens of a text, or of a chat as the model sees it.",
        *(TokenizeRequest, Tokens),
    ),
    "/detokenize": _inference("detokenize", "The text of tokens.", DetokenizeRequest, Detokenized),
    "/v1/messages": _inference(
        "createMessage",
        "Answer a chat in Anthropic's form, whole or as a stream of events.",
        *(MessagesRequest, MessageAnswer, MessageAnswer),
        error=MessagesError,
    ),
    "/v1/messages/count_tokens": _inference(
        "countMessageTokens",
        "How many tokens a chat in Anthropic's form has.",
        *(CountTokensRequest, TokenCount),
        error=MessagesError,
    ),
    "/v1/responses": _inference(
        "createResponse",
        "Answer text or items, whole or as a stream of events; nothing is stored.",
        *(ResponsesRequest, Response, Response),
    ),
    "/v1/models": _Operation("listModels", "The models that are served now.", {JSON: ModelList}),
    "/v1/models/{model}": _Operation(
        "getModel", "One model.", {JSON: Model}, refusals={"404": "No such model."}
    ),
    "/health": _Operation(
        "getHealth",
        "Whether it takes requests.",
        {JSON: Health},
        refusals={"503": "It is draining, or no instance is live; the body says which."},
    ),
    "/live": _Operation("getLive", "Whether it lives.", {JSON: Live}),
    "/status": _Operation("getStatus", "What it knows of its cluster.", {JSON: FrontendView}),
    "/metrics": _Operation("getMetrics", "Metrics in Prometheus' text format.", {TEXT: str}),
    "/sd": _Operation(
        "listScrapeTargets",
        "All status ports of the cluster, for Prometheus' `http_sd_configs`.",
        {JSON: list[TargetGroup]},
        refusals={"503": "Nothing is known yet."},
    ),
    "/traces/{request_id}": _Operation(
        "getTrace", "What became of one request in this process.", {JSON: ProcessView}
    ),
    "/openapi.json": _Operation("getDocument", "This document.", {JSON: dict[str, Any]}),
}
_FIELDS: Final[Mapping[Any, Mapping[str, Field]]] = {
    OPERATIONS[path].body: fields for path, fields in ENDPOINTS.items()
}
"""Of the bodies that are told field by field."""
_PARAMETERS: Final = (
    ("x-request-id", "Comes back in the answer, and stands in logs and traces."),
    ("x-trinamo-timeout", "Seconds for the whole answer, if fewer than the server allows."),
    ("x-trinamo-worker", "The instance id of the worker that shall answer."),
)


def openapi_document(paths: Iterable[str], *, needs_key: bool) -> dict[str, Any]:
    """The document of those `paths` that it knows; a parameter is written `{name}`.

    `needs_key`: all but `OPEN` need one.
    """
    known = {path: OPERATIONS[path] for path in paths if path in OPERATIONS}
    told = [each.body for each in known.values() if each.body is not None]
    for each in known.values():
        told += each.answers.values()
    told += [ErrorBody, *(each.error for each in known.values())]
    types = list({_key(shown): shown for shown in map(_shown, told)}.values())
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    found = dict(zip(map(_key, types), schemas, strict=True))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "trinamo",
            "version": version("trinamo"),
            "summary": "OpenAI's API, and what operators ask.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            path: {each.method: _describe(path, each, found)} for path, each in known.items()
        },
        "components": {"schemas": components},
    }
    if needs_key:
        document["security"] = [{"key": []}]
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        error = {JSON: {"schema": found[_key(ErrorBody)]}}
        refused = {"description": "The key is missing, or none of this server's.", "content": error}
        for path, each in known.items():
            operation = document["paths"][path][each.method]
            if path in OPEN:
                operation["security"] = []
            else:
                operation["responses"]["401"] = refused
    return document


def _key(shown: Any) -> str:
    return str(getattr(shown, "__name__", shown)) if isinstance(shown, type) else repr(shown)


def _shown(given: Any) -> Any:
    """The type as a client sees it: a request's fields with what the table says of them."""
    rows = _FIELDS.get(given) if isinstance(given, type) else None
    if rows is None:
        return given
    told: list[Any] = []
    for each in msgspec.structs.fields(given):
        row = rows[each.name]
        kind = row.type if each.type is Raw else each.type
        default: tuple[Any, ...] = ()
        if not each.required:
            kind, default = kind | None, (None,)
        about = row.about or "It is taken, and changes nothing."
        told.append((each.name, Annotated[kind, msgspec.Meta(description=about)], *default))
    return msgspec.defstruct(
        given.__name__, told, kw_only=True, namespace={"__doc__": given.__doc__}
    )


def _describe(path: str, told: _Operation, schemas: Mapping[str, Any]) -> dict[str, Any]:
    def schema(given: Any) -> Any:
        return schemas[_key(_shown(given))]

    content = {
        kind: {"schema": _EVENT_STREAM if kind == EVENTS else schema(each)}
        for kind, each in told.answers.items()
    }
    error = {JSON: {"schema": schema(told.error)}}
    body = error if path != "/health" else content
    responses = {"200": {"description": told.summary, "content": content}}
    for status, when in told.refusals.items():
        responses[status] = {"description": when, "content": body if status == "503" else error}
    responses["default"] = {"description": "An error.", "content": error}
    found: dict[str, Any] = {
        "operationId": told.id,
        "summary": told.summary,
        "responses": responses,
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if told.body is not None:
        parameters += [
            {"name": name, "in": "header", "description": about, "schema": {"type": "string"}}
            for name, about in _PARAMETERS
        ]
    if parameters:
        found["parameters"] = parameters
    if told.body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": schema(told.body)}}}
    return found
