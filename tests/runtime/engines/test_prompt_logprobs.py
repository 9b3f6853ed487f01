"""What is told of a prompt: its tokens, and how likely each was; and tasks that make no answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from tests.runtime.engines.loop.hosting import (
    collect,
    make_engine,
    open_host,
    request,
    settle,
    token_ids,
)
from trinamo.runtime.engines.exact.engine import LOGIT_GAP
from trinamo.runtime.engines.loop import host as hosts
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import (
    ChatMessage,
    Delta,
    FinishReason,
    GenerateRequest,
    Task,
    TokenLogprob,
)

PROMPT = "the quick brown fox jumps"


async def prompt_told(host: EngineHost, **fields: Any) -> list[TokenLogprob]:
    deltas = await collect(host, request(PROMPT, 4, **{"prompt_logprobs": 2, **fields}))
    assert not any(each.prompt_logprobs for each in deltas[1:])
    return deltas[0].prompt_logprobs


async def test_each_token_of_the_prompt_is_told_of_on_the_first_delta() -> None:
    """By its bytes; of the first nothing is known. No token of the answer changes."""
    async with open_host() as host:
        plain = await collect(host, request(PROMPT, 4))
        told = await prompt_told(host)
        assert b"".join(each.token for each in told) == PROMPT.encode()
        assert len(told) == plain[0].prompt_tokens
        assert told[0] == TokenLogprob(b"", 0.0)
        assert {len(each.top) for each in told[1:]} == {2}
        # Of four that are alike, or far behind them.
        assert all(abs(e.logprob + 1.386294) < 1e-6 or e.logprob < -LOGIT_GAP for e in told[1:])
        asked = request(PROMPT, 4, prompt_logprobs=0)
        assert token_ids(await collect(host, asked)) == token_ids(plain)


@pytest.mark.parametrize("chunk", [1, 3, 7])
async def test_what_is_told_depends_on_no_chunk_and_no_cache(chunk: int) -> None:
    """Nothing that was computed before is used, and no token counts as cached."""
    async with open_host() as host:
        whole = await prompt_told(host)
    async with open_host(chunk_tokens_max=chunk) as host:
        await collect(host, request(PROMPT, 4))
        assert (await collect(host, request(PROMPT, 4)))[0].cached_tokens > 0
        assert await prompt_told(host) == whole
        deltas = await collect(host, request(PROMPT, 4, prompt_logprobs=2))
        assert deltas[0].cached_tokens == 0
        await settle(host)


async def test_a_prompt_that_is_computed_twice_is_told_of_once() -> None:
    """Sequences that preempt each other."""
    asked = [request(f"{n} {PROMPT}", 80, prompt_logprobs=2) for n in range(4)]
    async with open_host() as alone:
        whole = [(await collect(alone, each))[0].prompt_logprobs for each in asked]
    found: dict[int, list[Delta]] = {}
    async with open_host(make_engine(32), running_max=4, chunk_tokens_max=3) as host:

        async def ask(number: int) -> None:
            found[number] = await collect(host, asked[number])

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, number)
        assert host.statistics().preemptions > 0
    assert [found[number][0].prompt_logprobs for number in range(4)] == whole


async def test_the_prompt_alone_can_be_asked_for() -> None:
    """It ends with its length, and has no token; what it computed others find."""
    async with open_host() as host:
        deltas = await collect(host, request(PROMPT, 0, prompt_logprobs=1))
        assert [(each.text, each.token_ids) for each in deltas] == [("", [])]
        assert deltas[0].finish_reason is FinishReason.LENGTH
        assert len(deltas[0].prompt_logprobs) == deltas[0].prompt_tokens == len(PROMPT) + 1
        await settle(host)
        assert (await collect(host, request(PROMPT, 4)))[0].cached_tokens > 0


async def test_an_answer_that_goes_on_elsewhere_tells_nothing_of_the_prompt_again() -> None:
    async with open_host() as host:
        ids = token_ids(await collect(host, request(PROMPT, 8)))
        asked = request(PROMPT, 8, prompt_logprobs=1, delivered_ids=ids[:3])
        deltas = await collect(host, asked)
        assert token_ids(deltas) == ids[3:]
        assert not any(each.prompt_logprobs for each in deltas)


async def test_more_than_can_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "PROMPT_LOGPROBS_MAX", 100)
    async with open_host() as host:
        assert await prompt_told(host, prompt_logprobs=2)
        with pytest.raises(RequestError, match="ask for fewer") as refused:
            await prompt_told(host, prompt_logprobs=3)
    assert refused.value.param == "logprobs"


async def test_tokens_are_told_of_a_prompt_and_of_a_chat_without_a_step() -> None:
    chat = GenerateRequest(model="exact", messages=[ChatMessage("user", "hé")])
    async with open_host() as host:
        for asked in (request("hé"), chat):
            answered = msgspec.structs.replace(asked, return_token_ids=True, max_tokens=4)
            told = (await collect(host, answered))[0].prompt_token_ids
            assert told == list(host.examine(asked).token_ids)
            steps = host.statistics().steps
            tokenize = msgspec.structs.replace(asked, task=Task.TOKENIZE)
            (delta,) = await collect(host, tokenize)
            assert (delta.prompt_token_ids, delta.prompt_tokens) == (told, len(told))
            ids = [each for each in told if each < 256]
            back = GenerateRequest(model="exact", token_ids=ids, task=Task.DETOKENIZE)
            (delta,) = await collect(host, back)
            assert delta.text == "hé"
            assert delta.finish_reason is FinishReason.STOP
            assert host.statistics().steps == steps


async def test_an_embedding_is_refused_by_name_where_there_is_none() -> None:
    async with open_host() as host:
        with pytest.raises(RequestError, match="'task' is not supported"):
            await collect(host, msgspec.structs.replace(request("a"), task=Task.EMBED))
