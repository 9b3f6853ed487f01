"""Penalties, biases and log probabilities, where every token can be said in advance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import trio

from tests.runtime.engines.loop.hosting import collect, make_engine, open_host, request, token_ids
from trinamo.runtime.context import Context
from trinamo.runtime.engines.echo import open_echo_engine
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import Delta, TokenLogprob

CASES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "biases": {"logit_bias": {ord("e"): 2.0, ord(" "): -100.0}},
    "the likeliest alone": {"temperature": 1.0, "seed": 5, "top_k": 2},
    "log probabilities": {"logprobs": 3},
    "all": {
        "temperature": 1.0,
        "seed": 5,
        "frequency_penalty": 2.0,
        "logit_bias": {ord("a"): 1.0},
        "top_k": 3,
        "logprobs": 4,
    },
}


def logprobs(deltas: list[Delta]) -> list[TokenLogprob]:
    return [each for delta in deltas for each in delta.logprobs]


@pytest.mark.parametrize("case", CASES)
async def test_a_shaped_answer_goes_on_behind_every_token_as_it_would_have(case: str) -> None:
    """What was delivered is counted as the answer, not as the prompt; and told of only once."""
    async with open_host() as host:
        asked = request(max_tokens=24, **CASES[case])
        whole = await collect(host, asked)
        ids = token_ids(whole)
        for count in range(1, len(ids)):
            behind = msgspec.structs.replace(asked, delivered_ids=ids[:count])
            resumed = await collect(host, behind)
            assert token_ids(resumed) == ids[count:]
            assert logprobs(resumed) == logprobs(whole)[count:]


async def test_a_sequence_that_is_computed_again_keeps_its_shape() -> None:
    """Two that share too few blocks preempt each other, and answer as they do alone."""
    asked = [request(f"prompt {n}", max_tokens=80, **CASES["all"]) for n in range(3)]
    async with open_host() as host:
        alone = [token_ids(await collect(host, each)) for each in asked]
    async with open_host(make_engine(blocks=32), running_max=3) as crowded:
        together: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            together[number] = token_ids(await collect(crowded, asked[number]))

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, number)
        assert crowded.statistics().preemptions > 0
    assert [together[number] for number in range(3)] == alone


async def test_penalties_and_biases_change_the_answer_as_they_say() -> None:
    async with open_host() as host:
        plain = token_ids(await collect(host, request(max_tokens=60)))
        varied = token_ids(await collect(host, request(max_tokens=60, frequency_penalty=2.0)))
        assert max(Counter(varied).values()) < max(Counter(plain).values())
        banned = request(max_tokens=60, logit_bias={ord(" "): -100.0})
        assert ord(" ") not in token_ids(await collect(host, banned))
        assert ord(" ") in plain


async def test_log_probabilities_change_nothing_and_tell_of_every_token() -> None:
    async with open_host() as host:
        plain = await collect(host, request(max_tokens=20))
        told = await collect(host, request(max_tokens=20, logprobs=2))
        assert token_ids(told) == token_ids(plain)
        assert [each.token for each in logprobs(told)] == [bytes((i,)) for i in token_ids(plain)]
        assert {len(each.top) for each in logprobs(told)} == {2}
        # One of four, all of them as likely.
        assert {round(each.logprob, 6) for each in logprobs(told)} == {-1.386294}
        assert not logprobs(plain)


async def test_what_an_engine_cannot_do_it_refuses_whoever_asks() -> None:
    async with open_host() as host:
        refused: list[dict[str, Any]] = [{"regex": "a"}, {"json_schema": "{}"}, {"tools": "[]"}]
        for fields in refused:
            with pytest.raises(RequestError, match="not supported by this model"):
                await collect(host, request(**fields))
    async with open_echo_engine() as echo:
        with pytest.raises(RequestError, match="'logprobs' is not supported"):
            await anext(echo.generate(request(logprobs=1), Context("r")))


@pytest.mark.parametrize("fields", [{}, {"frequency_penalty": 0.1}, {"logprobs": 1}])
async def test_next_to_no_temperature_is_none(fields: dict[str, Any]) -> None:
    """Logits divided by it would be infinite, and the unlikeliest token as good as any."""
    async with open_host() as host:
        greedy = await collect(host, request(**fields))
        for least in (1e-320, 1e-39):
            drawn = await collect(host, request(temperature=least, seed=7, **fields))
            assert token_ids(drawn) == token_ids(greedy)
