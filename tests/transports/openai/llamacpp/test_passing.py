"""What llama.cpp's own server can do, asked by the official client through one hop and a cluster."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import trio

from tests.runtime.one_process import OneProcess
from tests.transports.openai.fake import Front, open_cluster, open_front
from tests.transports.openai.llamacpp.server import LlamaServer, llama_server

pytestmark = [
    pytest.mark.check,
    # The openai and httpx packages leave generators to the garbage collector, which trio reports.
    pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning"),
]
HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Geneva"]}},
            "required": ["city"],
        },
    },
}
CALLED: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Geneva"}'},
        }
    ],
}
BY_TOOL: Any = [
    {"role": "user", "content": "weather in Geneva?"},
    CALLED,
    {"role": "user", "content": "weather in Bern?"},
]
"""So small a model calls nothing that it has not seen called."""
CITY: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Geneva"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaServer]:
    with llama_server() as server:
        yield server


@pytest.fixture(scope="module")
def embeddings_server() -> Iterator[LlamaServer]:
    with llama_server("--embeddings") as server:
        yield server


@asynccontextmanager
async def open_before(url: str, way: str) -> AsyncIterator[Front]:
    """A frontend before the server, or a worker before it and a frontend before that."""
    if way == "worker":
        async with open_cluster(url, health_interval_s=0.2) as front:
            yield front
    else:
        upstream = {"http__upstreams": url, "worker__upstream__health_interval_s": "0.2"}
        async with open_front(OneProcess(), **upstream) as front:
            await front.wait_model()
            yield front


@asynccontextmanager
async def open_client(url: str, way: str) -> AsyncIterator[openai.AsyncOpenAI]:
    with trio.fail_after(120):
        async with (
            open_before(url, way) as front,
            openai.AsyncOpenAI(
                api_key="k", base_url=f"{front.url}/v1", max_retries=0, timeout=60
            ) as client,
        ):
            yield client


@pytest.fixture(params=["frontend", "worker"])
async def client(
    request: pytest.FixtureRequest, server: LlamaServer
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with open_client(server.url, request.param) as client:
        yield client


async def test_a_chat_is_the_same_streamed_and_whole(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "messages": HI, "max_tokens": 6, "temperature": 0}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [each async for each in stream]
    streamed = "".join(c.delta.content or "" for each in chunks for c in each.choices)

    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert (whole.model_extra or {})["timings"]["predicted_n"] == 6


async def test_completions_too(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "prompt": "one two three", "max_tokens": 4, "temperature": 0}
    whole = await client.completions.create(**asked)
    stream = await client.completions.create(**asked, stream=True)
    texts = [each.choices[0].text async for each in stream]

    assert whole.choices[0].text
    assert "".join(texts) == whole.choices[0].text


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_a_tool_is_called_piece_by_piece(client: openai.AsyncOpenAI, choice: Any) -> None:
    stream = await client.chat.completions.create(
        model="m",
        messages=BY_TOOL,
        tools=[WEATHER],
        tool_choice=choice,
        max_tokens=60,
        temperature=0,
        stream=True,
    )
    chunks = [each async for each in stream]
    calls = [call for each in chunks for c in each.choices for call in c.delta.tool_calls or ()]
    made = [call.function for call in calls if call.function is not None]

    assert [each.name for each in made if each.name] == ["get_weather"]
    assert json.loads("".join(each.arguments or "" for each in made)) == {"city": "Bern"}
    assert len(calls) > 1
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_tool_is_called_in_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m", messages=BY_TOOL, tools=[WEATHER], max_tokens=60, temperature=0
    )
    calls = answer.choices[0].message.tool_calls or []
    made = [each.function for each in calls if each.type == "function"]

    assert [(each.name, json.loads(each.arguments)) for each in made] == [
        ("get_weather", {"city": "Bern"})
    ]


async def test_an_answer_has_the_form_of_its_schema(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "messages": HI, "response_format": CITY, "max_tokens": 60}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    texts = [c.delta.content or "" async for each in stream for c in each.choices]

    for text in (whole.choices[0].message.content, "".join(texts)):
        assert json.loads(text or "")["city"] in ("Bern", "Geneva")


async def test_logprobs_come_with_every_token(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m", messages=HI, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    told = answer.choices[0].logprobs
    assert told is not None
    tokens = told.content or []

    assert "".join(each.token for each in tokens) == answer.choices[0].message.content
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in tokens)


async def test_what_openai_has_not_reaches_the_server(client: openai.AsyncOpenAI) -> None:
    """With one token to choose from, the heat changes nothing; a grammar is llama.cpp's own."""

    async def ask(**extra: Any) -> str | None:
        answer = await client.chat.completions.create(
            model="m", messages=HI, max_tokens=6, temperature=2, extra_body=extra
        )
        return answer.choices[0].message.content

    assert await ask(top_k=1, seed=1) == await ask(top_k=1, seed=2)
    assert await ask(grammar='root ::= "yes"') == "yes"


async def test_several_choices_come_whole_and_between_each_other(
    client: openai.AsyncOpenAI,
) -> None:
    asked: Any = {"model": "m", "messages": HI, "max_tokens": 3, "n": 2}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    finished = [c.index async for each in stream for c in each.choices if c.finish_reason]

    assert len(whole.choices) == 2
    assert sorted(finished) == [0, 1]


async def test_responses_too(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "input": "hi", "max_output_tokens": 4, "temperature": 0}
    whole = await client.responses.create(**asked)
    stream = await client.responses.create(**asked, stream=True)
    events = [each async for each in stream]
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")

    assert whole.output_text
    assert text == whole.output_text
    assert events[-1].type == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_server_s_own_words_tell_what_was_wrong(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match="type must be number") as wrong:
        await client.chat.completions.create(
            model="m", messages=HI, extra_body={"temperature": "warm"}, stream=stream
        )
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi " * 2000}], stream=stream
        )

    assert isinstance(wrong.value.body, dict)
    assert wrong.value.body["type"] == "invalid_request_error"
    assert isinstance(long.value.body, dict)
    assert long.value.body["type"] == "exceed_context_size_error"
    assert long.value.body["n_ctx"] == 1024


async def test_what_a_server_was_not_opened_for_is_no_fault_of_it(
    client: openai.AsyncOpenAI,
) -> None:
    """llama.cpp says 501: the client reads why, and nobody passes the server over."""
    for _ in range(3):
        with pytest.raises(
            openai.InternalServerError, match="Start it with `--embeddings`"
        ) as said:
            await client.embeddings.create(model="m", input="a", encoding_format="float")
        assert said.value.status_code == 501
    answer = await client.completions.create(model="m", prompt="a", max_tokens=1)

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("way", ["frontend", "worker"])
async def test_embeddings_of_a_server_opened_for_them(
    embeddings_server: LlamaServer, way: str
) -> None:
    async with open_client(embeddings_server.url, way) as client:
        one = await client.embeddings.create(model="m", input="a", encoding_format="float")
        two = await client.embeddings.create(model="m", input=["a", "b c"])

    assert len(one.data[0].embedding) == 576
    assert [each.index for each in two.data] == [0, 1]
    assert two.data[0].embedding == pytest.approx(one.data[0].embedding, abs=1e-4)
