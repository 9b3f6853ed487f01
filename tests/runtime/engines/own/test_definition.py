"""`@trinamo.engine` on a generator, a class and a context manager: opened, asked, and wrong."""

from __future__ import annotations

import inspect
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self

import pytest
import trio
import trio.lowlevel

import trinamo
from trinamo import (
    ConfigError,
    Context,
    Delta,
    EngineError,
    FinishReason,
    GenerateRequest,
    GenerationEngine,
    OverloadedError,
    RequestError,
)
from trinamo.runtime.engines.own.definition import EngineDefinition
from trinamo.runtime.engines.own.stalls import Stalls


@trinamo.engine(name="parrot", context_tokens_max=64)
async def parrot(
    request: GenerateRequest, context: Context, *, loud: bool = False, times: int = 1
) -> AsyncGenerator[str, None]:
    for word in request.text.split() * times:
        yield (word.upper() if loud else word) + " "


async def ask(
    engine: GenerationEngine, prompt: str = "say it", context: Context | None = None, **given: Any
) -> list[Delta]:
    request = GenerateRequest(model=engine.info.model, prompt=prompt, **given)
    async with aclosing(engine.generate(request, context or Context("r"))) as deltas:
        return [delta async for delta in deltas]


async def answer_of(definition: EngineDefinition, prompt: str = "say it", **opened: Any) -> str:
    async with definition.open(**opened) as engine:
        return "".join(delta.text for delta in await ask(engine, prompt))


async def test_a_generator_is_an_engine() -> None:
    assert await answer_of(parrot) == "say it "
    async with parrot.open() as engine:
        info = engine.info
    assert (info.engine, info.model, info.context_tokens_max) == ("parrot", "parrot", 64)


async def test_a_worker_s_name_and_bound_win() -> None:
    async with parrot.open(model="polly", context_tokens_max=32) as engine:
        assert (engine.info.model, engine.info.context_tokens_max) == ("polly", 32)


