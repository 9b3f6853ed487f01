"""The official OpenAI client, synchronous in a thread and asynchronous on trio."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import trio

from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import (
    ContextLengthError,
    DisconnectedError,
    EngineError,
    ModelAlreadyExistsError,
    OverloadedError,
    RateLimitedError,
)
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest, ModelCard

# The openai and httpx packages leave generators to the garbage collector, which trio reports; ours
# would be reported too, as they have other names.
leaves_generators = pytest.mark.filterwarnings(
    "ignore:Async generator '(openai|httpx|httpcore):ResourceWarning"
)

# Makes a generator of a function that yields nothing.
NO_DELTAS: list[Delta] = []
MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


async def test_the_synchronous_client_gets_whole_and_streamed_answers(serve: Any) -> None:
    running = await serve()

    def ask() -> None:
        with openai.OpenAI(
            api_key="none",
            base_url=f"http://127.0.0.1:{running.port}/v1",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            assert [model.id for model in client.models.list()] == ["local"]
            whole = client.chat.completions.create(model="local", messages=MESSAGES)
            assert whole.choices[0].message.content == "Hello ✓"
            assert whole.usage is not None
            assert whole.usage.total_tokens == 9
            chunks = list(
                client.chat.completions.create(
                    model="local",
                    messages=MESSAGES,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "Hello ✓"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 4
            completion = client.completions.create(model="local", prompt="hi")
            assert completion.choices[0].text == "Hello ✓"
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.chat.completions.create(model="other", messages=MESSAGES)
            two = client.chat.completions.create(model="local", messages=MESSAGES, n=2)
            assert [(each.index, each.message.content) for each in two.choices] == [
                (0, "Hello ✓"),
                (1, "Hello ✓"),
            ]
            with pytest.raises(openai.BadRequestError, match="1 to 128 choices") as caught:
                client.chat.completions.create(model="local", messages=MESSAGES, n=129)
            assert caught.value.param == "n"

    await trio.to_thread.run_sync(ask)
    await running.wait_quiet()


@asynccontextmanager
async def trio_client(running: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        api_key="none",
        base_url=f"http://127.0.0.1:{running.port}/v1",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        yield client
    # Here, so that what the client left is not reported in some later test.
    gc.collect()


@leaves_generators
async def test_the_asynchronous_client_streams_on_trio(serve: Any) -> None:
    running = await serve()
    async with trio_client(running) as client:
        stream = await client.chat.completions.create(model="local", messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello ✓"
    await running.wait_quiet()


@leaves_generators
async def test_the_client_raises_on_a_stream_that_broke(serve: Any) -> None:
    async def break_off(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        raise DisconnectedError("the worker went away")

    running = await serve(break_off)
    async with trio_client(running) as client:
        stream = await client.completions.create(model="local", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="the worker went away"):
            async for _ in stream:
                pass
    await running.wait_quiet()


@leaves_generators
@pytest.mark.parametrize(
    ("error", "kind", "code", "times"),
    [
        (
            ContextLengthError.of(9, "10 tokens", "messages"),
            openai.BadRequestError,
            "context_length_exceeded",
            1,
        ),
        (OverloadedError("full", retry_after_s=0.01), openai.InternalServerError, "overloaded", 2),
        (
            RateLimitedError("busy", retry_after_s=0.01),
            openai.RateLimitError,
            "rate_limited",
            2,
        ),
        (EngineError("broken"), openai.InternalServerError, "engine", 1),
        (ModelAlreadyExistsError("there"), openai.ConflictError, "model_already_exists", 1),
        (ValueError("a bug"), openai.InternalServerError, "internal", 1),
    ],
    ids=repr,
)
async def test_the_client_raises_its_own_class_and_asks_again_where_it_helps(
    serve: Any, error: Exception, kind: type[openai.APIStatusError], code: str, times: int
) -> None:
    async def fail(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for never in NO_DELTAS:
            yield never
        raise error

    running = await serve(fail, queue_max=0)
    async with trio_client(running) as client:
        with pytest.raises(kind) as caught:
            await client.with_options(max_retries=1).chat.completions.create(
                model="local", messages=MESSAGES
            )
    assert caught.value.code == code
    assert caught.value.param == getattr(error, "param", None)
    assert len(running.engine.requests) == times
    await running.wait_quiet()


@leaves_generators
async def test_the_client_tells_what_is_not_served_from_a_model_that_is_not(serve: Any) -> None:
    running = await serve(body_bytes_max=65_536, rate_per_s=0.001, rate_burst=3)
    running.service.model_manager().add_model(
        ModelCard(name="plain", endpoint="a/b/d"), running.engine
    )
    async with trio_client(running) as client:
        with pytest.raises(openai.BadRequestError, match="use /v1/chat/completions") as wrong:
            await client.embeddings.create(model="plain", input="a", encoding_format="float")
        assert (wrong.value.code, wrong.value.param) == ("unsupported_endpoint", None)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.APIStatusError) as long:
            await client.completions.create(model="local", prompt="a" * 70_000)
        assert (long.value.status_code, long.value.code) == (413, "body_too_large")
        with pytest.raises(openai.RateLimitError) as often:
            await client.completions.create(model="local", prompt="a")
        assert often.value.code == "rate_limit_exceeded"
        assert often.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    await running.wait_quiet()


@leaves_generators
async def test_closing_the_client_s_stream_kills_the_request(serve: Any) -> None:
    async def one_then_sleep(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1])
        await trio.sleep_forever()

    running = await serve(one_then_sleep)
    async with trio_client(running) as client:
        stream = await client.completions.create(model="local", prompt="hi", stream=True)
        await anext(aiter(stream))
        await stream.close()
        await running.wait_for(lambda: running.engine.running == 0)
    assert running.engine.contexts[0].kill_reason is Reason.CLIENT_DISCONNECT
    await running.wait_quiet()
