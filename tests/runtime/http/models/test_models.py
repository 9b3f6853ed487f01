"""Who serves which model, and how clients see it."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from trinamo import HttpService
from trinamo.runtime.context import Context
from trinamo.runtime.errors import (
    ModelAlreadyExistsError,
    ModelNotFoundError,
    UnsupportedEndpointError,
)
from trinamo.runtime.http.models.models import ModelAwayError, ModelKind, ModelManager
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest, ModelCard

CHAT, COMPLETIONS = ModelKind.CHAT, ModelKind.COMPLETIONS


class SilentEngine:
    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        yield Delta()


def manager(*chats: str) -> ModelManager:
    made = HttpService.builder().build().model_manager()
    for name in chats:
        made.add_chat_completions_model(name, SilentEngine(), created=1)
    return made


def test_the_first_model_is_the_default_and_another_takes_its_place() -> None:
    made = manager("a", "b")
    assert made.find("", CHAT) == made.find(None, CHAT) == made.find("a", CHAT)
    made.remove_model("a")
    assert made.find(None, CHAT)[0] == "b"
    made.remove_model("b")
    with pytest.raises(ModelAwayError, match="no model is served here"):
        made.find(None, CHAT)


async def test_a_model_that_was_served_is_away_and_not_unknown() -> None:
    """Under its name, its alias, or as the default of what nobody else does; a name never seen is."""
    made = manager("a")
    made.add_model(ModelCard(name="b", endpoint="a/b/c", chat=False), SilentEngine())
    made.set_aliases({"short": "b"})
    made.retire_model("b", math.inf)
    made.set_aliases({})
    for name in ("b", "short", None):
        with pytest.raises(ModelAwayError):
            made.find(name, COMPLETIONS)
    with pytest.raises(ModelAwayError):
        made.describe("b")
    for name, kind in (("c", COMPLETIONS), ("b", CHAT)):
        with pytest.raises(ModelNotFoundError):
            made.find(name, kind)
    assert made.find(None, CHAT)[0] == "a"
    made.add_model(ModelCard(name="b", endpoint="a/b/c", chat=False), SilentEngine())
    assert made.find("b", COMPLETIONS)[0] == "b"
    made.retire_model("b", -1)
    with pytest.raises(ModelNotFoundError):
        made.find("b", COMPLETIONS)


def test_nobody_is_unknown_while_some_have_not_said_what_they_serve() -> None:
    made = manager("a")
    made.knows_all = lambda: False
    with pytest.raises(ModelAwayError):
        made.find("b", CHAT)
    assert made.find("a", CHAT)[0] == "a"


def test_what_no_model_does_is_told_with_what_works_and_is_no_lack_of_a_model() -> None:
    """A proxy puts a model aside for which it was told 404."""
    works = "use /v1/chat/completions"
    for name, who in ((None, "no model served here answers"), ("a", "'a' does not answer")):
        with pytest.raises(
            UnsupportedEndpointError, match=f"{who} /v1/embeddings; {works}"
        ) as caught:
            manager("a").find(name, ModelKind.EMBEDDINGS)
        assert caught.value.param is None
    with pytest.raises(ModelNotFoundError, match="'b' does not exist; served here: a"):
        manager("a").find("b", ModelKind.EMBEDDINGS)


def test_removing_another_model_keeps_the_default() -> None:
    made = manager("a", "b")
    made.remove_model("b")
    assert made.find(None, CHAT)[0] == "a"
    assert (made.models(), made.has_model_any("b")) == (["a"], False)


def test_each_kind_has_a_default_of_its_own_which_another_s_card_does_not_change() -> None:
    made = manager()
    made.add_model(ModelCard(name="text", endpoint="a/b/c", chat=False), SilentEngine())
    made.add_model(ModelCard(name="both", endpoint="a/b/c"), SilentEngine())
    assert [made.find(None, kind)[0] for kind in (CHAT, COMPLETIONS)] == ["both", "text"]
    made.update_model(ModelCard(name="text", endpoint="a/b/c"), SilentEngine())
    assert [made.find(None, kind)[0] for kind in (CHAT, COMPLETIONS)] == ["both", "text"]
    made.remove_model("both")
    assert [made.find(None, kind)[0] for kind in (CHAT, COMPLETIONS)] == ["text", "text"]


def test_a_taken_name_and_an_unknown_one_are_typed_errors() -> None:
    made = manager("a")
    before = made.find("a", CHAT)
    with pytest.raises(ModelAlreadyExistsError):
        made.add_chat_completions_model("a", SilentEngine())
    assert made.find("a", CHAT) == before
    for remove in (made.remove_model, made.remove_chat_completions_model):
        with pytest.raises(ModelNotFoundError):
            remove("b")
    with pytest.raises(ModelNotFoundError):
        made.remove_completions_model("a")
    with pytest.raises(ModelNotFoundError, match="served here: a"):
        made.find("b", CHAT)


def test_the_manager_adds_to_either_endpoint_or_both() -> None:
    made = manager("chat")
    made.add_completions_model("text", SilentEngine(), created=2)
    made.add_model(ModelCard(name="both", endpoint="a/b/c", created=3), SilentEngine())
    assert made.models(CHAT) == ["chat", "both"]
    assert made.models(COMPLETIONS) == ["text", "both"]
    assert [(m.id, m.created) for m in made.describe_all().data] == [
        ("chat", 1),
        ("text", 2),
        ("both", 3),
    ]
    with pytest.raises(ModelAlreadyExistsError):
        made.add_model(ModelCard(name="text", endpoint="a/b/c"), SilentEngine())
    assert "text" not in made.models(CHAT)
    for name in ("both", "chat", "text"):
        made.remove_model(name)
        assert not made.has_model_any(name)
    with pytest.raises(ModelNotFoundError):
        made.remove_model("both")
    assert made.describe_all().data == []


async def test_models_are_listed_and_described(serve: Any) -> None:
    running = await serve()
    running.service.model_manager().add_completions_model("org/name", SilentEngine(), created=7)
    async with running.client() as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/org/name")).json()
        none = await client.get("/v1/models/other")
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["local", "org/name"]
    facts = {"object": "model", "created": 7, "owned_by": "trinamo", "root": "org/name"}
    obeyed = one.pop("supported_parameters")
    assert {"prompt", "temperature", "stop"} < set(obeyed)
    assert not {"messages", "tools", "top_k"} & set(obeyed)
    assert "tools" in listed["data"][0]["supported_parameters"]
    assert one == {"id": "org/name", **facts}
    assert (none.status_code, none.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "path_not_found"),
        ("GET", "/v1/models/", 404, "path_not_found"),
        ("POST", "/v1/audio/speech", 400, "unsupported_endpoint"),
        ("POST", "/v1/moderations", 400, "unsupported_endpoint"),
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


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("GET", "/models", "did you mean /v1/models?"),
        ("GET", "/v1/models/", "did you mean /v1/models?"),
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/audio/speech", "use /v1/embeddings"),
        ("OPTIONS", "/v1/chat/completions", "http.cors_origins"),
    ],
)
async def test_a_wrong_path_is_told_with_what_works(
    serve: Any, method: str, path: str, hint: str
) -> None:
    running = await serve()
    async with running.client() as client:
        error = (await client.request(method, path)).json()["error"]
    assert hint in error["message"]
    assert error["param"] is None


async def test_an_endpoint_that_is_switched_off_is_no_lack_of_a_model(serve: Any) -> None:
    running = await serve(enable_chat_endpoints=False)
    async with running.client() as client:
        answer = await client.post("/v1/chat/completions", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_endpoint")
    assert "use /v1/" in answer.json()["error"]["message"]


async def test_health_status_live_and_metrics_answer(serve: Any) -> None:
    running = await serve()
    async with running.client() as client:
        health = await client.get("/health")
        status = await client.get("/status")
        live = await client.get("/live")
        metrics = await client.get("/metrics")
    assert health.json() == {"status": "ready", "models": ["local"], "in_flight": 0, "waiting": 0}
    assert status.json() == {
        "status": "ready",
        "in_flight": 0,
        "waiting": 0,
        "models": [
            {
                "name": "local",
                "aliases": [],
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
