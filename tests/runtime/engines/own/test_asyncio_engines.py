"""Generators of asyncio inside trio: items, ends, errors and cancellation cross both ways."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import trio

import trinamo
from trinamo import Context, Delta, EngineError, FinishReason, GenerateRequest, GenerationEngine
from trinamo.runtime.engines.own.asyncio_engines import ITEMS_MAX
from trinamo.runtime.worker.endpoint import single_error

seen: list[str] = []
RAISED = {"raise": ValueError("inside"), "cancel": asyncio.CancelledError()}


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@trinamo.engine(name="aio", loop="asyncio")
async def aio(request: GenerateRequest, context: Context) -> AsyncGenerator[Any, None]:
    try:
        for word in request.text.split():
            await asyncio.sleep(0)
            assert asyncio.current_task() is not None
            yield word + " "
        if request.text in RAISED:
            raise RAISED[request.text]  # noqa: TRY301
        if request.text == "sleep":
            await asyncio.Event().wait()
        while request.text == "endless":
            seen.append("item")
            yield "on "
    except BaseException as error:
        seen.append(type(error).__name__)
        raise


async def ask(engine: GenerationEngine, prompt: str, context: Context | None = None) -> list[Delta]:
    request = GenerateRequest(model="aio", prompt=prompt)
    async with aclosing(engine.generate(request, context or Context("r"))) as deltas:
        return [delta async for delta in deltas]


async def until_seen(what: str) -> None:
    with trio.fail_after(120):
        while what not in seen:
            await trio.sleep(0.001)


async def test_an_asyncio_generator_is_an_engine_for_many_at_once() -> None:
    answers: list[str] = []

    async with aio.open() as engine, trio.open_nursery() as nursery:

        async def one(number: int) -> None:
            deltas = await ask(engine, f"say {number}")
            answers.append("".join(delta.text for delta in deltas))

        for number in range(5):
            nursery.start_soon(one, number)

    assert sorted(answers) == [f"say {number} " for number in range(5)]


async def test_its_error_is_one_sentence() -> None:
    async with aio.open() as engine:
        with pytest.raises(
            EngineError,
            match=r"aio raised ValueError: inside \(test_asyncio_engines.py:\d+, in aio",
        ):
            await ask(engine, "raise")
        assert (await ask(engine, "well"))[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("pause_s", [0, 0.01], ids=["a bare yield", "a timer"])
async def test_without_its_option_it_is_told_of_it_at_its_own_line(pause_s: float) -> None:
    @trinamo.engine(name="plain")
    async def plain(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        await asyncio.sleep(pause_s)
        yield request.text

    async with plain.open() as engine:
        with pytest.raises(
            EngineError, match=r'loop="asyncio".*\(test_asyncio_engines.py:\d+, in plain'
        ):
            await ask(engine, "well")


async def test_a_handler_is_told_how_to_call_asyncio() -> None:
    with pytest.raises(RuntimeError) as caught:
        await asyncio.sleep(0.01)

    assert "trio_asyncio.aio_as_trio" in str(single_error(caught.value, "handler"))


async def test_a_cancellation_of_its_own_is_an_error() -> None:
    async with aio.open() as engine:
        with pytest.raises(EngineError, match="was cancelled"):
            await ask(engine, "cancel")


async def test_being_cancelled_cancels_the_asyncio_task() -> None:
    async with aio.open() as engine:
        with trio.CancelScope() as scope:
            request = GenerateRequest(model="aio", prompt="sleep")
            async with aclosing(engine.generate(request, Context("r"))) as deltas:
                await anext(deltas)
                # From now on its time runs, so that the task has begun however slow the machine is.
                scope.deadline = trio.current_time() + 0.01
                await anext(deltas)
        await until_seen("CancelledError")

        assert scope.cancelled_caught
        assert engine.statistics().running == 0


async def test_stop_is_seen_and_ends_the_answer() -> None:
    context = Context("r")
    async with aio.open() as engine:
        request = GenerateRequest(model="aio", prompt="endless")
        async with aclosing(engine.generate(request, context)) as deltas:
            first = await anext(deltas)
            context.stop()
            rest = [delta async for delta in deltas]

    assert first.finish_reason is None
    assert rest[-1].finish_reason is FinishReason.STOP


async def test_a_consumer_that_takes_nothing_pauses_the_generator() -> None:
    async with aio.open() as engine:
        request = GenerateRequest(model="aio", prompt="endless")
        async with aclosing(engine.generate(request, Context("r"))) as deltas:
            await anext(deltas)
            await until_seen("item")
            await trio.testing.wait_all_tasks_blocked(0.01)
            made = seen.count("item")
            for _ in range(ITEMS_MAX + 1):
                await anext(deltas)

    assert made <= ITEMS_MAX
    assert seen.count("item") > made


async def test_leaving_the_engine_ends_what_still_runs() -> None:
    with trio.fail_after(120):
        async with aio.open() as engine:
            deltas = engine.generate(GenerateRequest(model="aio", prompt="sleep"), Context("r"))
            await anext(deltas)
        with pytest.raises(EngineError, match="was cancelled"):
            await anext(deltas)

    assert seen == ["CancelledError"]


async def test_what_it_loads_is_entered_and_left_by_one_asyncio_task() -> None:
    tasks: list[object] = []

    @trinamo.engine(name="loaded", loop="asyncio")
    @asynccontextmanager
    async def loaded(word: str) -> AsyncIterator[Any]:
        async with asyncio.timeout(60):  # Which asyncio wants left by the task that entered it.
            tasks.append(asyncio.current_task())

            async def answer(
                request: GenerateRequest, context: Context
            ) -> AsyncGenerator[str, None]:
                await asyncio.sleep(0)
                yield word

            yield answer
            await asyncio.sleep(0)
            tasks.append(asyncio.current_task())

    async with loaded.open(arguments={"word": "loaded"}) as engine:
        deltas = await ask(engine, "go")

    assert deltas[0].text == "loaded"
    assert tasks[0] is tasks[1]


async def test_what_cannot_be_loaded_is_a_sentence() -> None:
    @trinamo.engine(name="loaded", loop="asyncio")
    @asynccontextmanager
    async def loaded(*, is_there: bool = False) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        if not is_there:
            raise OSError("no weights")
        yield

    with pytest.raises(trinamo.ConfigError, match="loaded cannot be opened: OSError: no weights"):
        async with loaded.open():
            pass


async def test_what_its_engine_starts_and_nobody_awaits_fails_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in asyncio: a line of the log, and the other answers go on."""

    @trinamo.engine(name="careless", loop="asyncio")
    async def careless(request: GenerateRequest, context: Context) -> AsyncGenerator[Any, None]:
        async def fail() -> None:
            raise OSError("in the background")

        failing = asyncio.create_task(fail())
        await asyncio.wait([failing])
        del failing
        asyncio.get_running_loop().call_soon(int, "no number")
        gc.collect()
        await asyncio.sleep(0)
        yield "whole"

    async with careless.open() as engine:
        answers = [await ask(engine, "go") for _ in range(2)]

    assert ["".join(delta.text for delta in deltas) for deltas in answers] == ["whole"] * 2
    assert "in the background" in caplog.text
    assert "no number" in caplog.text
