"""Our own frontend as the upstream of another one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import trio

from tests import needs
from tests.runtime.one_process import OneProcess
from tests.transports.openai.fake import open_front, serving
from trinamo.runtime.engines import GenerationEngine, open_echo_engine
from trinamo.runtime.errors import ConfigError

pytestmark = [
    pytest.mark.check,
    # The openai and httpx packages leave generators to the garbage collector, which trio reports.
    pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning"),
]


@asynccontextmanager
async def open_own_cluster(engine: GenerationEngine) -> AsyncIterator[str]:
    """A frontend before a worker of ours; yields its URL."""
    transports = OneProcess()
    async with serving(transports, engine), open_front(transports) as front:
        await front.wait_model()
        yield f"{front.url}/v1"


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0)


async def test_the_official_client_talks_through_two_frontends() -> None:
    async with (
        open_echo_engine(model="m") as engine,
        open_own_cluster(engine) as url,
        open_front(OneProcess(), http__upstreams=url) as front,
        client_of(front.url) as client,
    ):
        await front.wait_model()
        chat = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "one two three"}]
        )
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "one two three"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [each async for each in stream]
        completion = await client.completions.create(model="m", prompt="one two", max_tokens=9)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a"}], temperature=9
            )
        with pytest.raises(openai.BadRequestError, match="does not answer /v1/embeddings; use"):
            await client.embeddings.create(model="m", input="a")

    assert chat.choices[0].message.content == "one two three"
    texts = [choice.delta.content or "" for each in chunks for choice in each.choices]
    assert "".join(texts) == "one two three"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert completion.choices[0].text == "one two"


CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Geneva"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@asynccontextmanager
async def open_own_model() -> AsyncIterator[Any]:
    """The engine over llama.cpp, with the small model."""
    needs.LLAMACPP.imported()
    from trinamo.runtime.engines.llamacpp.engine import open_llamacpp_engine
    from trinamo.runtime.engines.llamacpp.model_file import find_model

    try:
        find_model()
    except ConfigError:
        needs.A_MODEL.lacking()
    async with open_llamacpp_engine(
        model="m", context_tokens_max=512, kv_tokens=1024, running_max=2
    ) as engine:
        yield engine


async def test_tools_and_schemas_of_our_own_engine_pass_through_another_frontend() -> None:
    """A worker of ours, its frontend, and a frontend before that: streamed, to the official client."""
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    asked: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "weather in Bern?"}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
    }
    with trio.fail_after(180):
        async with (
            open_own_model() as engine,
            open_own_cluster(engine) as url,
            open_front(OneProcess(), http__upstreams=url) as front,
            client_of(front.url) as client,
        ):
            await front.wait_model()
            stream = await client.chat.completions.create(
                **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False
            )
            called = [each async for each in stream]
            stream = await client.chat.completions.create(**asked, response_format=form)
            formed = [each async for each in stream]
            with pytest.raises(openai.BadRequestError, match="response_format"):
                await client.chat.completions.create(
                    **asked,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "n", "schema": {"not": {}}},
                    },
                )

    calls = [call for each in called for c in each.choices for call in c.delta.tool_calls or ()]
    made = [call.function for call in calls if call.function is not None]
    assert [each.name for each in made if each.name] == ["weather"]
    arguments = json.loads("".join(each.arguments or "" for each in made))
    assert arguments["city"] in ("Bern", "Geneva")
    assert [c.finish_reason for each in called for c in each.choices][-1] == "tool_calls"
    text = "".join(c.delta.content or "" for each in formed for c in each.choices)
    assert json.loads(text)["city"] in ("Bern", "Geneva")
