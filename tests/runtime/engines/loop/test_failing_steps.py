"""Steps that fail, blocks that are missing, engines that close: the loop goes on or says why not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import trio
import trio.testing

from tests.runtime.engines.loop.hosting import (
    BLOCKS,
    CONTEXT_TOKENS,
    Panic,
    collect,
    gated_host,
    make_engine,
    open_host,
    request,
    settle,
    token_ids,
)
from trinamo.runtime.context import Context
from trinamo.runtime.errors import EngineError, OverloadedError, RequestError, UnavailableError
from trinamo.runtime.protocol.openai.generate import Delta
from trinamo.runtime.traces.trace import RequestTrace

pytestmark = pytest.mark.usefixtures("each_way")


async def drain(deltas: AsyncIterator[Delta]) -> None:
    async for _ in deltas:
        pass


@pytest.mark.parametrize("kind", [ArithmeticError, Panic, SystemExit])
async def test_a_failed_step_fails_those_running_and_the_rest_goes_on(
    kind: type[BaseException],
) -> None:
    engine = make_engine()
    async with open_host(engine, running_max=1) as host:
        outcomes: dict[int, list[Delta] | EngineError] = {}

        async def ask(number: int) -> None:
            try:
                outcomes[number] = await collect(host, request(f"request {number}", 6))
            except EngineError as error:
                outcomes[number] = error

        engine.failure = kind("overflow in layer 3")
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, number)
        failed = [o for o in outcomes.values() if isinstance(o, EngineError)]
        assert [e.message for e in failed] == [
            f"a step failed with {kind.__name__}: overflow in layer 3"
        ]
        assert sum(len(token_ids(o)) == 6 for o in outcomes.values() if isinstance(o, list)) == 2
        assert host.statistics().failures == 1
        await settle(host)


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
async def test_an_engine_that_cannot_recover_refuses_all_later_requests_with_the_reason(
    kind: type[BaseException],
) -> None:
    engine = make_engine()
    async with open_host(engine, running_max=1) as host:
        engine.failure = RuntimeError("step")
        engine.recovery_failure = kind("beyond repair")

        async def ask(reason: str) -> None:
            with pytest.raises(EngineError, match=reason):
                await collect(host, request())

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask, "RuntimeError: step")
        await ask("beyond repair")
        assert host.statistics().failures == 3
        await settle(host)


async def test_an_engine_that_fails_to_release_a_slot_recovers_and_the_loop_goes_on() -> None:
    engine = make_engine()
    async with open_host(engine) as host:
        expected = token_ids(await collect(host, request(max_tokens=4)))
        engine.release_failure = RuntimeError("slot 0 is stuck")
        async with aclosing(host.generate(request(max_tokens=100), Context("r"))) as deltas:
            await anext(deltas)
            # The slot of this one cannot be released; what else runs is lost with it.
            assert len(token_ids(await collect(host, request(max_tokens=4)))) == 4
            with pytest.raises(EngineError, match="RuntimeError: slot 0 is stuck"):
                await drain(deltas)
        assert engine.recoveries == 1
        assert token_ids(await collect(host, request(max_tokens=4))) == expected
        await settle(host)


@pytest.mark.parametrize("kind", [LookupError, Panic])
async def test_a_token_without_text_fails_its_own_answer_and_no_other(
    kind: type[BaseException],
) -> None:
    engine = make_engine()
    async with open_host(engine) as host:
        async with aclosing(host.generate(request(max_tokens=100), Context("r"))) as deltas:
            await anext(deltas)
            engine.text_failure = kind("no such token")
            with pytest.raises(EngineError, match=rf"has no text: {kind.__name__}: no such token"):
                await drain(deltas)
        engine.text_failure = None
        assert len(token_ids(await collect(host, request(max_tokens=4)))) == 4
        assert host.statistics().failures == 1
        await settle(host)


async def test_a_step_that_returns_too_few_tokens_is_a_failed_step() -> None:
    engine = make_engine()
    async with open_host(engine) as host:
        engine.lost_tokens = 1
        with pytest.raises(EngineError, match="0 tokens for 1 sequences"):
            await collect(host, request())
        assert len(token_ids(await collect(host, request(max_tokens=4)))) == 4
        await settle(host)


async def test_what_was_computed_before_a_failure_still_arrives() -> None:
    engine = make_engine()
    async with open_host(engine, queued_deltas_max=4) as host:
        async with aclosing(host.generate(request(max_tokens=50), Context("r"))) as deltas:
            await anext(deltas)
            await trio.testing.wait_all_tasks_blocked()
            engine.failure = RuntimeError("late")
            for _ in range(4):
                await anext(deltas)
            with pytest.raises(EngineError, match="late"):
                await anext(deltas)
        await settle(host)


async def test_a_request_starts_when_a_transfer_lets_go_of_the_blocks() -> None:
    """Nothing else happens that could wake the loop."""
    async with open_host() as host, trio.open_nursery() as nursery:
        assert host.kv is not None
        pool = host.kv.pool
        moving = pool.take(BLOCKS)
        assert moving is not None
        pool.lease(moving)
        pool.give_back(moving)
        answers: list[list[Delta]] = []

        async def ask() -> None:
            answers.append(await collect(host, request()))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert host.statistics().waiting == 1
        pool.release(moving)
        with trio.fail_after(120):
            while not answers:
                await trio.lowlevel.checkpoint()
    assert len(token_ids(answers[0])) == 8


async def test_a_request_that_quarantine_left_no_room_for_fails_and_the_next_one_goes_on() -> None:
    async with open_host() as host:
        assert host.kv is not None
        pool = host.kv.pool
        lost = pool.take(BLOCKS - 4)
        assert lost is not None
        pool.lease(lost)
        pool.quarantine(lost)
        with pytest.raises(OverloadedError, match="60 of 64 KV blocks are lost") as caught:
            await collect(host, request("a prompt of forty tokens or a little more"))
        assert caught.value.definite
        assert len(token_ids(await collect(host, request("hi", 3)))) == 3
        with pytest.raises(OverloadedError) as caught:
            await collect(host, request("hi", 40))
        assert not caught.value.definite, "it had tokens already"


async def test_closing_ends_the_answers_in_flight_and_refuses_new_ones() -> None:
    engine = make_engine()
    async with trio.open_nursery() as nursery:
        async with open_host(engine, queued_deltas_max=2) as host:
            deltas = host.generate(request(max_tokens=50), Context("r"))
            await anext(deltas)
        with pytest.raises(UnavailableError, match="closing") as caught:
            await drain(deltas)
        assert not caught.value.definite
        with pytest.raises(UnavailableError, match="closing") as caught:
            await collect(host, request())
        assert caught.value.definite
        assert engine.is_closed
        nursery.cancel_scope.cancel()


async def test_a_full_queue_refuses() -> None:
    async with gated_host(running_max=1, waiting_max=1) as (host, _), trio.open_nursery() as n:
        for _ in range(2):
            n.start_soon(collect, host, request())
            await trio.testing.wait_all_tasks_blocked()
        context = Context("refused")
        context.trace = RequestTrace(trio.current_time, "refused")
        with pytest.raises(OverloadedError, match="waiting"):
            await collect(host, request(), context)
        n.cancel_scope.cancel()
    (leg,) = context.trace.legs
    assert (leg.name, leg.facts["outcome"]) == ("engine", OverloadedError.code)


async def test_a_prompt_that_does_not_fit_is_refused_before_it_costs_anything() -> None:
    async with open_host() as host:
        with pytest.raises(RequestError):
            await collect(host, request("x" * CONTEXT_TOKENS))
        await settle(host)
        assert host.statistics().steps == 0


async def test_nothing_happens_before_the_first_delta_is_asked_for() -> None:
    async with open_host() as host, aclosing(host.generate(request(), Context("r"))):
        await settle(host)
