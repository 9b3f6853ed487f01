"""Embeddings between steps: in order, bounded, left, failed, and ended with the engine."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
import trio
import trio.testing

from tests.runtime.engines.loop.hosting import (
    CONTEXT_TOKENS,
    SMALL,
    FaultyEngine,
    Gate,
    Panic,
    collect,
    inline_hop,
    request,
)
from trinamo.runtime.engines.loop import embeddings
from trinamo.runtime.engines.loop.host import open_engine_host
from trinamo.runtime.errors import EngineError, OverloadedError, UnavailableError
from trinamo.runtime.protocol.openai.generate import Feature, GenerateRequest, Task


class EmbeddingEngine(FaultyEngine):
    """Its embedding of a prompt are its tokens, a chunk each."""

    def embed(self, token_ids: list[int]) -> Iterator[bytes]:
        if 255 in token_ids:
            raise ValueError("no such vector")
        if 254 in token_ids:
            raise Panic("no such vector")
        yield from [b""] * (len(token_ids) - 1)
        yield bytes(token_ids)


def make() -> EmbeddingEngine:
    engine = EmbeddingEngine(
        dims=SMALL, context_tokens_max=CONTEXT_TOKENS, block_tokens=4, block_count=64
    )
    engine.info = attrs.evolve(engine.info, features=engine.info.features | {Feature.EMBEDDINGS})
    return engine


def asking(*token_ids: int) -> GenerateRequest:
    return GenerateRequest(model="exact", token_ids=list(token_ids), task=Task.EMBED)


async def test_each_has_its_own_and_a_failure_is_its_own_too() -> None:
    async with open_engine_host(make(), hop=inline_hop) as host:
        found: list[bytes] = []

        async def embed(number: int) -> None:
            found.append((await collect(host, asking(*[number] * (number + 1))))[0].raw)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(embed, number)
        assert sorted(found) == sorted(bytes([n] * (n + 1)) for n in range(5))
        for number in (254, 255):
            with pytest.raises(EngineError, match="no such vector"):
                await collect(host, asking(number))
        assert (await collect(host, asking(7)))[0].raw == b"\x07"


async def test_a_long_one_holds_up_no_answer_and_one_that_is_left_is_over() -> None:
    """One chunk between two steps."""
    gate = Gate()
    async with open_engine_host(make(), hop=gate.hop) as host, trio.open_nursery() as nursery:
        left = trio.CancelScope()

        async def embed() -> None:
            with left:
                await collect(host, asking(*[1] * 100))

        nursery.start_soon(embed)
        nursery.start_soon(collect, host, request("hello", 4))
        await trio.testing.wait_all_tasks_blocked()
        await gate.let_steps_happen(10)
        assert host.statistics().steps >= 4
        left.cancel()
        await trio.testing.wait_all_tasks_blocked()
        await gate.let_steps_happen(1)
        assert gate.inside == 0


async def test_so_many_wait_at_most_and_closing_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "WAITING_MAX", 2)
    gate = Gate()
    ended: list[Exception] = []
    async with trio.open_nursery() as nursery, open_engine_host(make(), hop=gate.hop) as host:

        async def embed() -> None:
            try:
                await collect(host, asking(1, 2))
            except (OverloadedError, UnavailableError) as error:
                ended.append(error)

        for _ in range(3):
            nursery.start_soon(embed)
            await trio.testing.wait_all_tasks_blocked()
        assert [type(each) for each in ended] == [OverloadedError]
    assert [type(each) for each in ended[1:]] == [UnavailableError] * 2
