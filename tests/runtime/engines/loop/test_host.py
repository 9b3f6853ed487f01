"""The step loop over the exact engine: streams, stop, kill, slow consumers, failures, shutdown."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.runtime.engines.loop.hosting import (
    BLOCKS,
    CONTEXT_TOKENS,
    collect,
    gated_host,
    make_engine,
    open_host,
    request,
    settle,
    token_ids,
)
from trinamo.runtime.context import Context
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    Task,
)

pytestmark = pytest.mark.usefixtures("each_way")


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_an_answer_has_the_tokens_asked_for_and_says_why_it_ended() -> None:
    async with open_host() as host:
        deltas = await collect(host, request(max_tokens=8))
        assert len(token_ids(deltas)) == 8
        assert text(deltas) == bytes(token_ids(deltas)).decode()
        assert [delta.finish_reason for delta in deltas] == [None] * 7 + [FinishReason.LENGTH]
        assert [delta.prompt_tokens for delta in deltas] == [6] + [0] * 7
        await settle(host)
        assert (host.statistics().prompt_tokens, host.statistics().completion_tokens) == (6, 8)


@pytest.mark.parametrize("max_tokens", [None, 1000])
async def test_an_answer_ends_with_the_context(max_tokens: int | None) -> None:
    async with open_host() as host:
        deltas = await collect(host, request("x" * 99, max_tokens))
        assert len(token_ids(deltas)) == CONTEXT_TOKENS - 100
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_stop_string_ends_the_answer_and_is_not_shown() -> None:
    async with open_host() as host:
        whole = text(await collect(host, request(max_tokens=40)))
        stop = whole[10:13]
        deltas = await collect(host, request(max_tokens=40, stop=[stop]))
        assert text(deltas) == whole[: whole.index(stop)]
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert len(token_ids(deltas)) == whole.index(stop) + 3
        await settle(host)


async def test_text_held_back_as_a_possible_stop_is_shown_at_the_end() -> None:
    async with open_host() as host:
        whole = text(await collect(host, request(max_tokens=10)))
        deltas = await collect(host, request(max_tokens=10, stop=[whole[-2:] + "\0"]))
        assert text(deltas) == whole
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_tokens_are_told_and_become_the_text_again_without_a_place_in_the_steps() -> None:
    prompt = "one wörd"
    async with open_host() as host:
        asked = msgspec.structs.replace(request(prompt), task=Task.TOKENIZE)
        [told] = await collect(host, asked)
        tokens = told.prompt_token_ids
        assert (bytes(tokens[1:]).decode(), told.prompt_tokens) == (prompt, len(tokens))
        again = GenerateRequest(model="exact", task=Task.DETOKENIZE, token_ids=[*tokens[1:]])
        [made] = await collect(host, again)
        assert (made.text, made.finish_reason) == (prompt, FinishReason.STOP)
        assert host.statistics().steps == 0


async def test_many_answers_share_the_steps_and_none_changes() -> None:
    prompts = [f"prompt number {i} " * (1 + i % 3) for i in range(12)]
    async with open_host(running_max=5, step_tokens_max=20, chunk_tokens_max=7) as host:
        alone = [token_ids(await collect(host, request(p, 20))) for p in prompts]
        steps = host.statistics().steps
        together: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            together[number] = token_ids(await collect(host, request(prompts[number], 20)))

        async with trio.open_nursery() as nursery:
            for number in range(len(prompts)):
                nursery.start_soon(ask, number)
        assert [together[i] for i in range(len(prompts))] == alone
        assert host.statistics().steps - steps < steps / 2
        await settle(host)


async def test_answers_preempted_for_lack_of_blocks_do_not_change() -> None:
    async with open_host(make_engine(blocks=32)) as host:
        # Of one prompt they would share their blocks.
        prompts = [f"{number} some text" for number in range(4)]
        alone = [token_ids(await collect(host, request(prompt, 90))) for prompt in prompts]
        answers: dict[str, list[int]] = {}

        async def ask(prompt: str) -> None:
            answers[prompt] = token_ids(await collect(host, request(prompt, 90)))

        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, prompt)
        assert [answers[prompt] for prompt in prompts] == alone
        assert host.statistics().preemptions > 0
        await settle(host)


async def test_stop_ends_after_at_most_one_more_step_and_what_is_queued_arrives() -> None:
    async with gated_host() as (host, gate), trio.open_nursery() as nursery:
        context = Context("r")
        got: list[Delta] = []

        async def consume() -> None:
            got.extend(await collect(host, request(max_tokens=50), context))

        nursery.start_soon(consume)
        await trio.testing.wait_all_tasks_blocked()
        await gate.let_steps_happen(3)
        context.stop()
        await gate.let_steps_happen(1)
        assert len(token_ids(got)) == 4
        assert got[-1].finish_reason is FinishReason.STOP
        await settle(host)
        assert host.statistics().cancellations == 1


async def test_stop_while_waiting_gives_an_empty_answer_at_once() -> None:
    async with gated_host(running_max=1) as (host, gate), trio.open_nursery() as nursery:
        nursery.start_soon(collect, host, request())
        await trio.testing.wait_all_tasks_blocked()
        context = Context("waiting")
        context.stop()
        got: list[Delta] = []

        async def consume() -> None:
            got.extend(await collect(host, request(), context))

        nursery.start_soon(consume)
        await trio.testing.wait_all_tasks_blocked()
        await gate.let_steps_happen(1)
        assert got == [Delta("", [], FinishReason.STOP, 6)]
        nursery.cancel_scope.cancel()


async def test_kill_in_mid_prefill_frees_the_blocks_before_the_next_step() -> None:
    async with gated_host(chunk_tokens_max=16) as (host, gate), trio.open_nursery() as nursery:
        context = Context("r")

        async def handle() -> None:
            with context.scope:
                await collect(host, request("x" * 99), context)

        nursery.start_soon(handle)
        await trio.testing.wait_all_tasks_blocked()
        await gate.let_steps_happen(2)
        assert gate.inside == 1
        context.kill()
        await trio.testing.wait_all_tasks_blocked()
        # The step may still be writing the blocks, so they are nobody else's yet.
        assert host.statistics().blocks_used == 25
        await gate.let_steps_happen(1)
        assert gate.inside == 0
        assert host.statistics().cancellations == 1
        await settle(host)


async def test_many_consumers_that_leave_midway_leave_nothing_behind() -> None:
    async with open_host(running_max=8, waiting_max=64, queued_deltas_max=4) as host:
        tasks = trio.lowlevel.current_statistics().tasks_living

        async def consume(number: int) -> None:
            asked = request(f"number {number}" * (1 + number % 5), 30)
            context = Context(str(number))
            with context.scope:
                async with aclosing(host.generate(asked, context)) as deltas:
                    seen = 0
                    async for _ in deltas:
                        seen += 1
                        if number % 6 == 1 and seen == number % 7:
                            return
                        if number % 6 == 2 and seen == number % 5:
                            context.kill()
                if number % 3 == 0:
                    assert seen == 30

        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(consume, number)
        await settle(host)
        assert trio.lowlevel.current_statistics().tasks_living == tasks


@pytest.mark.parametrize(("running_max", "blocks"), [(8, BLOCKS), (1, BLOCKS), (8, 32)])
async def test_a_slow_consumer_pauses_its_own_answer_only(running_max: int, blocks: int) -> None:
    """Not the loop, and neither its slot nor its blocks are missing to the others."""
    options: dict[str, Any] = {"queued_deltas_max": 4, "running_max": running_max}
    async with open_host(make_engine(blocks), **options) as host:
        alone = token_ids(await collect(host, request("slow", 100)))
        async with aclosing(host.generate(request("slow", 100), Context("slow"))) as slow:
            got = [await anext(slow)]
            await trio.testing.wait_all_tasks_blocked()
            assert host.statistics().paused == 1
            for _ in range(3):
                assert len(token_ids(await collect(host, request("fast", 100)))) == 100
            assert host.statistics().completion_tokens <= 100 + 300 + 5
            got += [delta async for delta in slow]
        assert token_ids(got) == alone
        await settle(host)
