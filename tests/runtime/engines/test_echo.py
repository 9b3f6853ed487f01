"""The echo engine: a known answer at a known pace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import trio
import trio.testing

from trinamo.runtime.context import Context
from trinamo.runtime.engines import GenerationEngine, open_echo_engine
from trinamo.runtime.errors import OverloadedError, RequestError
from trinamo.runtime.protocol.openai.generate import (
    ChatMessage,
    Delta,
    FinishReason,
    GenerateRequest,
)


def request(prompt: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(model="echo", prompt=prompt, **fields)


async def collect(
    engine: GenerationEngine, asked: GenerateRequest, context: Context | None = None
) -> list[Delta]:
    async with aclosing(engine.generate(asked, context or Context("r"))) as deltas:
        return [delta async for delta in deltas]


@pytest.fixture
async def echo() -> AsyncIterator[GenerationEngine]:
    async with open_echo_engine() as engine:
        yield engine


@pytest.mark.parametrize("prompt", ["one", "one two  three\n", "  one", "   ", "é 😀"])
async def test_the_answer_is_the_prompt_word_by_word(echo: GenerationEngine, prompt: str) -> None:
    deltas = await collect(echo, request(prompt))
    assert "".join(delta.text for delta in deltas) == prompt
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    tokens = sum(len(delta.token_ids) for delta in deltas)
    assert [delta.prompt_tokens for delta in deltas] == [tokens] + [0] * (len(deltas) - 1)


async def test_a_chat_is_answered_with_its_last_user_message(echo: GenerationEngine) -> None:
    messages = [
        ChatMessage("user", "first"),
        ChatMessage("user", "second one"),
        ChatMessage("assistant", "third"),
    ]
    deltas = await collect(echo, GenerateRequest(model="echo", messages=messages))
    assert "".join(delta.text for delta in deltas) == "second one"


async def test_a_chat_without_a_user_is_answered_with_its_last_message(
    echo: GenerationEngine,
) -> None:
    messages = [ChatMessage("system", "be brief")]
    deltas = await collect(echo, GenerateRequest(model="echo", messages=messages))
    assert "".join(delta.text for delta in deltas) == "be brief"


async def test_max_tokens_cut_the_answer(echo: GenerationEngine) -> None:
    deltas = await collect(echo, request("a b c", max_tokens=2))
    assert "".join(delta.text for delta in deltas) == "a b"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_the_context_cuts_the_answer() -> None:
    async with open_echo_engine(context_tokens_max=5) as engine:
        deltas = await collect(engine, request("a b c"))
        assert "".join(delta.text for delta in deltas) == "a b"
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_as_many_tokens_as_the_prompt_has_are_the_whole_answer(
    echo: GenerationEngine,
) -> None:
    deltas = await collect(echo, request("a b", max_tokens=2))
    assert deltas[-1].finish_reason is FinishReason.STOP


async def test_a_stop_string_ends_the_answer_and_is_not_shown(echo: GenerationEngine) -> None:
    deltas = await collect(echo, request("a b c d", stop=["b c"]))
    assert "".join(delta.text for delta in deltas) == "a "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert sum(len(delta.token_ids) for delta in deltas) == 3


async def test_each_word_takes_its_time(autojump_clock: trio.testing.MockClock) -> None:
    async with open_echo_engine(prefill_s=10, delay_s=1) as engine:
        async with aclosing(engine.generate(request("a b c"), Context("r"))) as deltas:
            times = [trio.current_time() async for _ in deltas]
        assert times == [11, 12, 13, 13]


async def test_stop_wakes_it_and_what_was_said_stays(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_echo_engine(delay_s=1) as engine, trio.open_nursery() as nursery:
        context = Context("r")

        async def stop_later() -> None:
            await trio.sleep(2.5)
            context.stop()

        nursery.start_soon(stop_later)
        deltas = await collect(engine, request("a b c d"), context)
        assert trio.current_time() == 2.5
        assert "".join(delta.text for delta in deltas) == "a b"
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert engine.statistics().cancellations == 1


async def test_kill_wakes_it_inside_a_long_prefill(autojump_clock: trio.testing.MockClock) -> None:
    async with open_echo_engine(prefill_s=3600) as engine:
        context = Context("r")
        async with trio.open_nursery() as nursery:

            async def handle() -> None:
                with context.scope:
                    await collect(engine, request("a"), context)

            nursery.start_soon(handle)
            await trio.sleep(1)
            assert engine.statistics().running == 1
            context.kill()
        assert trio.current_time() == 1
        assert (engine.statistics().running, engine.statistics().cancellations) == (0, 1)


async def test_token_ids_are_refused_for_lack_of_a_vocabulary(echo: GenerationEngine) -> None:
    with pytest.raises(RequestError, match="no vocabulary"):
        await collect(echo, GenerateRequest(model="echo", token_ids=[1]))


async def test_more_answers_than_allowed_at_once_are_refused() -> None:
    async with open_echo_engine(running_max=1) as engine:
        async with aclosing(engine.generate(request("a b"), Context("1"))) as first:
            await anext(first)
            with pytest.raises(OverloadedError) as caught:
                await collect(engine, request("a"))
            assert (caught.value.bound, caught.value.value) == ("running_max", 1)
        await collect(engine, request("a"))
        assert engine.statistics().running == 0
