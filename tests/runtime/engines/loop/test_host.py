"""The step loop over the exact engine: streams, stop, kill, slow consumers, failures, shutdown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import Dims, ExactEngine
from trinamo.runtime.engines.loop.host import EngineHost, open_engine_host
from trinamo.runtime.engines.loop.step import StepItem
from trinamo.runtime.errors import EngineError, OverloadedError, RequestError, UnavailableError
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest

Step = Callable[[Sequence[StepItem]], list[int | None]]
CONTEXT_TOKENS = 128
BLOCKS = 64
SMALL = Dims(layers=1, width=16, hidden=16, heads=2, kv_heads=1)


class FaultyEngine(ExactEngine):
    """An exact engine whose next steps can be made to fail."""

    failure: Exception | None = None
    recovery_failure: Exception | None = None
    release_failure: Exception | None = None
    text_failure: Exception | None = None
    lost_tokens = 0
    recoveries = 0
    is_closed = False

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        if self.failure is not None:
            raise self.failure
        return super().step(items)[self.lost_tokens :]

    def release(self, slot: int) -> None:
        if self.release_failure is not None:
            raise self.release_failure

    def token_bytes(self, token_id: int) -> bytes:
        if self.text_failure is not None:
            raise self.text_failure
        return super().token_bytes(token_id)

    def recover(self) -> None:
        if self.recovery_failure is not None:
            raise self.recovery_failure
        self.recoveries += 1
        self.failure = self.release_failure = None
        self.lost_tokens = 0

    def close(self) -> None:
        self.is_closed = True


class Gate:
    """A hop that lets a step happen only when the test says so."""

    def __init__(self) -> None:
        self.permits = trio.Semaphore(0)
        self.inside = 0

    async def hop(self, step: Step, items: Sequence[StepItem]) -> list[int | None]:
        self.inside += 1
        await self.permits.acquire()
        self.inside -= 1
        return step(items)

    async def let_steps_happen(self, count: int) -> None:
        for _ in range(count):
            self.permits.release()
            await trio.testing.wait_all_tasks_blocked()


async def inline_hop(step: Step, items: Sequence[StepItem]) -> list[int | None]:
    await trio.lowlevel.checkpoint()
    return step(items)


def make_engine(blocks: int = BLOCKS) -> FaultyEngine:
    return FaultyEngine(
        dims=SMALL, context_tokens_max=CONTEXT_TOKENS, block_tokens=4, block_count=blocks
    )


def open_host(
    engine: FaultyEngine | None = None, **options: Any
) -> AbstractAsyncContextManager[EngineHost]:
    options.setdefault("hop", inline_hop)
    return open_engine_host(engine or make_engine(), **options)


@asynccontextmanager
async def gated_host(**options: Any) -> AsyncIterator[tuple[EngineHost, Gate]]:
    gate = Gate()
    async with open_host(hop=gate.hop, **options) as host:
        yield host, gate


def request(prompt: str = "hello", max_tokens: int | None = 8, **fields: Any) -> GenerateRequest:
    fields.setdefault("temperature", 0)
    return GenerateRequest(model="exact", prompt=prompt, max_tokens=max_tokens, **fields)


async def collect(
    host: EngineHost, asked: GenerateRequest, context: Context | None = None
) -> list[Delta]:
    async with aclosing(host.generate(asked, context or Context("r"))) as deltas:
        return [delta async for delta in deltas]


async def drain(deltas: AsyncIterator[Delta]) -> None:
    async for _ in deltas:
        pass


def token_ids(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def settle(host: EngineHost) -> None:
    """Wait until the loop has nothing to do, and check that nothing is held."""
    await trio.testing.wait_all_tasks_blocked()
    found = host.statistics()
    assert (found.running, found.waiting, found.paused, found.blocks_used) == (0, 0, 0, 0)
    assert found.blocks_free == host.info.block_count


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
        alone = token_ids(await collect(host, request("some text", 90)))
        answers: list[list[int]] = []

        async def ask() -> None:
            answers.append(token_ids(await collect(host, request("some text", 90))))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
        assert answers == [alone] * 4
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
        assert got[-1].finish_reason is FinishReason.CANCELLED
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
        assert got == [Delta("", [], FinishReason.CANCELLED, 6)]
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
    async with open_host(running_max=8, waiting_max=64, mailbox_deltas_max=4) as host:
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
    options: dict[str, Any] = {"mailbox_deltas_max": 4, "running_max": running_max}
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


async def test_a_failed_step_fails_those_running_and_the_rest_goes_on() -> None:
    engine = make_engine()
    async with open_host(engine, running_max=1) as host:
        outcomes: dict[int, list[Delta] | EngineError] = {}

        async def ask(number: int) -> None:
            try:
                outcomes[number] = await collect(host, request(f"request {number}", 6))
            except EngineError as error:
                outcomes[number] = error

        engine.failure = ArithmeticError("overflow in layer 3")
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, number)
        failed = [o for o in outcomes.values() if isinstance(o, EngineError)]
        assert [e.message for e in failed] == [
            "a step failed with ArithmeticError: overflow in layer 3"
        ]
        assert sum(len(token_ids(o)) == 6 for o in outcomes.values() if isinstance(o, list)) == 2
        assert host.statistics().failures == 1
        await settle(host)


async def test_an_engine_that_cannot_recover_refuses_all_later_requests_with_the_reason() -> None:
    engine = make_engine()
    async with open_host(engine, running_max=1) as host:
        engine.failure = RuntimeError("step")
        engine.recovery_failure = RuntimeError("beyond repair")

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


async def test_a_token_without_text_fails_its_own_answer_and_no_other() -> None:
    engine = make_engine()
    async with open_host(engine) as host:
        async with aclosing(host.generate(request(max_tokens=100), Context("r"))) as deltas:
            await anext(deltas)
            engine.text_failure = LookupError("no such token")
            with pytest.raises(EngineError, match="has no text: LookupError: no such token"):
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
    async with open_host(engine, mailbox_deltas_max=4) as host:
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
        with trio.fail_after(5):
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
        async with open_host(engine, mailbox_deltas_max=2) as host:
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
        with pytest.raises(OverloadedError, match="waiting"):
            await collect(host, request())
        n.cancel_scope.cancel()


@pytest.mark.parametrize(
    "asked",
    [
        request("x" * CONTEXT_TOKENS),
        request(max_tokens=0),
    ],
)
async def test_bad_input_is_refused_before_it_costs_anything(asked: GenerateRequest) -> None:
    async with open_host() as host:
        with pytest.raises(RequestError):
            await collect(host, asked)
        await settle(host)
        assert host.statistics().steps == 0


async def test_nothing_happens_before_the_first_delta_is_asked_for() -> None:
    async with open_host() as host, aclosing(host.generate(request(), Context("r"))):
        await settle(host)
