"""The mocker: upstream's timing and block rules, on a virtual clock."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.runtime.kv.ranges import memory_of
from trinamo.runtime.context import Context
from trinamo.runtime.engines.mocker.engine import (
    MockerOptions,
    Timing,
    expected_text,
    open_mocker_engine,
)
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest

SMALL = MockerOptions(num_gpu_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)


def ask(prompt: str, tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(model="mocker", prompt=prompt, max_tokens=tokens)


async def test_the_answer_depends_on_prompt_and_position_alone(autojump_clock: MockClock) -> None:
    texts: dict[str, str] = {}
    async with open_mocker_engine(SMALL, context_tokens_max=32) as host:

        async def generate(prompt: str) -> None:
            async with aclosing(host.generate(ask(prompt), Context(prompt))) as deltas:
                texts[prompt] = "".join([delta.text async for delta in deltas])

        async with trio.open_nursery() as nursery:
            for prompt in ("one", "two and more", "three", "four words of it"):
                nursery.start_soon(generate, prompt)
                # One after the other, as how they meet depends on who came first.
                await trio.lowlevel.checkpoint()
        # Eight blocks of four tokens are too few for all of them at once.
        assert host.statistics().preemptions > 0
        assert host.statistics().blocks_used == 0
    assert texts == {prompt: expected_text(ask(prompt), 8) for prompt in texts}
    assert len(set(texts.values())) == 4


async def test_a_prompt_with_its_answer_so_far_goes_on_with_the_same_text(
    autojump_clock: MockClock,
) -> None:
    whole = expected_text(ask("prompt"), 8)
    assert expected_text(ask("prompt" + whole[:3]), 5) == whole[3:]


async def test_what_a_tenant_asked_before_counts_as_cached_for_him_alone(
    autojump_clock: MockClock,
) -> None:
    async with open_mocker_engine(SMALL, context_tokens_max=32) as host:
        found = []
        for tenant in ("one", "one", "two"):
            asked = msgspec.structs.replace(ask("nine to one", 4), tenant=tenant)
            async with aclosing(host.generate(asked, Context("r"))) as deltas:
                found.append(max([delta.cached_tokens async for delta in deltas]))
        # Twelve tokens are three blocks, but the last token is always computed.
        assert found == [0, 8, 0]


def test_the_timing_is_upstreams() -> None:
    timing = Timing()
    assert timing.prefill([]) == 0
    assert timing.prefill([600, 400]) == pytest.approx(0.4209989 + 15.18344 + 16.50142)
    assert timing.decode(0.0) == pytest.approx(5.74)
    assert timing.decode(1.0) == pytest.approx(34.01)


async def test_steps_cost_virtual_time_by_the_speedup(autojump_clock: MockClock) -> None:
    async def duration(options: MockerOptions) -> float:
        async with open_mocker_engine(options) as host:
            started = trio.current_time()
            async with aclosing(host.generate(ask("a" * 99, 11), Context("r"))) as deltas:
                async for _ in deltas:
                    pass
            return trio.current_time() - started

    plain = await duration(MockerOptions())
    # One prefill of 100 tokens, and ten decode steps of an almost empty memory.
    assert plain == pytest.approx((18.024 + 10 * 5.747) / 1e3, rel=0.01)
    assert await duration(MockerOptions(speedup_ratio=10)) == pytest.approx(plain / 10)
    assert await duration(MockerOptions(startup_time_s=5)) == pytest.approx(plain)


async def test_a_chat_and_a_bad_token_id(autojump_clock: MockClock) -> None:
    chat = GenerateRequest(
        model="mocker", messages=[ChatMessage("user", "hello")], max_tokens=4, token_ids=None
    )
    async with open_mocker_engine() as host:
        async with aclosing(host.generate(chat, Context("r"))) as deltas:
            text = "".join([delta.text async for delta in deltas])
        assert text == expected_text(chat, 4)
        bad = GenerateRequest(model="mocker", token_ids=[999])
        with pytest.raises(RequestError, match="token id"):
            await anext(host.generate(bad, Context("s")))


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        MockerOptions(speedup_ratio=0)
    with pytest.raises(ValueError, match="not be negative"):
        MockerOptions(startup_time_s=-1)


@pytest.mark.parametrize("block", range(4))
async def test_an_answer_over_blocks_of_others_reads_all_of_them(
    block: int, autojump_clock: MockClock
) -> None:
    """The second answer goes on behind four blocks of the first, one of which has been changed."""
    texts: list[str] = []
    async with open_mocker_engine(SMALL, context_tokens_max=32) as host:

        async def generate() -> None:
            async with aclosing(host.generate(ask("p" * 16), Context("a"))) as deltas:
                texts.append("".join([delta.text async for delta in deltas]))

        await generate()
        assert host.kv is not None
        memory_of(host.kv).view[0, 0, block, -1] ^= 1
        await generate()
    assert texts[0] == expected_text(ask("p" * 16), 8)
    assert texts[1] != texts[0]
