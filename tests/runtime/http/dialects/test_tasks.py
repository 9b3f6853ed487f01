"""`/tokenize`, `/detokenize` and `/v1/embeddings` of own engines."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.runtime.http.running import LocalEngine
from tests.runtime.http.test_clients import leaves_generators, trio_client
from trinamo.runtime.context import Context
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    Feature,
    FinishReason,
    GenerateRequest,
    ModelCard,
    Task,
)

VECTOR = (0.5, -1.25)


async def do_task(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
    """An engine with a token for each character."""
    ids = list(map(ord, request.text)) if request.token_ids is None else request.token_ids
    done = {
        Task.TOKENIZE: Delta(prompt_token_ids=ids),
        Task.DETOKENIZE: Delta("".join(map(chr, ids))),
        Task.EMBED: Delta(raw=struct.pack("<2f", VECTOR[0], len(ids))),
    }[request.task]
    yield Delta(
        done.text,
        finish_reason=FinishReason.STOP,
        prompt_tokens=len(ids),
        raw=done.raw,
        prompt_token_ids=done.prompt_token_ids,
    )


async def post(running: Any, path: str, **body: Any) -> Any:
    async with running.client() as client:
        return await client.post(path, json={"model": "local", **body})


async def test_a_text_and_a_chat_are_tokenized(serve: Any) -> None:
    running = await serve(do_task)
    answer = await post(running, "/tokenize", prompt="ab")
    assert answer.json() == {"count": 2, "max_model_len": 1 << 20, "tokens": [97, 98]}
    messages = [{"role": "user", "content": "c"}]
    assert (await post(running, "/tokenize", messages=messages)).json()["tokens"] == [99]
    for wrong in ({}, {"prompt": "a", "messages": messages}):
        assert (await post(running, "/tokenize", **wrong)).status_code == 400
    assert running.value("requests_total", model="local", endpoint="tokenize", outcome="success")
    await running.wait_quiet()


async def test_tokens_are_detokenized(serve: Any) -> None:
    running = await serve(do_task)
    assert (await post(running, "/detokenize", tokens=[97, 98])).json() == {"prompt": "ab"}
    for wrong in ("ab", [], [-1], [[1]]):
        assert (await post(running, "/detokenize", tokens=wrong)).status_code == 400
    await running.wait_quiet()


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("abc", [3]), (["a", "bc"], [1, 2]), ([1, 2], [2]), ([[1], [2, 3, 4]], [1, 3])],
)
async def test_each_input_is_embedded(serve: Any, given: Any, lengths: list[int]) -> None:
    running = await serve(do_task)
    answer = (await post(running, "/v1/embeddings", input=given)).json()
    assert [each["embedding"] for each in answer["data"]] == [[0.5, float(n)] for n in lengths]
    assert [each["index"] for each in answer["data"]] == list(range(len(lengths)))
    assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    packed = await post(running, "/v1/embeddings", input=given, encoding_format="base64")
    told = packed.json()["data"][0]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(told)) == (0.5, lengths[0])
    await running.wait_quiet()


@leaves_generators
async def test_the_official_client_reads_embeddings(serve: Any) -> None:
    running = await serve(do_task)
    async with trio_client(running) as client:
        answer = await client.embeddings.create(model="local", input=["a", "bc"])
    assert [each.embedding for each in answer.data] == [[0.5, 1.0], [0.5, 2.0]]
    assert answer.usage.total_tokens == 3
    await running.wait_quiet()


async def test_as_many_inputs_are_embedded_as_are_configured(serve: Any) -> None:
    """By default as many as libraries send at a time."""
    running = await serve(do_task)
    answer = (await post(running, "/v1/embeddings", input=["a", "bc"] * 1024)).json()
    assert [each["embedding"][1] for each in answer["data"]] == [1.0, 2.0] * 1024
    assert [each["index"] for each in answer["data"]] == list(range(2048))

    narrow = await serve(do_task, embedding_inputs_max=2)
    assert (await post(narrow, "/v1/embeddings", input=["a", "b"])).status_code == 200
    refused = (await post(narrow, "/v1/embeddings", input=["a", "b", "c"])).json()["error"]
    assert refused["param"] == "input"
    assert "more than 2 prompts" in refused["message"]
    assert len(narrow.engine.requests) == 2
    await running.wait_quiet()


@pytest.mark.parametrize(
    "body", [{}, {"input": []}, {"input": "a", "dimensions": 3}, {"input": ["a"] * 2049}]
)
async def test_what_cannot_be_embedded_is_refused(serve: Any, body: dict[str, Any]) -> None:
    running = await serve(do_task)
    assert (await post(running, "/v1/embeddings", **body)).status_code == 400
    assert not running.engine.requests


async def test_a_model_without_the_feature_has_no_such_endpoint(serve: Any) -> None:
    running = await serve(do_task)
    features: list[str] = [
        each for each in Feature if each not in (Feature.EMBEDDINGS, Feature.TOKENIZE)
    ]
    card = ModelCard(name="plain", endpoint="a/b/d", features=features)
    running.service.model_manager().add_model(card, LocalEngine(do_task))
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = await post(running, path, **body | {"model": "plain"})
        assert answer.status_code == 400
        assert f"the model 'plain' does not answer {path}; use " in answer.text


@pytest.mark.parametrize(
    ("path", "body", "engine_s", "client_s"),
    [
        ("/v1/embeddings", {"input": "a"}, "prompt", "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "", "input"),
        ("/detokenize", {"tokens": [9]}, "prompt", "tokens"),
        ("/tokenize", {"prompt": "a"}, "prompt", "prompt"),
        ("/v1/responses", {"input": "a"}, "messages", "input"),
        ("/v1/responses", {"input": "a"}, "response_format", "text.format"),
        ("/v1/responses", {"input": "a"}, "tools", "tools"),
    ],
)
async def test_what_an_engine_refuses_has_the_name_that_its_client_gave_it(
    serve: Any, path: str, body: dict[str, Any], engine_s: str, client_s: str
) -> None:
    async def refuse(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        if request.model:
            raise RequestError("it cannot be", param=engine_s)
        yield Delta()

    answer = await post(await serve(refuse), path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, client_s)
