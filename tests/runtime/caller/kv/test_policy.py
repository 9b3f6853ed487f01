"""`router.policy: kv` over real planes in one process: prompts go where their blocks are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio

from tests.runtime.kv.naming import OWN
from tests.runtime.one_process import OneProcess, open_process
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.kv.hints import make_hint
from trinamo.runtime.caller.kv.routing import KvRoutingStatistics
from trinamo.runtime.engines.mocker.engine import MockerOptions, open_mocker_engine
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.kv.names import RoutingHint
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    GenerateRequest,
    ModelCard,
)
from trinamo.runtime.sinks import Sink

GENERATE = EndpointName("test", "backend", "generate")
OPTIONS = MockerOptions(num_gpu_blocks=256, block_size=4, speedup_ratio=1000)
CARD = ModelCard(
    name="mocker",
    endpoint=str(GENERATE),
    context_tokens_max=512,
    block_tokens=4,
    tokenizer="bytes/mocker",
)
WORKERS = 3


class Collecting(Sink[Delta]):
    """Takes everything, and holds on to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = trio.Event()

    def take(self, items: list[Delta]) -> bool:
        self.first.set()
        return True


@asynccontextmanager
async def cluster(frontends: int = 1, **overrides: Any) -> AsyncIterator[list[Client]]:
    """Mocker workers, and clients in processes of their own."""
    transports, overrides = OneProcess(), {"router__policy": "kv", **overrides}
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(frontends):
            caller = await stack.enter_async_context(open_process(transports, **overrides))
            clients.append(await caller.client(GENERATE))
        for _ in range(WORKERS):
            engine = await stack.enter_async_context(
                open_mocker_engine(OPTIONS, context_tokens_max=512)
            )
            server = await stack.enter_async_context(
                open_process(transports, serving=True, **overrides)
            )
            await server.serve_push(
                GENERATE, engine.forward, request_type=GenerateRequest, engine=engine
            )
        for client in clients:
            await client.router.wait_instances(WORKERS)
        yield clients


def asked(prompt: str, tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(model="mocker", prompt=prompt, max_tokens=tokens)


def hint_of(client: Client, request: GenerateRequest, card: ModelCard = CARD) -> RoutingHint | None:
    assert client.router.kv is not None
    return make_hint(request, card, client.router.kv.names)


async def ask(client: Client, prompt: str, card: ModelCard = CARD) -> str:
    """Who has answered."""
    request = asked(prompt)
    async with client.stream(request, Delta, hint=hint_of(client, request, card)) as deltas:
        await deltas.forward(Collecting())
        return deltas.instance.id


def known(client: Client) -> KvRoutingStatistics:
    assert client.router.kv is not None
    return client.router.kv.statistics()


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(120):
        while not condition():
            await trio.sleep(0.005)


def indexed(client: Client) -> int:
    assert client.router.kv is not None
    assert client.router.kv.index is not None
    return client.router.kv.index.statistics()["blocks"]


async def test_equal_prompts_go_to_the_worker_that_has_their_blocks() -> None:
    async with cluster() as (client,):
        first = await ask(client, "the same long beginning, and")
        await until(lambda: indexed(client) >= 7)
        assert {await ask(client, f"the same long beginning, and {n}") for n in range(6)} == {first}
        counts = known(client)
        assert (counts.requests, counts.hits) == (7, 6)
        # 29 tokens are 7 blocks, of which the first request had none there.
        assert counts.overlap_blocks == counts.prompt_blocks - 7
        assert (counts.active_requests, counts.active_blocks) == (0, 0)


@pytest.mark.parametrize("events", [True, False])
async def test_prompts_whose_tokens_are_unknown_go_where_their_text_went(events: bool) -> None:
    card = ModelCard(name="mocker", endpoint=str(GENERATE))
    text = "sixty-four bytes of text are one piece where blocks are not known" * 3
    async with cluster(router__kv__events=events) as (client,):
        first = await ask(client, text, card)
        assert {await ask(client, f"{text} {n}", card) for n in range(6)} == {first}
        assert known(client).hits == 6
        assert known(client).recent_blocks > 0


async def test_prompts_that_share_nothing_are_spread_while_they_run() -> None:
    """Twelve at once over three workers: the load of what was sent a moment ago counts."""
    async with cluster() as (client,), trio.open_nursery() as nursery:
        answered: dict[str, int] = {}
        release = trio.Event()

        async def hold(number: int) -> None:
            request = asked(f"{number:02d}: nothing in common", 64)
            async with client.stream(request, Delta, hint=hint_of(client, request)) as deltas:
                answered[deltas.instance.id] = answered.get(deltas.instance.id, 0) + 1
                await release.wait()

        for number in range(12):
            nursery.start_soon(hold, number)
        await until(lambda: sum(answered.values()) == 12)
        assert sorted(answered.values()) == [4, 4, 4]
        assert known(client).active_requests == 12
        release.set()
    counts = known(client)
    assert (counts.active_requests, counts.active_blocks, counts.waiting_prefill_tokens) == (
        0,
        0,
        0,
    )


async def test_a_prompt_waits_for_its_prefill_until_its_first_token() -> None:
    async with cluster() as (client,), trio.open_nursery() as nursery:
        sink = Collecting()
        request = asked("some tokens to compute", 256)

        async def forward() -> None:
            async with client.stream(request, Delta, hint=hint_of(client, request)) as deltas:
                assert known(client).waiting_prefill_tokens == 23
                await deltas.forward(sink)

        nursery.start_soon(forward)
        await sink.first.wait()
        assert known(client).waiting_prefill_tokens == 0
        assert known(client).active_blocks == 5
        nursery.cancel_scope.cancel()
    assert known(client).active_blocks == 0


async def test_frontends_count_what_others_send() -> None:
    async with cluster(frontends=2) as (one, other), trio.open_nursery() as nursery:
        request = asked("held for a while", 64)
        release = trio.Event()

        async def hold() -> None:
            async with one.stream(request, Delta, hint=hint_of(one, request)) as deltas:
                nursery.start_soon(spread, deltas.instance.id)
                await release.wait()

        async def spread(busy: str) -> None:
            await until(lambda: known(other).active_requests == 1)
            assert known(other).routers == 1
            assert await ask(other, "nothing in common") != busy
            release.set()

        await hold()
        await until(lambda: known(other).active_requests == 0)


async def test_a_request_without_a_prompt_goes_to_the_least_loaded() -> None:
    async with cluster() as (client,):
        async with client.stream(asked("no hint", 64), Delta) as held:
            for _ in range(4):
                assert client.router.choose().id != held.instance.id
        assert known(client).requests == 0


def test_a_prompt_that_does_not_fit_has_no_hint() -> None:
    """It is the worker that refuses it, with the same words as under every policy."""
    assert make_hint(asked("x" * 600), CARD, OWN) is None


def test_delivered_tokens_are_known_ones() -> None:
    begun = GenerateRequest(model="mocker", token_ids=[1, 2, 3, 4, 5], delivered_ids=[6, 7, 8])
    whole = GenerateRequest(model="mocker", token_ids=[1, 2, 3, 4, 5, 6, 7, 8])
    hint = make_hint(begun, CARD, OWN)
    assert hint is not None
    assert hint == make_hint(whole, CARD, OWN)
