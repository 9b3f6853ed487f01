"""SmolLM2 with grammars, tools, penalties and log probabilities, asked by the official client too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import jsonschema
import msgspec
import numpy as np
import openai
import pytest
import trio

from tests import needs
from tests.runtime.engines.loop.hosting import collect, token_ids
from trinamo import HttpService
from trinamo.runtime.errors import ConfigError, EngineError, RequestError
from trinamo.runtime.protocol.openai.generate import (
    ChatMessage,
    FinishReason,
    GenerateRequest,
    Task,
)

needs.LLAMACPP.imported()
from trinamo.runtime.engines.llamacpp.engine import open_llamacpp_engine  # noqa: E402
from trinamo.runtime.engines.llamacpp.model_file import find_model  # noqa: E402

pytestmark = pytest.mark.check

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "likes": {"type": "array", "items": {"$ref": "#/$defs/thing"}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"thing": {"enum": ["tea", '"chess" é']}},
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
async def host() -> AsyncIterator[Any]:
    try:
        find_model()
    except ConfigError:
        needs.A_MODEL.lacking()
    async with open_llamacpp_engine(
        model="SmolLM2", context_tokens_max=512, kv_tokens=1024, running_max=4, embeds=True
    ) as opened:
        yield opened


def chat(content: str, **fields: Any) -> GenerateRequest:
    """Computed whole: behind a cached prompt the sums differ, by how much depends on the processor."""
    defaults: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "cache_prompt": False}
    messages = [ChatMessage("user", content)]
    return GenerateRequest(model="SmolLM2", messages=messages, **defaults | fields)


def text(deltas: Any) -> str:
    return "".join(delta.text for delta in deltas)


async def test_an_answer_by_a_schema_goes_on_in_the_middle_of_it(host: Any) -> None:
    """Whatever was delivered, both parts together are JSON by the schema."""
    asked = chat("Tell me of Bob.", json_schema=json.dumps(SCHEMA))
    whole = await collect(host, asked)
    assert whole[-1].finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(text(whole)), SCHEMA)
    ids = token_ids(whole)
    for count in (1, len(ids) // 2, len(ids) - 1):
        behind = msgspec.structs.replace(asked, delivered_ids=ids[:count])
        resumed = await collect(host, behind)
        delivered = b"".join(host._engine.token_bytes(each) for each in ids[:count]).decode()
        jsonschema.validate(json.loads(delivered + text(resumed)), SCHEMA)
    drawn = await collect(host, msgspec.structs.replace(asked, temperature=1.5, seed=3))
    jsonschema.validate(json.loads(text(drawn)), SCHEMA)


async def test_tokens_that_no_grammar_has_end_their_own_answer_only(host: Any) -> None:
    """Such as a faulty caller says were delivered: llama.cpp's own grammars would end the process."""
    asked = chat("Bob?", json_schema=json.dumps(SCHEMA))
    wrong = msgspec.structs.replace(asked, delivered_ids=[28, 28, 28])
    with pytest.raises(EngineError, match="does not fit the grammar"):
        await collect(host, wrong)
    assert text(await collect(host, asked)).startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"json_schema": '{"not": {}}'}, "response_format", "has 'not' at #"),
        ({"json_schema": "false"}, "response_format", "Unsatisfiable"),
        ({"json_schema": '{"items":' * 70 + "{}" + "}" * 70}, "response_format", "64 deep"),
        ({"json_schema": json.dumps({"const": 2**53 + 1})}, "response_format", "beyond"),
        (
            {"tools": json.dumps([{"function": {"name": "f", "parameters": {"$ref": "#/x"}}}])},
            "tools",
            "does not exist",
        ),
    ],
    ids=["a keyword", "nothing", "too deep", "a large number", "a reference"],
)
async def test_a_schema_that_cannot_be_a_grammar_is_refused_before_it_waits(
    host: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    fields = {**fields, "tool_choice": "required"} if "tools" in fields else fields
    with pytest.raises(RequestError, match=words) as caught:
        await collect(host, chat("Bob?", **fields))
    assert caught.value.param == param


async def test_what_is_asked_of_the_logits_shows(host: Any) -> None:
    """Log probabilities change no token; a ban holds, penalties make words rarer."""
    plain = token_ids(await collect(host, chat("Count to ten.")))
    told = await collect(host, chat("Count to ten.", logprobs=2))
    assert token_ids(told) == plain
    each = [token for delta in told for token in delta.logprobs]
    assert b"".join(token.token for token in each).decode() == text(told)
    assert all(token.logprob <= 0 for token in each)
    # Greedy: the likeliest is the one that was chosen.
    assert [token.top[0][0] for token in each] == [token.token for token in each]
    likeliest = chat("Count to ten.", temperature=1.0, seed=1, top_k=1)
    assert token_ids(await collect(host, likeliest)) == plain
    common, _ = Counter(plain).most_common(1)[0]
    banned = chat("Count to ten.", logit_bias={common: -100})
    assert common not in token_ids(await collect(host, banned))
    varied = await collect(host, chat("Count to ten.", frequency_penalty=2.0))
    assert max(Counter(token_ids(varied)).values()) <= max(Counter(plain).values())


async def test_the_official_client_gets_json_calls_and_log_probabilities(host: Any) -> None:
    service = HttpService.builder().config(port=0).build()
    service.model_manager().add_model(host.info.card("a/b/c", created=1), host)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(service.run)
        await trio.to_thread.run_sync(partial(ask, port))
        service.stop()


def ask(port: int) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
    with openai.OpenAI(
        api_key="none",
        base_url=f"http://127.0.0.1:{port}/v1",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        create: Any = partial(
            client.chat.completions.create, model="SmolLM2", max_tokens=40, temperature=0
        )
        formed = create(
            messages=messages,
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
            logprobs=True,
            top_logprobs=1,
        )
        jsonschema.validate(json.loads(formed.choices[0].message.content), SCHEMA)
        assert len(formed.choices[0].logprobs.content[0].top_logprobs) == 1
        # Computed whole, as behind a cached prompt the arguments may be others.
        call_of = partial(
            create,
            messages=messages,
            tools=[WEATHER],
            tool_choice=WEATHER,
            extra_body={"cache_prompt": False},
        )
        called = call_of().choices[0]
        assert called.finish_reason == "tool_calls"
        (call,) = called.message.tool_calls
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])
        stream = list(call_of(stream=True))
        pieces = [piece for c in stream for piece in (c.choices[0].delta.tool_calls or [])]
        assert "".join(each.function.arguments for each in pieces) == call.function.arguments
        assert stream[-1].choices[0].finish_reason == "tool_calls"
        messages.append(called.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        answer = create(messages=messages, tools=[WEATHER], max_tokens=4)
        assert answer.choices[0].message.content
        # Its beginning was computed with the calls, and all but its last token with itself.
        told = answer.usage
        assert 0 < told.prompt_tokens_details.cached_tokens < told.prompt_tokens - 1
        again = create(messages=messages, tools=[WEATHER], max_tokens=4).usage
        assert again.prompt_tokens_details.cached_tokens == told.prompt_tokens - 1
        completion = client.completions.create(
            model="SmolLM2", prompt="Bern", max_tokens=3, logprobs=2
        )
        assert len(completion.choices[0].logprobs.tokens) == 3  # type: ignore[union-attr, arg-type]


async def test_embeddings_are_made_beside_answers_and_say_what_is_alike(host: Any) -> None:
    """Each by itself, in chunks or whole, and the same every time; a long one holds up no answer."""
    texts = [
        "A cat sits on the mat.",
        "A kitten lies on the rug.",
        "Quarterly revenue rose by nine percent.",
        "A cat sits on the mat. " * 40,
    ]
    found: dict[str, Any] = {}

    async def embed(each: str) -> None:
        asked = GenerateRequest(model="SmolLM2", prompt=each, task=Task.EMBED)
        (delta,) = await collect(host, asked)
        assert delta.prompt_tokens > 0
        found[each] = np.frombuffer(delta.raw, "<f4")

    whole = text(await collect(host, chat("Count to ten.")))
    async with trio.open_nursery() as nursery:
        for each in texts:
            nursery.start_soon(embed, each)
        assert text(await collect(host, chat("Count to ten."))) == whole
    cat, kitten, revenue, _ = (found[each] for each in texts)
    assert all(abs(np.linalg.norm(each) - 1) < 1e-5 for each in found.values())
    assert cat @ kitten > cat @ revenue
    await embed(texts[0])
    assert np.allclose(found[texts[0]], cat, atol=1e-6)
    too_long = GenerateRequest(model="SmolLM2", prompt="cat " * 600, task=Task.EMBED)
    with pytest.raises(RequestError):
        await collect(host, too_long)
