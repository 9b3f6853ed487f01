"""`/openapi.json` is a valid OpenAPI 3.1 document of every route, and real answers fit it."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from tests.runtime.small_cluster import open_small_cluster
from trinamo import HttpService
from trinamo.runtime.http.routes.openapi import OPERATIONS, openapi_document

UNDOCUMENTED = ("/dashboard",)
"""Pages for people, and what only they ask for."""


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raise if `value` does not fit a schema of the document."""
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(
        value
    )


def answer_of(document: dict[str, Any], path: str, method: str = "get") -> dict[str, Any]:
    content = document["paths"][path][method]["responses"]["200"]["content"]
    found: dict[str, Any] = content["application/json"]["schema"]
    return found


def test_the_document_is_valid() -> None:
    OpenAPIV31SpecValidator(openapi_document(OPERATIONS, needs_key=True)).validate()


def test_a_document_that_is_not_is_found() -> None:
    document = openapi_document(OPERATIONS, needs_key=True)
    del document["paths"]["/v1/models/{model}"]["get"]["parameters"]

    with pytest.raises(Exception, match="model"):
        OpenAPIV31SpecValidator(document).validate()


def test_what_needs_a_key_says_so() -> None:
    paths = openapi_document(OPERATIONS, needs_key=True)["paths"]

    assert "401" in paths["/v1/models"]["get"]["responses"]
    assert paths["/health"]["get"]["security"] == []
    assert "security" not in openapi_document(OPERATIONS, needs_key=False)


def test_every_route_of_a_frontend_is_in_it() -> None:
    app = HttpService.builder().build().app
    routes = [
        route.path.replace(":path}", "}")
        for route in app.routes
        if isinstance(route, Route) and not route.path.startswith(UNDOCUMENTED)
    ]

    assert [path for path in routes if path not in OPERATIONS] == []


def test_an_endpoint_that_is_switched_off_is_not() -> None:
    document = openapi_document(["/v1/models", "/health"], needs_key=False)

    assert set(document["paths"]) == {"/v1/models", "/health"}


def test_what_structs_decode_later_has_its_own_type() -> None:
    schemas = openapi_document(OPERATIONS, needs_key=True)["components"]["schemas"]

    chat = schemas["ChatCompletionRequest"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["messages"]["items"] == {"$ref": "#/components/schemas/Message"}
    prompt = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert {"type": "string"} in prompt
    assert [each["type"] for each in prompt] == ["string", "array"]
    assert "maximum" in str(chat["properties"]["temperature"])


async def test_what_a_real_frontend_takes_and_answers_fits_it() -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with open_small_cluster() as cluster:
        document = (await cluster.http.get("/openapi.json")).json()
        request = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
        check(document, request["content"]["application/json"]["schema"], body)
        chat = (await cluster.http.post("/v1/chat/completions", json=body)).json()
        check(document, answer_of(document, "/v1/chat/completions", "post"), chat)
        text = (await cluster.ask()).json()
        check(document, answer_of(document, "/v1/completions", "post"), text)
        for path in ("/v1/models", "/health", "/live", "/status", "/sd", "/openapi.json"):
            answer = (await cluster.http.get(path)).json()
            check(document, answer_of(document, path), answer)
        model = (await cluster.http.get("/v1/models/small")).json()
        check(document, answer_of(document, "/v1/models/{model}"), model)
        missing = (await cluster.http.get("/v1/models/none")).json()
        check(document, {"$ref": "#/components/schemas/ErrorBody"}, missing)
        trace = (await cluster.http.get(f"/traces/{chat['id']}")).json()
        check(document, answer_of(document, "/traces/{request_id}"), trace)

    OpenAPIV31SpecValidator(document).validate()
    with pytest.raises(jsonschema.ValidationError):
        check(document, answer_of(document, "/health"), {"status": "fine"})
