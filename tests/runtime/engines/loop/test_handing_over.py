"""Prompts computed in one engine, and answered from the blocks of another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing

from tests.runtime.engines.loop.hosting import (
    Gathering,
    collect,
    gated_host,
    make_engine,
    open_host,
    request,
    settle,
    token_ids,
)
from tests.runtime.kv.ranges import ranges_of
from trinamo.runtime.context import Context
from trinamo.runtime.engines.handoff import HandsOver, Reservation
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.engines.loop.pinned import Pinned
from trinamo.runtime.errors import (
    EngineError,
    KilledError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from trinamo.runtime.protocol.openai.generate import FinishReason, GenerateRequest

LONG = "the quick brown fox jumps over it"


def copy_block(source: EngineHost, here: int, target: EngineHost, there: int) -> None:
    """One block's bytes, as a transfer moves them."""
    assert source.kv is not None
    assert target.kv is not None
    for ours, theirs in zip(
        ranges_of(source.kv.memory, [here]), ranges_of(target.kv.memory, [there]), strict=True
    ):
        theirs[:] = ours


async def hand_over(
    source: EngineHost, target: EngineHost, asked: GenerateRequest, *, dropped: Sequence[int] = ()
) -> list[int]:
    """Prefill in `source`, copy block by block as they fill, decode in `target`; the tokens."""
    sink = Gathering()
    async with target.reserve(asked, Context("d")) as reservation:
        async with source.prefill_and_keep(asked, Context("p")) as kept:
            assert len(kept.block_ids) == len(reservation.block_ids)
            sent = 0
            while sent < len(kept.block_ids):
                filled = await kept.wait_filled(sent)
                for index in set(range(sent, filled)) - set(dropped):
                    copy_block(source, kept.block_ids[index], target, reservation.block_ids[index])
                sent = filled
            first_token = await kept.first_token()
        await reservation.adopt(first_token, sink)
    assert sink.deltas[-1].finish_reason is FinishReason.LENGTH
    assert [delta.prompt_tokens for delta in sink.deltas][:2] == [len(asked.prompt or "") + 1, 0]
    return token_ids(sink.deltas)


@pytest.mark.parametrize("prompt", ["a", "abc", "abcd", LONG])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5}])
async def test_a_prompt_computed_elsewhere_goes_on_with_the_same_tokens(
    prompt: str, fields: dict[str, float]
) -> None:
    asked = request(prompt, 24, **fields)
    async with (
        open_host(chunk_tokens_max=5) as source,
        open_host() as target,
        open_host() as alone,
    ):
        whole = token_ids(await collect(alone, asked))
        # Elsewhere it lies at other block numbers.
        async with target.reserve(request("x" * 9), Context("other")):
            assert await hand_over(source, target, asked) == whole
        for host in (source, target):
            await settle(host)
        assert target.statistics().prompt_tokens == 0
        assert source.statistics().completion_tokens == 0


@pytest.mark.parametrize("block", range(9))
async def test_a_block_that_is_missing_changes_the_tokens(block: int) -> None:
    asked = request(LONG, 24)
    async with open_host() as source, open_host() as target, open_host() as alone:
        whole = token_ids(await collect(alone, asked))
        assert await hand_over(source, target, asked, dropped=[block]) != whole


async def test_blocks_are_told_as_they_are_filled_and_the_last_with_the_first_token() -> None:
    engine = make_engine()
    async with gated_host(engine=engine, chunk_tokens_max=5) as (host, gate):
        assert isinstance(host, HandsOver)
        prompt = host.examine(request("x" * 13))
        assert (len(prompt.token_ids), prompt.cached_tokens) == (14, 0)
        told: list[int] = []

        async def follow() -> None:
            async with host.prefill_and_keep(request("x" * 13), Context("p")) as kept:
                while not told or told[-1] < len(kept.block_ids):
                    told.append(await kept.wait_filled(told[-1] if told else 0))
                # At once, and always, once it is complete.
                assert await kept.wait_filled(99) == 4
                assert await kept.first_token() == await kept.first_token()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await trio.testing.wait_all_tasks_blocked()
            # 5, 10 and 14 tokens in blocks of four.
            for _ in range(3):
                await gate.let_steps_happen(1)
        assert told == [1, 2, 4]
        await settle(host)
        assert host.statistics().cancellations == 0


async def test_a_reserved_sequence_takes_no_part_in_the_steps_and_is_never_preempted() -> None:
    async with open_host(make_engine(32)) as host:
        async with host.reserve(request("x" * 39), Context("r")) as reservation:
            for number in range(3):
                # Alone they would need all the blocks.
                got = await collect(host, request(f"{number}" * 60, 24))
                assert len(token_ids(got)) == 24
            assert host.statistics().preemptions == 0
            assert len(reservation.block_ids) == 10
            assert host.statistics().blocks_used == 10
        await settle(host)


async def test_whoever_outgrows_what_the_pinned_leave_waits_for_them() -> None:
    async with open_host(make_engine(32)) as host, trio.open_nursery() as nursery:
        done = trio.Event()

        async def ask() -> None:
            assert len(token_ids(await collect(host, request("y" * 60, 40)))) == 40
            done.set()

        async with host.reserve(request("x" * 59), Context("r")):
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert host.statistics().preemptions == 1
            assert not done.is_set()
        with trio.fail_after(120):
            await done.wait()


async def test_entering_waits_for_blocks_and_leaves_nothing_when_it_is_cancelled() -> None:
    async with open_host(make_engine(32)) as host, host.reserve(request("x" * 99), Context("a")):
        with trio.move_on_after(0.01):
            async with host.reserve(request("x" * 99), Context("b")):
                pytest.fail("there are no blocks for it")
        await trio.testing.wait_all_tasks_blocked()
        assert (host.statistics().waiting, host.statistics().blocks_used) == (0, 25)


