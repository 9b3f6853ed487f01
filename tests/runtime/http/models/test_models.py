"""Who serves which model, and how clients see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from trinamo.runtime.context import Context
from trinamo.runtime.errors import ModelAlreadyExistsError, ModelNotFoundError
from trinamo.runtime.http import HttpService, ModelEngines
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest, ModelCard


class SilentEngine:
    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        yield Delta()


def test_the_first_model_is_the_default_and_another_takes_its_place() -> None:
    engines: ModelEngines[int] = ModelEngines()
    engines.add("a", 1)
    engines.add("b", 2)
    assert engines.get("") == engines.get(None) == ("a", 1)
    engines.remove("a")
    assert (engines.default, engines.get(None)) == ("b", ("b", 2))
    engines.remove("b")
    assert engines.default is None
    with pytest.raises(ModelNotFoundError, match="no model is served here"):
        engines.get(None)


def test_removing_another_model_keeps_the_default() -> None:
    engines: ModelEngines[int] = ModelEngines()
    engines.add("a", 1)
    engines.add("b", 2)
    engines.remove("b")
    assert engines.default == "a"
    assert (engines.list(), engines.contains("b"), len(engines)) == (["a"], False, 1)


def test_a_taken_name_and_an_unknown_one_are_typed_errors() -> None:
    engines: ModelEngines[int] = ModelEngines()
    engines.add("a", 1)
    with pytest.raises(ModelAlreadyExistsError):
        engines.add("a", 2)
    assert engines.get("a") == ("a", 1)
    with pytest.raises(ModelNotFoundError):
        engines.remove("b")
    with pytest.raises(ModelNotFoundError, match="served here: a"):
        engines.get("b")


def test_the_manager_adds_to_either_endpoint_or_both() -> None:
    manager = HttpService.builder().build().model_manager()
    manager.add_chat_completions_model("chat", SilentEngine(), created=1)
    manager.add_completions_model("text", SilentEngine(), created=2)
    manager.add_model(ModelCard(name="both", endpoint="a/b/c", created=3), SilentEngine())
    assert manager.list_chat_completions_models() == ["chat", "both"]
    assert manager.list_completions_models() == ["text", "both"]
    assert [(m.id, m.created) for m in manager.describe_all().data] == [
        ("chat", 1),
        ("both", 3),
        ("text", 2),
    ]
    with pytest.raises(ModelAlreadyExistsError):
        manager.add_model(ModelCard(name="text", endpoint="a/b/c"), SilentEngine())
    assert not manager.state().chat_completion_engines.contains("text")
    for name in ("both", "chat", "text"):
        manager.remove_model(name)
        assert not manager.has_model_any(name)
    with pytest.raises(ModelNotFoundError):
        manager.remove_model("both")
    assert manager.describe_all().data == []
    assert manager.state().created == {}


async def test_models_are_listed_and_described(serve: Any) -> None:
    running = await serve()
    running.service.model_manager().add_completions_model("org/name", SilentEngine(), created=7)
    async with running.client() as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/org/name")).json()
        none = await client.get("/v1/models/other")
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["local", "org/name"]
    assert one == {"id": "org/name", "object": "model", "created": 7, "owned_by": "trinamo"}
    assert (none.status_code, none.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "path_not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("POST", "/v1/chat/completions/", 404, "path_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
async def test_wrong_paths_and_methods_have_openai_s_error_body(
    serve: Any, method: str, path: str, status: int, code: str
) -> None:
    running = await serve()
    async with running.client() as client:
        response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    if status == 405:
        assert response.headers["allow"]


async def test_health_status_live_and_metrics_answer(serve: Any) -> None:
    running = await serve()
    async with running.client() as client:
        health = await client.get("/health")
        status = await client.get("/status")
        live = await client.get("/live")
        metrics = await client.get("/metrics")
    assert health.json() == {"status": "ready", "models": ["local"], "in_flight": 0}
    assert status.json() == {
        "status": "ready",
        "in_flight": 0,
        "models": [
            {
                "name": "local",
                "endpoint": "a/b/c",
                "engine": "",
                "context_tokens_max": 0,
                "refused_cards": 0,
            }
        ],
        "cluster": None,
    }
    assert live.json() == {"status": "live"}
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'trinamo_connections{kind="http"} 1.0' in metrics.text
