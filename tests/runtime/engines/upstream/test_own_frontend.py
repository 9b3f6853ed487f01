"""Our own frontend as the upstream of another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import openai
import pytest
import trio

from tests.runtime.engines.upstream.fake import open_front
from tests.runtime.one_process import OneProcess, config
from trinamo.runtime.engines import open_echo_engine
from trinamo.runtime.env import RealEnv
from trinamo.runtime.process.roles import serve_worker
from trinamo.runtime.process.stopping import StopRequest

pytestmark = [
    pytest.mark.slow,
    # The openai and httpx packages leave generators to the garbage collector, which trio reports.
    pytest.mark.filterwarnings("ignore:Async generator '(openai|httpx|httpcore):ResourceWarning"),
]


@asynccontextmanager
async def open_own_cluster() -> AsyncIterator[str]:
    """A frontend before a worker that echoes; yields its URL."""
    transports, stop, started = OneProcess(), StopRequest(), trio.Event()
    async with open_echo_engine(model="m") as engine, trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                serve_worker,
                config(worker__status_port="null"),
                RealEnv(),
                transports,
                engine,
                stop,
                ready=lambda _: started.set(),
            )
        )
        with trio.fail_after(15):
            await started.wait()
        async with open_front(transports) as front:
            await front.wait_model()
            yield f"{front.url}/v1"
        stop.request()


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0)


async def test_the_official_client_talks_through_two_frontends() -> None:
    async with (
        open_own_cluster() as url,
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
        with pytest.raises(openai.NotFoundError, match="has no embeddings"):
            await client.embeddings.create(model="m", input="a")

    assert chat.choices[0].message.content == "one two three"
    texts = [choice.delta.content or "" for each in chunks for choice in each.choices]
    assert "".join(texts) == "one two three"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert completion.choices[0].text == "one two"