async def test_a_model_says_what_it_is_best_asked_with() -> None:
    defaults = trinamo.SamplingDefaults(temperature=0.7, top_p=0.9)

    @trinamo.engine(sampling=defaults)
    async def warm(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        yield request.text

    async with warm.open() as engine:
        assert engine.info.card("", created=1).sampling == defaults


async def test_what_a_generator_tells_of_a_prompt_reaches_who_asked() -> None:
    """With the first text, whatever held that back."""

    @trinamo.engine(features=["prompt_logprobs", "tokenize"])
    async def told(request: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("a", [1], prompt_tokens=3, cached_tokens=2, prompt_token_ids=[7, 8, 9])
        yield Delta("b", [2])

    async with told.open() as engine:
        for stop in ([], ["ab c"]):
            first = (await ask(engine, stop=stop))[0]
            assert (first.cached_tokens, first.prompt_token_ids) == (2, [7, 8, 9])


async def test_a_bare_decorator_takes_the_function_s_name() -> None:
    @trinamo.engine
    async def echo(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        yield request.text

    assert echo.name == "echo"
    assert await answer_of(echo) == "say it"


async def test_arguments_become_what_parameters_are_annotated_with() -> None:
    assert await answer_of(parrot, arguments={"loud": "true", "times": "2"}) == "SAY IT SAY IT "


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lod": "1"}, "takes no argument 'lod'; it takes loud, times"),
        ({"times": "x"}, "argument times is `int`, not 'x'"),
    ],
)
async def test_wrong_arguments_are_a_sentence(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await answer_of(parrot, arguments=arguments)


async def test_a_class_that_loads_something_is_entered_and_left() -> None:
    said: list[str] = []

    class Big:
        def __init__(self, path: str = "none") -> None:
            self.path = path

        async def __aenter__(self) -> Self:
            said.append("loaded")
            return self

        async def __aexit__(self, *_: object) -> None:
            said.append("freed")

        async def answer(
            self, request: GenerateRequest, context: Context
        ) -> AsyncGenerator[str, None]:
            said.append("asked")
            yield self.path

    assert await answer_of(trinamo.engine(name="big")(Big), arguments={"path": "w.bin"}) == "w.bin"
    assert said == ["loaded", "asked", "freed"]


async def test_a_context_manager_may_yield_a_generator_or_a_whole_engine() -> None:
    @trinamo.engine(name="loaded")
    @asynccontextmanager
    async def loaded() -> AsyncIterator[Any]:
        async def answer(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
            yield "from inside"

        yield answer

    whole = trinamo.engine(trinamo.open_echo_engine)

    assert await answer_of(loaded) == "from inside"
    assert await answer_of(whole) == "say it"


async def test_what_cannot_be_opened_says_where() -> None:
    @trinamo.engine(name="broken")
    @asynccontextmanager
    async def broken(*, is_there: bool = False) -> AsyncIterator[Any]:
        if not is_there:
            raise FileNotFoundError("weights.bin")
        yield

    with pytest.raises(
        ConfigError, match=r"broken cannot be opened: .*weights.bin \(test_definition.py:\d+, in b"
    ):
        await answer_of(broken)


@pytest.mark.parametrize("value", [4, "text", object()])
async def test_what_yields_no_generator_is_a_sentence(value: object) -> None:
    with pytest.raises(ConfigError, match=r"engine odd is no async generator"):
        await answer_of(trinamo.engine(name="odd")(lambda: value))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def generator_that_is_not_async(request: GenerateRequest, context: Context) -> Any:
    yield "text"


async def function_that_returns(request: GenerateRequest, context: Context) -> str:
    return "text"


@pytest.mark.parametrize("function", [generator_that_is_not_async, function_that_returns])
async def test_an_answer_that_is_no_async_generator_is_told_what_to_write(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"write `async def answer.*lacks request, context"):
        await answer_of(trinamo.engine(name="odd")(function))


def test_bounds_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        trinamo.engine(context_tokens_max=4)
    with pytest.raises(ValueError, match="'trio' or 'asyncio'"):
        trinamo.engine(loop="curio")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="no feature: topk; there are logprobs"):
        trinamo.engine(features=["topk"])


async def test_what_an_engine_cannot_do_is_refused_by_name() -> None:
    definition = trinamo.engine(name="picky", features=["top_k"])(parrot.factory)

    async with definition.open() as engine:
        assert (await ask(engine, top_k=4))[-1].finish_reason is FinishReason.STOP
        with pytest.raises(RequestError, match="'min_p' is not supported by this model"):
            await ask(engine, min_p=0.5)


async def failing(request: GenerateRequest, context: Context) -> AsyncGenerator[Any, None]:
    yield "before "
    match request.text:
        case "raise":
            raise ValueError("a secret")
        case "refuse":
            raise RequestError("say please", param="prompt")
        case "full":
            raise OverloadedError("no more")
        case "wrong":
            yield 4
        case "group":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(raise_later)
        case _:
            pass


async def raise_later() -> None:
    await trio.lowlevel.checkpoint()
    raise KeyError("inside")


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        (
            "raise",
            EngineError,
            r"engine failing raised ValueError: a secret \(test_definition.py:\d",
        ),
        ("group", EngineError, r"engine failing raised KeyError: 'inside'"),
        ("wrong", EngineError, "engine failing yielded an item of type int"),
        ("refuse", RequestError, "^say please$"),
        ("full", OverloadedError, "^no more$"),
    ],
)
async def test_what_an_engine_raises_is_one_typed_error(
    prompt: str, kind: type[Exception], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with trinamo.engine(failing).open() as engine:
        with pytest.raises(kind, match=words):
            await ask(engine, prompt)
        told = [record for record in caplog.records if record.name == "trinamo.engines"]

        assert len(told) == (kind is EngineError)
        assert (await ask(engine, "well"))[-1].finish_reason is FinishReason.STOP
        assert (engine.statistics().failures, engine.statistics().running) == (1, 0)


async def test_a_function_that_does_not_yield_is_a_sentence() -> None:
    class Odd:
        info = None

        async def answer(self, request: GenerateRequest, context: Context) -> str:
            return "whole"

    with pytest.raises(ConfigError, match="`yield` in it"):
        await answer_of(trinamo.engine(Odd))


async def test_stop_ends_the_answer_with_the_next_item() -> None:
    ended: list[str] = []

    @trinamo.engine
    async def endless(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        try:
            while True:
                await trio.lowlevel.checkpoint()
                yield "on "
        finally:
            ended.append("ended")

    context = Context("r")
    async with endless.open() as engine:
        request = GenerateRequest(model="endless", prompt="go")
        deltas = []
        async with aclosing(engine.generate(request, context)) as stream:
            async for delta in stream:
                deltas.append(delta)
                context.stop()

        assert [delta.finish_reason for delta in deltas] == [None, FinishReason.STOP]
        assert ended
        assert engine.statistics().cancellations == 1


async def test_what_is_told_counts_while_the_answer_runs() -> None:
    async with parrot.open() as engine:
        request = GenerateRequest(model="parrot", prompt="say it now")
        async with aclosing(engine.generate(request, Context("r"))) as deltas:
            counts = []
            async for _ in deltas:
                told = engine.statistics()
                counts.append((told.running, told.prompt_tokens, told.completion_tokens))
        told = engine.statistics()

    assert counts[:3] == [(1, 3, 1), (1, 3, 2), (1, 3, 3)]
    assert (told.running, told.prompt_tokens, told.completion_tokens) == (0, 3, 3)


async def test_an_abandoned_answer_closes_its_generator() -> None:
    ended: list[str] = []

    @trinamo.engine
    async def sleepy(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        try:
            await trio.sleep(3600)
            yield "never"
        finally:
            ended.append("ended")

    async with sleepy.open() as engine:
        with trio.move_on_after(0.01) as scope:
            await ask(engine)

        assert scope.cancelled_caught
        assert ended
        assert engine.statistics().running == 0


async def test_who_holds_the_event_loop_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    @trinamo.engine(name="greedy")
    async def greedy(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        for _ in range(2):
            time.sleep(0.3)  # noqa: ASYNC251 -- what is to be found
            yield "slow "

    async with greedy.open() as engine:
        await ask(engine)

    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    # A busy machine may hold another step up, too.
    told = [each for each in told if "(test_definition.py:" in each]
    assert len(told) == 1
    assert re.match(r"engine greedy held the event loop for \d+\.\d\d s", told[0])
    assert "trio.to_thread.run_sync" in told[0]


async def test_a_step_that_does_not_end_is_told_while_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def stuck() -> AsyncGenerator[str, None]:
        give_up = time.monotonic() + 120
        while "still does" not in caplog.text and time.monotonic() < give_up:
            time.sleep(0.01)  # noqa: ASYNC251 -- what is to be found
        yield "late"

    stalls = Stalls("stuck", "trio.to_thread.run_sync", endless_s=0.05, look_s=0.01)
    with stalls.watched():
        async with aclosing(stuck()) as items:
            assert await stalls.next_of(items) == "late"

    (told,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert re.match(
        r"engine stuck has held the event loop for \d+ s and still does \(test_def", told
    )


async def test_a_generator_of_empty_texts_leaves_others_their_turn() -> None:
    @trinamo.engine(name="empty")
    async def empty(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        for _ in range(10_000):
            yield ""
        raise AssertionError("nobody else had a turn")

    async with empty.open() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(ask, engine)
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


@trinamo.engine(name="quits")
async def quits(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
    yield "before"
    raise SystemExit(3)


@trinamo.engine(name="quits", loop="asyncio")
async def quits_asyncio(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
    yield "before"
    raise SystemExit(3)


class Panic(BaseException):
    """As extensions in Rust raise it."""


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
async def test_a_panic_ends_its_own_answer_and_not_the_process(loop: Any) -> None:
    @trinamo.engine(name="panics", loop=loop)
    async def panics(request: GenerateRequest, context: Context) -> AsyncGenerator[str, None]:
        yield "before"
        raise Panic("index out of bounds")

    async with panics.open() as engine:
        for _ in range(2):
            with pytest.raises(EngineError, match=r"Panic\(?.*index out of bounds"):
                await ask(engine)


@pytest.mark.parametrize("definition", [quits, quits_asyncio], ids=["trio", "asyncio"])
async def test_an_answer_that_exits_ends_itself_and_not_the_process(
    definition: EngineDefinition,
) -> None:
    async with definition.open() as engine:
        for _ in range(2):
            with pytest.raises(EngineError, match=r"engine quits raised SystemExit: 3 \(test_def"):
                await ask(engine)
        assert engine.statistics().failures == 2


async def takes_one(request: GenerateRequest) -> AsyncGenerator[str, None]:
    yield request.text


async def takes_a_path(
    request: GenerateRequest, context: Context, path: str
) -> AsyncGenerator[str, None]:
    yield path


@pytest.mark.parametrize(
    ("made", "lacks"),
    [(takes_one, "too many positional arguments"), (takes_a_path, "a required argument: 'path'")],
)
async def test_a_generator_that_cannot_be_asked_is_refused_before_it_is(
    made: Any, lacks: str
) -> None:
    definition = trinamo.engine(name="odd")(made)
    with pytest.raises(ConfigError, match=lacks):
        definition.check({})
    with pytest.raises(ConfigError, match=lacks):
        async with definition.open():
            pass
    if made is takes_a_path:
        definition.check({"path": "here"})
        assert await answer_of(definition, arguments={"path": "here"}) == "here"


def test_a_class_that_is_entered_and_whose_answer_has_no_yield_is_refused_before_it_is_opened() -> (
    None
):
    class Loaded:
        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def answer(self, request: Any, context: Any) -> str:
            return "without yield"

    with pytest.raises(ConfigError, match="is no async generator"):
        trinamo.engine(Loaded).check({})


def test_what_a_step_is_told_of_a_sequence_is_in_the_help() -> None:
    told = inspect.getdoc(trinamo.StepItem) or ""
    assert [name for name in trinamo.StepItem.__struct_fields__ if f"{name}: " not in told] == []
