"""An answer that goes on elsewhere behind what was delivered is the one that would have come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from trio.testing import MockClock

from tests.runtime.engines.loop.hosting import (
    CONTEXT_TOKENS,
    FaultyEngine,
    Gathering,
    collect,
    make_engine,
    open_host,
    request,
    settle,
    token_ids,
)
from trinamo.runtime.context import Context
from trinamo.runtime.engines import open_echo_engine
from trinamo.runtime.engines.generation import GenerationEngine
from trinamo.runtime.engines.mocker.engine import MockerOptions, open_mocker_engine
from trinamo.runtime.engines.text import TextStream
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest


class CutEngine(FaultyEngine):
    """Its tokens are single bytes of characters of one to four bytes, and of none."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes(("aé€😀".encode() * 3)[token_id % 29 : token_id % 29 + 1])


def behind(asked: GenerateRequest, delivered_ids: list[int]) -> GenerateRequest:
    return msgspec.structs.replace(asked, delivered_ids=delivered_ids)


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def answer(host: GenerationEngine, asked: GenerateRequest) -> list[Delta]:
    async with aclosing(host.generate(asked, Context("r"))) as deltas:
        return [delta async for delta in deltas]


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3, "top_p": 0.8},
    "to the end of the context": {"max_tokens": None, "prompt": "x" * (CONTEXT_TOKENS - 20)},
}


@pytest.mark.parametrize("has_stop", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("case", CASES)
async def test_an_answer_can_be_resumed_behind_every_token(
    case: str, is_cut: bool, has_stop: bool
) -> None:
    """Text, tokens, reason and counts: also inside a character, or inside a stop string."""
    made = CutEngine if is_cut else FaultyEngine
    example = make_engine()
    engine = made(
        dims=example.dims, context_tokens_max=CONTEXT_TOKENS, block_tokens=4, block_count=64
    )
    fields: dict[str, Any] = {"max_tokens": 30} | CASES[case]
    async with open_host(engine, chunk_tokens_max=7) as host:
        asked = request(**fields)
        if has_stop:
            whole = text(await collect(host, asked))
            # It ends with the second of them, and the first is long almost there.
            asked = request(**fields, stop=[whole[5:11] + "?", whole[12:14]])
        deltas = await collect(host, asked)
        ids = token_ids(deltas)
        shown = TextStream(asked.stop)
        length = 0
        for count, token_id in enumerate(ids[:-1], start=1):
            length += len(shown.push(engine.token_bytes(token_id)))
            resumed = await collect(host, behind(asked, ids[:count]))
            assert token_ids(resumed) == ids[count:]
            assert text(resumed) == text(deltas)[length:]
            assert resumed[-1].finish_reason is deltas[-1].finish_reason
            assert resumed[0].prompt_tokens == deltas[0].prompt_tokens
        await settle(host)


async def test_an_answer_of_which_only_the_end_is_missing_ends_at_once() -> None:
    async with open_host() as host:
        asked = request(max_tokens=8)
        whole = await collect(host, asked)
        resumed = await collect(host, behind(asked, token_ids(whole)))
        assert resumed == [Delta("", [], FinishReason.LENGTH, 6)]
        stopped = behind(request(stop=[text(whole)[5:7]]), token_ids(whole)[:7])
        sink = Gathering()
        await host.forward(stopped, Context("r"), sink)
        stop_string = text(whole)[5:7]
        assert sink.deltas == [Delta("", [], FinishReason.STOP, 6, stop_string=stop_string)]
        assert host.statistics().steps == 8
        with pytest.raises(RequestError, match="delivered already"):
            async with host.reserve(behind(asked, token_ids(whole)), Context("r")):
                pass
        await settle(host)


@pytest.mark.parametrize("bad", [[-1], [999], [97] * 9])
async def test_tokens_that_cannot_have_been_delivered_are_refused(bad: list[int]) -> None:
    async with open_host() as host:
        with pytest.raises(RequestError):
            await collect(host, behind(request(max_tokens=8), bad))
        with pytest.raises(RequestError):
            host.examine(behind(request(max_tokens=8), bad))
        assert host.info.can_resume


async def test_the_mocker_resumes_behind_every_token(autojump_clock: MockClock) -> None:
    asked = GenerateRequest(model="mocker", prompt="an answer", max_tokens=12)
    async with open_mocker_engine(MockerOptions(block_size=4)) as host:
        whole = await answer(host, asked)
        ids = token_ids(whole)
        for count in range(12):
            resumed = await answer(host, behind(asked, ids[:count]))
            assert token_ids(resumed) == ids[count:]
            assert text(resumed) == text(whole)[count:]


async def test_echo_resumes_behind_every_word_and_knows_another_answer() -> None:
    asked = GenerateRequest(model="echo", prompt="one two three four five six", stop=["four five"])
    async with open_echo_engine() as engine:
        assert engine.info.can_resume
        whole = await answer(engine, asked)
        ids = token_ids(whole)
        for count in range(len(ids) + 1):
            resumed = await answer(engine, behind(asked, ids[:count]))
            assert token_ids(resumed) == ids[count:]
            assert text(whole).endswith(text(resumed))
            assert resumed[-1].finish_reason is FinishReason.STOP
        with pytest.raises(RequestError, match="does not begin with"):
            await answer(engine, behind(asked, ids[1:]))
        with pytest.raises(RequestError, match="does not begin with"):
            await answer(engine, behind(asked, [*ids, 5]))


async def test_echo_resumed_behind_its_stop_string_ends_at_once() -> None:
    asked = GenerateRequest(model="echo", prompt="one two three four", stop=["two"], max_tokens=3)
    async with open_echo_engine() as engine:
        ids = token_ids(await answer(engine, asked))
        assert len(ids) == 2
        assert await answer(engine, behind(asked, ids)) == [
            Delta("", [], FinishReason.STOP, 4, stop_string="two")
        ]
