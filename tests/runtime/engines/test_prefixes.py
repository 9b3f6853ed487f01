"""Answers over blocks that other requests have left: the same tokens, fewer of them computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from tests.runtime.engines.loop.hosting import (
    BLOCKS,
    CONTEXT_TOKENS,
    SMALL,
    FaultyEngine,
    Gathering,
    collect,
    make_engine,
    open_host,
    request,
    settle,
    token_ids,
)
from tests.runtime.kv.naming import OWN, block_hashes
from tests.runtime.kv.ranges import memory_of
from trinamo.runtime.caller.kv.hints import make_hint
from trinamo.runtime.context import Context
from trinamo.runtime.engines.mocker.engine import MockerOptions, expected_text, open_mocker_engine
from trinamo.runtime.errors import EngineError
from trinamo.runtime.protocol.kv.events import BlockSet, Cleared, KvEvent
from trinamo.runtime.protocol.kv.names import BlockNames, block_keys
from trinamo.runtime.protocol.openai.generate import GenerateRequest, ModelCard

SHARED = "a system prompt of some length, "


def without_cache() -> FaultyEngine:
    return FaultyEngine(
        dims=SMALL,
        context_tokens_max=CONTEXT_TOKENS,
        block_tokens=4,
        block_count=BLOCKS,
        has_prefix_cache=False,
    )


async def test_equal_prompts_of_two_tenants_share_no_block() -> None:
    """Nor does a router look for one's prompt among the other's blocks."""
    card = ModelCard(
        name="exact",
        endpoint="a/b/c",
        context_tokens_max=CONTEXT_TOKENS,
        block_tokens=4,
        tokenizer="bytes/exact",
    )
    async with open_host() as host:
        asked = [replace(request(SHARED, 4), tenant=tenant) for tenant in ("one", "two", "")]
        for each in asked:
            assert host.examine(each).cached_tokens == 0
            assert (await collect(host, each))[0].cached_tokens == 0
            assert host.examine(each).cached_tokens == 32
            hint, token_ids = make_hint(each, card, OWN), host.examine(each).token_ids
            assert hint is not None
            assert hint.keys == block_keys(block_hashes(token_ids, 4, each.tenant))
        assert host.statistics().prompt_tokens == 3 * 33
        # Each is told of its own, and once.
        for each in asked:
            told = [delta.cached_tokens for delta in await collect(host, each)]
            assert told == [32] + [0] * (len(told) - 1)
        await settle(host)


@pytest.mark.parametrize("tail", ["", "x", "xyz", "and a question"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5}])
async def test_a_prefix_that_is_found_changes_no_token(tail: str, fields: dict[str, float]) -> None:
    asked = request(SHARED + tail, 24, **fields)
    async with open_host(without_cache()) as alone, open_host(chunk_tokens_max=5) as host:
        whole = token_ids(await collect(alone, asked))
        await collect(host, request(SHARED, 4))
        computed = host.statistics().prompt_tokens
        assert token_ids(await collect(host, asked)) == whole
        # Of the 33 shared tokens 32 fill blocks; the last token of a prompt is always computed.
        assert host.statistics().prompt_tokens - computed == len(tail) + 1
        assert token_ids(await collect(host, asked)) == whole
        await settle(host)


async def test_an_answer_s_own_tokens_are_found_by_the_next_turn() -> None:
    async with open_host(without_cache()) as alone, open_host() as host:
        first = token_ids(await collect(host, request(SHARED, 16)))
        turn = GenerateRequest(
            model="exact",
            token_ids=[256, *SHARED.encode(), *first, *b"go on"],
            max_tokens=16,
            temperature=0,
        )
        computed = host.statistics().prompt_tokens
        assert token_ids(await collect(host, turn)) == token_ids(await collect(alone, turn))
        # The answer's last token has no KV; 48 of the 54 are in full blocks.
        assert host.statistics().prompt_tokens - computed == 6


async def test_many_answers_at_once_over_one_prefix_in_too_few_blocks_do_not_change() -> None:
    prompts = [SHARED + f"{number}" * (1 + number % 9) for number in range(12)]
    async with open_host(without_cache()) as alone:
        expected = {p: token_ids(await collect(alone, request(p, 40))) for p in prompts}
    got: dict[str, list[int]] = {}
    async with open_host(make_engine(36), running_max=8) as host, trio.open_nursery() as nursery:

        async def ask(prompt: str) -> None:
            got[prompt] = token_ids(await collect(host, request(prompt, 40)))

        for prompt in prompts:
            nursery.start_soon(ask, prompt)
    assert got == expected
    assert host.statistics().preemptions > 0


async def test_a_damaged_block_of_the_cache_changes_the_tokens() -> None:
    """That nothing is computed again is why: the flow above would hide it otherwise."""
    asked = request(SHARED + "a question", 24)
    async with open_host() as host:
        whole = token_ids(await collect(host, asked))
        assert host.kv is not None
        prompt = host.examine(asked)
        assert prompt.cached_tokens == 40
        memory = memory_of(host.kv)
        found = host.kv.pool.find(block_hashes(prompt.token_ids, 4)[3])
        assert found is not None
        memory.view[0, 0, found, 1, 0, 0] ^= 1
        assert token_ids(await collect(host, asked)) != whole


async def test_a_reservation_shares_the_blocks_that_are_here_and_the_rest_is_its_own() -> None:
    async with open_host() as host, open_host() as source:
        await collect(host, request(SHARED, 4))
        asked = request(SHARED + "a question", 16)
        whole = token_ids(await collect(source, asked))
        assert host.kv is not None
        assert source.kv is not None
        sink = Gathering()
        async with (
            host.reserve(asked, Context("r")) as reservation,
            source.prefill_and_keep(asked, Context("p")) as kept,
        ):
            skipped = reservation.prompt.cached_tokens // 4
            assert skipped == 8
            first_token = await kept.first_token()
            for mine, theirs in zip(
                reservation.block_ids[skipped:], kept.block_ids[skipped:], strict=True
            ):
                memory_of(host.kv).view[:, :, mine] = memory_of(source.kv).view[:, :, theirs]
            await reservation.adopt(first_token, sink)
        assert token_ids(sink.deltas) == whole
        # Others find what was transferred.
        assert host.examine(asked).cached_tokens == 40
        await settle(host)
        await settle(source)


async def test_a_failed_step_makes_an_engine_forget_what_it_has_stored() -> None:
    engine = make_engine()
    told: list[KvEvent] = []
    async with open_host(engine) as host:
        assert host.listen_blocks(told.extend, OWN)
        whole = token_ids(await collect(host, request(SHARED, 4)))
        engine.failure = ArithmeticError("overflow")
        with pytest.raises(EngineError):
            await collect(host, request("another", 4))
        assert host.examine(request(SHARED)).cached_tokens == 0
        assert token_ids(await collect(host, request(SHARED, 4))) == whole
        assert told.count(Cleared()) == 1
        await settle(host)


async def test_blocks_that_have_other_names_are_forgotten_and_named_anew() -> None:
    """Those of a request under way keep their KV, and are found by nobody."""
    told, names = BlockSet(), BlockNames(b"the cluster's")

    def hear(events: Sequence[KvEvent]) -> None:
        for event in events:
            told.apply(event)

    async with open_host() as host:
        whole = token_ids(await collect(host, request(SHARED, 16)))
        async with aclosing(host.generate(request(SHARED, 16), Context("r"))) as deltas:
            begun = [await anext(deltas)]
            assert host.listen_blocks(hear, names)
            assert host.examine(request(SHARED)).cached_tokens == 0
            begun += [delta async for delta in deltas]
        assert token_ids(begun) == whole
        assert token_ids(await collect(host, request(SHARED, 16))) == whole
        assert host.examine(request(SHARED)).cached_tokens == 32
        await settle(host)
        assert told.hashes == set(
            block_hashes([*host.examine(request(SHARED)).token_ids, *whole], 4, names=names)[
                : len(told)
            ]
        )
        # The same names again are no news.
        assert host.listen_blocks(hear, BlockNames(b"the cluster's"))
        assert host.examine(request(SHARED)).cached_tokens == 32


async def test_events_add_up_to_what_is_stored_while_blocks_are_evicted() -> None:
    told = BlockSet()
    async with open_host(make_engine(34)) as host:
        assert host.kv is not None

        def hear(events: Sequence[KvEvent]) -> None:
            for event in events:
                told.apply(event)

        assert host.listen_blocks(hear, OWN)
        for number in range(8):
            await collect(host, request(SHARED + f"{number % 3}" * 3 * number, 20))
            await settle(host)
            stored = BlockSet()
            for event in host.kv.pool.stored():
                stored.apply(event)
            assert stored.hashes == told.hashes
        hashes = block_hashes(host.examine(request(SHARED)).token_ids, 4)
        assert told.hashes >= set(hashes[:8])


async def test_the_mocker_s_prefix_costs_nothing_and_changes_no_token(
    autojump_clock: MockClock,
) -> None:
    async def durations(*, has_cache: bool) -> list[float]:
        taken: list[float] = []
        options = MockerOptions(block_size=16, enable_prefix_caching=has_cache)
        async with open_mocker_engine(options) as host:
            for tail in ("", " and more", " and more"):
                asked = GenerateRequest(model="mocker", prompt="p" * 4000 + tail, max_tokens=1)
                started = trio.current_time()
                async with aclosing(host.generate(asked, Context("r"))) as deltas:
                    text = "".join([delta.text async for delta in deltas])
                assert text == expected_text(asked, 1)
                taken.append(trio.current_time() - started)
        return taken

    plain = await durations(has_cache=False)
    # 4001 tokens and more each: 16.5 ms, 15 µs a token, and a little for their square.
    assert plain == pytest.approx([0.084] * 3, rel=0.02)
    cached = await durations(has_cache=True)
    assert cached == pytest.approx([plain[0], 0.0167, 0.0167], rel=0.02)


async def test_the_mocker_reads_its_kv_and_it_can_be_as_heavy_as_a_real_one(
    autojump_clock: MockClock,
) -> None:
    options = MockerOptions(num_gpu_blocks=64, block_size=4, kv_bytes_per_token=160)
    asked = GenerateRequest(model="mocker", prompt="a prompt of blocks", max_tokens=8)
    for is_whole in (True, False):
        async with (
            open_mocker_engine(options, context_tokens_max=64) as source,
            open_mocker_engine(options, context_tokens_max=64) as target,
        ):
            assert source.kv is not None
            assert target.kv is not None
            assert memory_of(source.kv).shape.block_bytes == 640
            sink = Gathering()
            async with (
                target.reserve(asked, Context("d")) as reservation,
                source.prefill_and_keep(asked, Context("p")) as kept,
            ):
                first_token = await kept.first_token()
                for mine, theirs in zip(
                    reservation.block_ids, kept.block_ids[: None if is_whole else -1], strict=False
                ):
                    memory_of(target.kv).view[:, :, mine] = memory_of(source.kv).view[:, :, theirs]
                await reservation.adopt(first_token, sink)
            text = "".join(delta.text for delta in sink.deltas)
            assert (text == expected_text(asked, 8)) is is_whole


@pytest.mark.parametrize("count", [0, 8, 24])
def test_kv_that_holds_no_key_and_value_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        MockerOptions(kv_bytes_per_token=count)
