"""Policies over HTTP, from a card in discovery to a header of the answer: two workers, a frontend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio

from tests.runtime.one_process import OneProcess, config
from trinamo.runtime.engines.mocker.engine import MockerOptions, open_mocker_engine
from trinamo.runtime.env import RealEnv
from trinamo.runtime.process.roles import FrontendReady, WorkerReady, serve_frontend, serve_worker
from trinamo.runtime.process.stopping import StopRequest

OPTIONS = MockerOptions(num_gpu_blocks=256, block_size=4, speedup_ratio=1000)
PROMPT = "the same long beginning, and "
BLOCKS = (1 + len(PROMPT)) // 4
WORKER, CACHED = "x-trinamo-worker", "x-trinamo-cached-blocks"


@asynccontextmanager
async def open_cluster(
    policy: str, *, of_workers: str = "", **more: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, list[str]]]:
    """A client of a frontend, and the ids of its workers."""
    transports, env, stop = OneProcess(), RealEnv(), StopRequest()
    told = config(http__port=0, worker__status_port=None, router__policy=policy, **more)
    router = msgspec.structs.replace(told.router, policy=of_workers or policy)
    workers_told = msgspec.structs.replace(told, router=router)
    urls: list[str] = []
    workers: list[str] = []
    ready = trio.Semaphore(0)

    async def work() -> None:
        def tell(facts: WorkerReady) -> None:
            workers.append(facts.instance_id)
            ready.release()

        async with open_mocker_engine(OPTIONS, context_tokens_max=512) as host:
            await serve_worker(workers_told, env, transports, host, stop, ready=tell)

    async def front() -> None:
        def tell(facts: FrontendReady) -> None:
            urls.append(facts.url)
            ready.release()

        await serve_frontend(told, env, transports, stop, ready=tell)

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for part in (work, work, front):
                nursery.start_soon(part)
                await ready.acquire()
            async with httpx.AsyncClient(base_url=urls[0], trust_env=False, timeout=120) as client:
                yield client, workers
            nursery.cancel_scope.cancel()


async def ask(client: httpx.AsyncClient, prompt: str, **headers: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "model": "mocker"}
    return await client.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("of_workers", ["kv", "round_robin"])
async def test_an_answer_says_who_gave_it_and_how_many_blocks_that_one_had(of_workers: str) -> None:
    """Whatever policy the workers were given: it is the frontend that chooses."""
    async with open_cluster("kv", of_workers=of_workers) as (client, _):
        first = await ask(client, PROMPT)
        assert first.headers[CACHED] == "0"
        with trio.fail_after(120):
            while (again := await ask(client, PROMPT)).headers[CACHED] != str(BLOCKS):
                await trio.sleep(0.01)
        assert again.headers[WORKER] == first.headers[WORKER]
        said = again.json()["usage"]["prompt_tokens_details"]
        assert said == {"cached_tokens": BLOCKS * OPTIONS.block_size}
        other = await ask(client, "something else altogether")
        assert other.headers[CACHED] == "0"
        chat = {
            "model": "mocker",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": PROMPT}],
        }
        assert (await client.post("/v1/chat/completions", json=chat)).headers[CACHED] == "0"


async def test_a_tenant_is_told_nothing_of_what_another_has_asked(tmp_path: Path) -> None:
    """Or it could guess the other's prompt, a block at a time. Operators are told the most."""
    keys = tmp_path / "keys"
    keys.write_text(
        "alice (operator): sk-alice-0123456789\nbob (operator): sk-bob-0123456789\n", "utf-8"
    )
    alice = {"authorization": "Bearer sk-alice-0123456789"}
    bob = {"authorization": "Bearer sk-bob-0123456789"}
    async with open_cluster("kv", http__api_keys_file=str(keys)) as (client, workers):
        with trio.fail_after(120):
            while (await ask(client, PROMPT, **alice)).headers[CACHED] != str(BLOCKS):
                await trio.sleep(0.01)
        for worker in workers:
            answer = await ask(client, PROMPT, **bob, **{WORKER: worker})
            assert answer.headers[CACHED] == "0"
            details = answer.json()["usage"].get("prompt_tokens_details") or {}
            assert details.get("cached_tokens", 0) == 0


async def test_other_policies_say_nothing_about_blocks() -> None:
    async with open_cluster("round_robin") as (client, _):
        assert CACHED not in (await ask(client, PROMPT)).headers


@pytest.mark.parametrize("policy", ["direct", "kv"])
async def test_a_named_worker_answers_whatever_it_costs(policy: str) -> None:
    async with open_cluster(policy) as (client, workers):
        for worker in (*workers, *workers):
            answer = await ask(client, PROMPT, **{WORKER: worker})
            assert (answer.status_code, answer.headers[WORKER]) == (200, worker)
        unnamed = await ask(client, PROMPT)
        assert unnamed.status_code == (400 if policy == "direct" else 200)
        assert (await ask(client, PROMPT, **{WORKER: "0" * 16})).status_code == 503
