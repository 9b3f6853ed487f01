"""Answers of several choices: `n`, lists of prompts, `echo`; over HTTP, from engines that are functions."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
import trio.lowlevel

from tests.sse import parse_events
from trinamo.runtime.context import Context
from trinamo.runtime.errors import EngineError, OverloadedError
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def say_seed(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
    """Two tokens that tell the prompt and the seed."""
    yield Delta(f"{request.prompt or 'chat'}:", [1], prompt_tokens=5, cached_tokens=2)
    await trio.lowlevel.checkpoint()
    yield Delta(str(request.seed), [2], FinishReason.STOP)


def events_of(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_each_prompt_has_n_choices_whose_seeds_follow_one_another(serve: Any) -> None:
    running = await serve(say_seed)
    async with running.client() as client:
        body = {"prompt": ["a", "b"], "n": 2, "seed": 7}
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = await client.post(
            "/v1/completions",
            json=body | {"stream": True, "stream_options": {"include_usage": True}},
        )
    assert [(each["index"], each["text"]) for each in whole["choices"]] == [
        (0, "a:7"),
        (1, "a:8"),
        (2, "b:7"),
        (3, "b:8"),
    ]
    # Of each prompt once; of the answers all.
    assert whole["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    texts: dict[int, str] = defaultdict(str)
    reasons = {}
    *events, last = events_of(streamed.text)
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert dict(sorted(texts.items())) == {0: "a:7", 1: "a:8", 2: "b:7", 3: "b:8"}
    assert reasons == dict.fromkeys(range(4), "stop")
    assert last["usage"] == whole["usage"]
    assert len({context.id for context in running.engine.contexts}) == 8


async def test_a_chat_has_n_choices(serve: Any) -> None:
    running = await serve(say_seed)
    async with running.client() as client:
        whole = (await client.post("/v1/chat/completions", json=CHAT | {"n": 3})).json()
        streamed = await client.post("/v1/chat/completions", json=CHAT | {"n": 3, "stream": True})
    assert [each["message"]["content"] for each in whole["choices"]] == ["chat:None"] * 3
    roles = [
        (choice["index"], choice["delta"]["role"])
        for event in events_of(streamed.text)
        for choice in event["choices"]
        if "role" in choice["delta"]
    ]
    assert sorted(roles) == [(0, "assistant"), (1, "assistant"), (2, "assistant")]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_for_one_choice_fails_the_answer_and_ends_the_others(
    serve: Any, *, stream: bool
) -> None:
    async def fail_second(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        if request.prompt == "b":
            raise EngineError("no second")
        yield Delta("never ", [1])
        await trio.sleep(math.inf)

    running = await serve(fail_second)
    async with running.client() as client:
        with trio.fail_after(120):
            answer = await client.post(
                "/v1/completions", json={"prompt": ["a", "b"], "stream": stream}
            )
        await running.wait_for(lambda: running.engine.running == 0)
    assert "[DONE]" not in answer.text
    assert 'finish_reason":"' not in answer.text
    assert '"error"' in answer.text
    assert stream or answer.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_was_cut_looks_whole_to_nobody(serve: Any, *, stream: bool) -> None:
    async def cut(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("x", [1], None if request.prompt == "b" else FinishReason.STOP)

    running = await serve(cut)
    async with running.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": stream})
    assert "[DONE]" not in answer.text
    assert '"error"' in answer.text


async def test_choices_take_the_places_that_are_free_and_else_come_one_after_another(
    serve: Any,
) -> None:
    most = now = 0

    async def count(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        nonlocal most, now
        now += 1
        most = max(most, now)
        for _turn in range(20):
            await trio.lowlevel.checkpoint()
        now -= 1
        yield Delta("x", [1], FinishReason.STOP)

    running = await serve(count, requests_max=3)
    async with running.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"n": 8})
    assert len(answer.json()["choices"]) == 8
    assert most == 3
    assert running.service.admission.in_flight == 0


async def test_places_of_choices_go_to_who_waits_and_come_back_once_none_waits(serve: Any) -> None:
    """The answer goes on in its own last place, and others are not refused behind its 12 choices."""
    turns: dict[str, list[trio.Event]] = defaultdict(list)

    async def hold(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        end = trio.Event()
        turns[request.prompt or ""].append(end)
        await end.wait()
        yield Delta("x", [1], FinishReason.STOP)

    running = await serve(hold, requests_max=3, queue_max=8)
    admission, engine = running.service.admission, running.engine

    def end_one(who: str) -> None:
        turns[who].pop(0).set()

    async def ask(prompt: str, n: int) -> None:
        answer = await client.post("/v1/completions", json={"prompt": prompt, "n": n})
        assert len(answer.json()["choices"]) == n

    async with running.client() as client, trio.open_nursery() as nursery:
        nursery.start_soon(ask, "many", 12)
        await running.wait_for(lambda: len(turns["many"]) == 3)
        for count in (1, 2, 3):
            nursery.start_soon(ask, "one", 1)
            await running.wait_for(lambda count=count: admission.queue.length == count)
        for count in (1, 2):
            end_one("many")
            await running.wait_for(lambda count=count: len(turns["one"]) == count)
        assert (len(turns["many"]), admission.queue.length) == (1, 1), "its own place is the last"
        end_one("many")
        await running.wait_for(lambda: len(turns["many"]) == 1)
        assert admission.queue.length == 1
        for _ in range(3):
            await running.wait_for(lambda: turns["one"])
            end_one("one")
        await running.wait_for(lambda: engine.running == 1)
        end_one("many")
        for left in (8, 7, 6, 5, 4, 3, 2, 1):
            await running.wait_for(lambda left=left: len(turns["many"]) == min(3, left))
            end_one("many")
    assert admission.in_flight == 0


async def test_choices_wait_for_each_other_where_a_worker_has_no_room_beside(serve: Any) -> None:
    now = 0

    async def one_by_one(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        nonlocal now
        if now:
            raise OverloadedError("one at a time")
        now += 1
        try:
            for _turn in range(5):
                await trio.lowlevel.checkpoint()
            yield Delta("x", [1], FinishReason.STOP)
        finally:
            now -= 1

    running = await serve(one_by_one)
    async with running.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"n": 5, "stream": True})
    assert sum(bool(e["choices"][0]["finish_reason"]) for e in events_of(answer.text)) == 5


async def test_how_many_fell_silent_over_a_choice_is_known_when_it_is_asked_for_anew(
    serve: Any,
) -> None:
    """After two no third one is asked: it may be what blocks them."""
    counts: list[int] = []
    is_tried = trio.Event()

    async def silent_once(_: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        if context.id.endswith(".0"):
            await is_tried.wait()
        else:
            counts.append(context.silence_count)
            is_tried.set()
            if len(counts) == 1:
                context.silence_count += 1
                raise OverloadedError("the others are full")
        yield Delta("x", [1], FinishReason.STOP)

    running = await serve(silent_once)
    async with running.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"n": 2})
    assert len(answer.json()["choices"]) == 2
    assert counts == [0, 1]


async def test_a_client_that_leaves_ends_all_of_its_choices(serve: Any) -> None:
    async def endless(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        while True:
            yield Delta("x", [1])
            await trio.sleep(0.001)

    running = await serve(endless)
    stream = await running.connect()
    async with stream:
        await stream.send_all(running.post(n=4, stream=True))
        await running.wait_for(lambda: running.engine.running == 4)
        assert running.service.admission.in_flight == 4
    await running.wait_quiet()


async def test_a_client_that_reads_slowly_pauses_all_of_its_choices(serve: Any) -> None:
    made = 0

    async def fast(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        nonlocal made
        for _turn in range(2000):
            made += 1
            yield Delta("x" * 1000, [1])
        yield Delta("", [2], FinishReason.STOP)

    running = await serve(fast)
    async with running.client() as client:
        body = CHAT | {"n": 4, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await trio.sleep(0.3)
            assert made < 8000
            text = "".join([part async for part in answer.aiter_text()])
    assert text.count("x" * 1000) == 8000
    assert text.endswith("data: [DONE]\n\n")


PROMPT = [TokenLogprob(b"Paris", 0), TokenLogprob(b" is", -0.5, [(b" is", -0.5), (b" was", -1)])]


async def say_echo(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
    told = [] if request.prompt_logprobs is None else PROMPT
    if request.max_tokens == 0:
        yield Delta("", [], FinishReason.LENGTH, prompt_tokens=2, prompt_logprobs=told)
        return
    own = [] if request.logprobs is None else [TokenLogprob(b" big", -0.1, [(b" big", -0.1)])]
    yield Delta(" big", [7], None, 2, own, prompt_logprobs=told)
    yield Delta("", [], FinishReason.LENGTH)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_prompt_before_the_answer_and_its_log_probabilities(
    serve: Any, *, stream: bool
) -> None:
    running = await serve(say_echo)

    async def ask(**body: Any) -> tuple[str, dict[str, list[Any]]]:
        async with running.client() as client:
            answer = await client.post("/v1/completions", json=body | {"stream": stream})
        bodies = events_of(answer.text) if stream else [answer.json()]
        choices = [choice for each in bodies for choice in each["choices"]]
        told: dict[str, list[Any]] = defaultdict(list)
        for choice in choices:
            for name, values in (choice["logprobs"] or {}).items():
                told[name] += values
        return "".join(choice["text"] for choice in choices), told

    text, told = await ask(prompt="Paris is", echo=True, logprobs=1, max_tokens=1)
    assert text == "Paris is big"
    assert told == {
        "tokens": ["Paris", " is", " big"],
        "token_logprobs": [None, -0.5, -0.1],
        "top_logprobs": [None, {" is": -0.5, " was": -1}, {" big": -0.1}],
        "text_offset": [0, 5, 8],
    }
    text, told = await ask(prompt="Paris is", echo=True, logprobs=1, max_tokens=0)
    assert (text, told["token_logprobs"]) == ("Paris is", [None, -0.5])
    # Of token ids the engine tells the text; nobody asked for the rest.
    assert await ask(prompt=[4, 5], echo=True, max_tokens=1) == ("Paris is big", {})
    assert await ask(prompt="Paris is", echo=True, max_tokens=1) == ("Paris is big", {})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_of_an_answer_that_went_on_elsewhere_is_echoed_once(
    serve: Any, *, stream: bool
) -> None:
    async def say_twice(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta(" big", [7], prompt_tokens=2, prompt_logprobs=PROMPT)
        yield Delta(" now", [8], FinishReason.STOP, prompt_tokens=2, prompt_logprobs=PROMPT)

    running = await serve(say_twice)
    async with running.client() as client:
        body = {"prompt": [4, 5], "echo": True, "stream": stream}
        answer = await client.post("/v1/completions", json=body)
    bodies = events_of(answer.text) if stream else [answer.json()]
    assert "".join(each["choices"][0]["text"] for each in bodies) == "Paris is big now"


async def test_a_stream_that_has_begun_is_not_sent_back_to_the_queue(serve: Any) -> None:
    """Its first choice is with the client: begun anew, the answer would follow itself."""
    asked = 0

    async def takes_one(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise OverloadedError("no room")
        yield Delta("a", [1], FinishReason.STOP, 5)

    running = await serve(takes_one, queue_max=8, queue_timeout_s=0.1, requests_max=1)
    async with running.client() as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "n": 2, "stream": True})
    first, last = [event.data for event in parse_events(answer.content)]
    assert json.loads(first)["choices"][0]["delta"]["content"] == "a"
    assert json.loads(last)["error"]["code"] == "overloaded"
    labels = {"model": "local", "endpoint": "chat", "outcome": "overloaded"}
    assert running.value("requests_total", **labels) == 1
