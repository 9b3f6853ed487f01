"""An engine of your own, served to a frontend, asked over HTTP.

    python examples/own_engine.py

Needs the extra: pip install 'trinamo[embedded]'. An engine is a class with `info`, `generate` and
`statistics`; the worker registers it and publishes its model, so that every frontend offers it.
Both roles run in this process here; in a cluster each is a program of its own, stopped by signals.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncGenerator
from functools import partial

import trio

from trinamo import (
    Context,
    Delta,
    EngineInfo,
    EngineStatistics,
    FinishReason,
    FrontendReady,
    GenerateRequest,
    StopRequest,
    load_config,
    open_etcd_server,
    serve_frontend,
    serve_worker,
)


class Parrot:
    """Says the last message back in capitals, a word a token."""

    info = EngineInfo(engine="parrot", model="parrot", context_tokens_max=1024)

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        words = request.messages[-1].content.split() if request.messages else []
        for number, word in enumerate(words[: request.max_tokens]):
            if context.is_stopped:
                yield Delta(finish_reason=FinishReason.CANCELLED)
                return
            await trio.sleep(0.01)  # Where a model would compute.
            prompt_tokens = 0 if number else len(words)
            yield Delta(f"{word.upper()} ", [number], prompt_tokens=prompt_tokens)
        yield Delta(finish_reason=FinishReason.STOP)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()


def ask(url: str, text: str) -> str:
    body = {"model": "parrot", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
    return said


async def main() -> None:
    async with open_etcd_server() as etcd, trio.open_nursery() as nursery:
        config = load_config(
            environ={},
            overrides={
                "control_plane.etcd.endpoints": etcd.endpoint,
                "event_plane.backend": "memory",
                "http.port": 0,
            },
        )
        served, answering = trio.Event(), trio.Event()
        url = ""

        def ready(frontend: FrontendReady) -> None:
            nonlocal url
            url = frontend.url
            answering.set()

        stop = [StopRequest(), StopRequest()]
        nursery.start_soon(
            partial(
                serve_worker, Parrot(), config=config, ready=lambda _: served.set(), stop=stop[0]
            )
        )
        await served.wait()
        nursery.start_soon(partial(serve_frontend, config=config, ready=ready, stop=stop[1]))
        await answering.wait()
        print(await trio.to_thread.run_sync(ask, url, "polly wants a token"))
        for role in stop:
            role.request()


if __name__ == "__main__":
    trio.run(main)