async def test_a_full_queue_and_a_bad_request_are_refused_on_entering() -> None:
    async with open_host(make_engine(32), waiting_max=1) as host, trio.open_nursery() as nursery:

        async def reserve() -> None:
            async with host.reserve(request("x" * 99), Context("r")):
                await trio.sleep_forever()

        for _ in range(2):
            nursery.start_soon(reserve)
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(OverloadedError):
            async with host.prefill_and_keep(request(), Context("r")):
                pass
        with pytest.raises(RequestError):
            async with host.reserve(request(""), Context("r")):
                pass
        with pytest.raises(RequestError):
            host.examine(request(""))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("word", ["stop", "kill"])
async def test_stop_and_kill_end_a_kept_prefill_within_a_step(word: str) -> None:
    async with gated_host(chunk_tokens_max=5) as (host, gate):
        context = Context("p")

        async def follow() -> None:
            with pytest.raises(KilledError):
                async with host.prefill_and_keep(request("x" * 90), context) as kept:
                    await kept.wait_filled(20)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await trio.testing.wait_all_tasks_blocked()
            await gate.let_steps_happen(2)
            getattr(context, word)()
        assert host.statistics().steps == 2
        await gate.let_steps_happen(1)
        await settle(host)
        assert host.statistics().cancellations == 1


async def reserved_until(host: EngineHost, happen: trio.Event) -> None:
    sink = Gathering()
    async with host.reserve(request(), Context("r")) as reservation:
        await happen.wait()
        await reservation.adopt(97, sink)


async def test_a_reservation_that_ended_cannot_be_adopted() -> None:
    happen = trio.Event()
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:

            async def expect(host: EngineHost) -> None:
                with pytest.raises(UnavailableError):
                    await reserved_until(host, happen)

            async with open_host() as host:
                nursery.start_soon(expect, host)
                await trio.testing.wait_all_tasks_blocked()
            happen.set()
    engine = make_engine()
    async with open_host(engine) as host:
        async with host.reserve(request(), Context("r")) as reservation:
            engine.failure = ArithmeticError("overflow")
            with pytest.raises(EngineError):
                await collect(host, request())
            with pytest.raises(EngineError):
                await reservation.adopt(97, Gathering())
        await settle(host)


async def test_leased_blocks_of_a_reservation_that_was_left_are_nobody_s_until_settled() -> None:
    async with open_host() as host:
        assert host.kv is not None
        async with host.reserve(request("x" * 9), Context("r")) as reservation:
            leased = reservation.block_ids[1:]
            host.kv.pool.lease(leased)
        await trio.testing.wait_all_tasks_blocked()
        statistics = host.statistics()
        assert (statistics.blocks_used, statistics.blocks_free) == (0, 62)
        host.kv.pool.release(leased)
        await settle(host)


@pytest.mark.parametrize("ending", ["failure", "stop", "kill"])
@pytest.mark.parametrize("is_reserved", [True, False])
async def test_blocks_of_a_pinned_sequence_that_ended_are_its_own_until_it_is_left(
    ending: str, is_reserved: bool
) -> None:
    """Whoever is about to lease them for a transfer does not know yet: they must not be another's."""
    engine, context = make_engine(32), Context("r")
    async with open_host(engine) as host:
        assert host.kv is not None
        asked = request("x" * 99)
        enter = host.reserve if is_reserved else host.prefill_and_keep
        async with enter(asked, context) as pinned:
            if ending == "failure":
                if isinstance(pinned, Pinned):
                    # Or the step that fails might be one without the other.
                    await pinned.first_token()
                engine.failure = ArithmeticError("overflow")
                with pytest.raises(EngineError):
                    await collect(host, request("y"))
                engine.failure = None
            else:
                getattr(context, ending)()
            for letter in "abc":
                await collect(host, request(letter * 20, 4))
            steps = host.statistics().steps
            await trio.testing.wait_all_tasks_blocked()
            assert host.statistics().steps == steps
            assert host.statistics().blocks_used == 25
            host.kv.pool.lease(pinned.block_ids)
        await trio.testing.wait_all_tasks_blocked()
        assert host.statistics().blocks_used == 0
        host.kv.pool.release(pinned.block_ids)
        await settle(host)


async def adopt(reservation: Reservation, token: int) -> Gathering:
    sink = Gathering()
    await reservation.adopt(token, sink)
    return sink


async def test_an_adopted_answer_ends_with_its_first_token_if_that_is_all() -> None:
    async with open_host() as host:
        async with host.reserve(request(max_tokens=1), Context("r")) as reservation:
            sink = await adopt(reservation, ord("z"))
        assert [(d.text, d.finish_reason) for d in sink.deltas] == [("z", FinishReason.LENGTH)]
        async with host.reserve(request(stop=["z"]), Context("r")) as reservation:
            sink = await adopt(reservation, ord("z"))
        assert [(d.text, d.finish_reason) for d in sink.deltas] == [("", FinishReason.STOP)]
        await settle(host)
        assert host.statistics().cancellations == 0


async def test_an_adopted_answer_stops_like_any_other() -> None:
    async with gated_host() as (host, gate), trio.open_nursery() as nursery:
        context = Context("r")
        sink = Gathering()

        async def follow() -> None:
            async with host.reserve(request(max_tokens=50), context) as reservation:
                await reservation.adopt(97, sink)

        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        await gate.let_steps_happen(2)
        context.stop()
        await gate.let_steps_happen(1)
        assert sink.deltas[-1].finish_reason is FinishReason.STOP
        assert len(token_ids(sink.deltas)) == 4
        await settle(host)
