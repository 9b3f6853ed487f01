"""What every engine promises a worker, on each engine that needs no model file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing

import msgspec
import pytest
import trio
import trio.testing

from tests.runtime.engines.loop.hosting import Gathering
from trinamo.runtime.config.worker import SamplingConfig
from trinamo.runtime.context import Context
from trinamo.runtime.engines import GenerationEngine, open_echo_engine
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.engines.generation import EngineInfo, forward_of
from trinamo.runtime.engines.mocker.engine import open_mocker_engine
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import (
    ChatMessage,
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingDefaults,
)

Open = Callable[[], AbstractAsyncContextManager[GenerationEngine]]
PROMPT = "one two three four five six"

ENGINES: list[Open] = [open_echo_engine, open_exact_engine, open_mocker_engine]

every_engine = pytest.mark.parametrize("open_engine", ENGINES)


async def pull(engine: GenerationEngine, request: GenerateRequest, context: Context) -> list[Delta]:
    async with aclosing(engine.generate(request, context)) as deltas:
        return [delta async for delta in deltas]


async def push(engine: GenerationEngine, request: GenerateRequest, context: Context) -> list[Delta]:
    sink = Gathering()
    await forward_of(engine)(request, context, sink)
    return sink.deltas


Way = Callable[[GenerationEngine, GenerateRequest, Context], Awaitable[list[Delta]]]
each_way = pytest.mark.parametrize("collect", [pull, push])


@every_engine
@each_way
async def test_a_complete_answer_ends_with_its_reason_and_counts_its_tokens(
    open_engine: Open, collect: Way
) -> None:
    async with open_engine() as engine:
        request = GenerateRequest(model="m", messages=[ChatMessage("user", PROMPT)], max_tokens=4)
        deltas = await collect(engine, request, Context("r"))
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert sum(len(delta.token_ids) for delta in deltas) == 4
        assert deltas[0].prompt_tokens > 0
        assert not any(delta.prompt_tokens for delta in deltas[1:])


@every_engine
@each_way
async def test_a_stopped_request_is_answered_with_what_there_is(
    open_engine: Open, collect: Way
) -> None:
    async with open_engine() as engine:
        context = Context("r")
        context.stop()
        deltas = await collect(engine, GenerateRequest(model="m", prompt=PROMPT), context)
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert sum(len(delta.token_ids) for delta in deltas) <= 1


@every_engine
async def test_a_killed_request_leaves_nothing_behind(open_engine: Open) -> None:
    async with open_engine() as engine:
        context = Context("r")
        with context.scope:
            async with aclosing(
                engine.generate(GenerateRequest(model="m", prompt=PROMPT), context)
            ) as deltas:
                async for _ in deltas:
                    context.kill()
        assert context.scope.cancelled_caught
        with trio.fail_after(120):
            await trio.testing.wait_all_tasks_blocked(0.05)
        statistics = engine.statistics()
        assert (statistics.running, statistics.waiting, statistics.blocks_used) == (0, 0, 0)
        assert statistics.cancellations == 1


@every_engine
@each_way
async def test_a_prompt_longer_than_the_context_is_refused(open_engine: Open, collect: Way) -> None:
    async with open_engine() as engine:
        prompt = "a " * engine.info.context_tokens_max
        with pytest.raises(RequestError, match="shorten it"):
            await collect(engine, GenerateRequest(model="m", prompt=prompt), Context("r"))


def test_what_the_operator_says_of_sampling_stands_before_what_the_model_does() -> None:
    """Field by field; an upstream's defaults are its own, and nobody else's business."""
    own = SamplingDefaults(temperature=0.6, top_k=20)
    said = {"temperature": 0.0, "top_k": None, "min_p": 0.1}
    info = EngineInfo(engine="e", model="m", context_tokens_max=64, sampling=own)
    assert info.card("", created=1).sampling == own
    merged = SamplingDefaults(temperature=0.0, top_k=20, min_p=0.1)
    assert info.card("", created=1, sampling=said).sampling == merged
    passing = EngineInfo(engine="e", model="m", context_tokens_max=64, passes_through=True)
    assert passing.card("", created=1, sampling=said).sampling == SamplingDefaults()


def test_a_worker_is_configured_with_what_a_request_may_have() -> None:
    """Both bounds are written down, as the configuration knows no requests."""
    request, section = (
        msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        for kind in (SamplingDefaults, SamplingConfig)
    )
    for properties in (request, section):
        for each in properties.values():
            each["anyOf"][0].pop("description", None)
            each.pop("description", None)
    assert request == section
