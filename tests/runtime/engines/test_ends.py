"""When an answer ends: by tokens that a request names, after as many as it asks for, or at no end token."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import msgspec
import pytest
from trio.testing import MockClock

from tests.runtime.engines.loop.hosting import (
    CONTEXT_TOKENS,
    SMALL,
    FaultyEngine,
    inline_hop,
    request,
    token_ids,
)
from trinamo.runtime.context import Context
from trinamo.runtime.engines import GenerationEngine, open_echo_engine
from trinamo.runtime.engines.loop.host import open_engine_host
from trinamo.runtime.engines.mocker.engine import MockerOptions, expected_text, open_mocker_engine
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest

SPACE = ord(" ")


class EndingEngine(FaultyEngine):
    """Exact, but its space ends an answer."""

    end_token_ids = frozenset({SPACE})


def ending(**options: Any) -> AbstractAsyncContextManager[GenerationEngine]:
    engine = EndingEngine(
        dims=SMALL, context_tokens_max=CONTEXT_TOKENS, block_tokens=4, block_count=64
    )
    return open_engine_host(engine, hop=inline_hop, **options)


def mocker() -> AbstractAsyncContextManager[GenerationEngine]:
    options = MockerOptions(
        num_gpu_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=8
    )
    return open_mocker_engine(options, context_tokens_max=CONTEXT_TOKENS)


Open = Callable[[], AbstractAsyncContextManager[GenerationEngine]]
both = pytest.mark.parametrize("opened", [ending, mocker])


async def ask(engine: GenerationEngine, asked: GenerateRequest) -> list[Delta]:
    async with aclosing(engine.generate(asked, Context("r"))) as deltas:
        return [delta async for delta in deltas]


def told(deltas: list[Delta]) -> tuple[str, list[int], FinishReason | None]:
    return "".join(each.text for each in deltas), token_ids(deltas), deltas[-1].finish_reason


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "penalised": {"frequency_penalty": 1.0, "temperature": 1.0, "seed": 4},
    "told": {"logprobs": 2},
}


@pytest.mark.parametrize("case", CASES)
async def test_an_end_token_that_is_to_be_passed_over_is_never_chosen(case: str) -> None:
    """So the answer has all the tokens that were asked for, each with its text."""
    async with ending() as engine:
        stopped = [await ask(engine, request(f"{n}", 40, **CASES[case])) for n in range(4)]
        assert FinishReason.STOP in [deltas[-1].finish_reason for deltas in stopped]
        for number in range(4):
            asked = request(f"{number}", 40, ignore_eos=True, **CASES[case])
            text, ids, reason = told(await ask(engine, asked))
            assert (len(ids), len(text), reason) == (40, 40, FinishReason.LENGTH)
            assert SPACE not in ids


@both
@pytest.mark.parametrize("case", ["plain", "sampled"])
async def test_a_token_that_a_request_names_ends_it_and_has_no_text(
    opened: Open, case: str, autojump_clock: MockClock
) -> None:
    async with opened() as engine:
        asked = request("some words", 40, ignore_eos=True, **CASES[case])
        whole, ids, _ = told(await ask(engine, asked))
        last = ids[12]
        named = msgspec.structs.replace(asked, stop_token_ids=[9999, last])
        first = ids.index(last)
        assert told(await ask(engine, named)) == (
            whole[:first],
            ids[: first + 1],
            FinishReason.STOP,
        )
        # An answer whose last delivered token ended it is over, and only that is told.
        over = msgspec.structs.replace(named, delivered_ids=ids[: first + 1])
        assert told(await ask(engine, over)) == ("", [], FinishReason.STOP)


@both
@pytest.mark.parametrize("case", ["plain", "sampled"])
async def test_no_token_ends_an_answer_before_there_are_as_many_as_it_asks_for(
    opened: Open, case: str, autojump_clock: MockClock
) -> None:
    """Stop strings do. Wherever it goes on, it goes on as it would have."""
    ends = [SPACE, *b"aeiou"]
    async with opened() as engine:
        asked = request("some words", 60, min_tokens=20, stop_token_ids=ends, **CASES[case])
        deltas = await ask(engine, asked)
        text, ids, reason = told(deltas)
        assert reason is FinishReason.STOP
        assert len(ids) > 20
        assert ids[-1] in ends
        assert not set(ids[:-1]) & set(ends)
        for count in (1, 19, 20, len(ids) - 1):
            behind = msgspec.structs.replace(asked, delivered_ids=ids[:count])
            assert told(await ask(engine, behind))[1] == ids[count:]
        early = msgspec.structs.replace(asked, stop=[text[3:5]])
        assert len(told(await ask(engine, early))[1]) <= 5


async def test_what_the_mocker_will_say_is_known_with_its_ends(autojump_clock: MockClock) -> None:
    asked = request("abc", 40, min_tokens=9, stop_token_ids=[SPACE, *b"aei"])
    async with mocker() as engine:
        text, ids, _ = told(await ask(engine, asked))
        assert text == expected_text(asked, 40)
        assert len(ids) == len(text) + 1


async def test_the_echo_is_as_long_as_it_is_asked_to_be() -> None:
    async with open_echo_engine() as echo:
        said = [GenerateRequest(model="echo", prompt="one two", max_tokens=5)]
        said += [msgspec.structs.replace(said[0], ignore_eos=True)]
        said += [msgspec.structs.replace(said[0], min_tokens=3)]
        token = zlib.crc32(b" one") % (1 << 31)
        assert token == zlib.crc32(b" one")
        said += [msgspec.structs.replace(said[1], stop_token_ids=[token])]
        answers = [told(await ask(echo, each)) for each in said]
    assert [(text, len(ids), reason) for text, ids, reason in answers] == [
        ("one two", 2, FinishReason.STOP),
        ("one two one two one", 5, FinishReason.LENGTH),
        ("one two one", 3, FinishReason.STOP),
        ("one two", 3, FinishReason.STOP),
    ]
