"""Chats whose upstream breaks, and that go on at another one, where they can."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.runtime.engines.upstream.fake import (
    STREAM_HEAD,
    Answer,
    Asked,
    chat_chunk,
    chunk,
    events,
    open_fake,
    open_hop,
    open_two,
    streams,
    texts_of,
)

pytestmark = pytest.mark.slow
REST = streams(events(chat_chunk(" you"), chat_chunk(finish="stop")))
TURN = {"role": "user", "content": "hi"}


def hangs(*chunks: Any) -> Answer:
    """Sends these, and nothing ever after."""

    async def answer(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(events(*chunks, done=False)))
        await trio.sleep_forever()

    return answer


def dies(*chunks: Any) -> Answer:
    """Sends these, and breaks off."""

    async def answer(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(events(*chunks, done=False)))
        await stream.aclose()

    return answer


FINISHED = hangs(chat_chunk("Hel"), chat_chunk("lo"), chat_chunk(finish="stop"))


async def test_a_broken_chat_goes_on_elsewhere_where_that_is_switched_on() -> None:
    """Behind the text that the client has, with what is left of its tokens, and one beginning."""

    async def die(_: Asked, stream: trio.SocketStream) -> None:
        begun = events(
            chat_chunk("", delta_role="assistant"), chat_chunk("Hel"), chat_chunk("lo"), done=False
        )
        await stream.send_all(STREAM_HEAD + chunk(begun))
        await stream.aclose()

    rest = events(chat_chunk(""), chat_chunk(" you"), chat_chunk(finish="stop"))
    async with open_two(resume="vllm") as (front, one, other):
        one.answer, other.answer = die, streams(rest)
        answer = None
        with trio.fail_after(15):
            while not one.asked:
                answer = await front.chat(stream=True, max_tokens=10)

    assert answer is not None
    assert texts_of(answer.text) == "Hello you"
    assert answer.text.endswith("data: [DONE]\n\n")
    resumed = other.asked[-1].json
    assert resumed["messages"][-1] == {"role": "assistant", "content": "Hello"}
    assert resumed["continue_final_message"] is True
    assert resumed["add_generation_prompt"] is False
    assert resumed["max_tokens"] == 8


async def test_a_call_of_a_tool_is_not_gone_on_with() -> None:
    tool = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}
    broken = chat_chunk(choices=[{"index": 0, "delta": {"tool_calls": [tool]}}])

    async def die(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + chunk(events(broken, done=False)))
        await stream.aclose()

    async with open_two(resume="vllm") as (front, one, other):
        one.answer = other.answer = die
        answer = await front.chat(stream=True)

    assert answer.text.count("tool_calls") == 1
    assert '"code":"disconnected"' in answer.text


async def test_nothing_follows_the_end_of_an_answer_that_lost_only_its_end_mark() -> None:
    """Who dies between the finish reason and `[DONE]` has said all."""
    async with open_two(resume="vllm", stall_timeout_s=0.3) as (front, one, other):
        one.answer, other.answer = FINISHED, REST
        answer = None
        with trio.fail_after(15):
            while not one.asked:
                answer = await front.chat(stream=True)
                other.asked.clear()

    assert answer is not None
    assert texts_of(answer.text) == "Hello"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count('"finish_reason": "stop"') == 1
    assert not other.asked


async def test_in_one_hop_neither() -> None:
    often = {"worker__upstream__resume": "vllm", "worker__upstream__stall_timeout_s": "0.3"}
    async with (
        open_fake(FINISHED) as one,
        open_fake(FINISHED) as other,
        open_hop(one, other, **often) as front,
    ):
        answer = await front.chat(stream=True)

    assert texts_of(answer.text) == "Hello"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert len(one.asked) + len(other.asked) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hi"},
        {"messages": [5]},
        {"messages": []},
        {"messages": None},
        {"messages": [TURN, {"role": "assistant", "content": "He says: "}]},
        {"messages": [TURN], "n": 2},
        {"messages": [TURN], "n": "2"},
        {"messages": [TURN], "response_format": {"type": "json_object"}},
        {"messages": [TURN], "grammar": "root ::= [a-z]+"},
        {"messages": [TURN], "guided_regex": "[a-z]+"},
        {"messages": [TURN], "tools": [{}], "tool_choice": "required"},
        {"messages": [TURN], "max_tokens": "many"},
    ],
    ids=str,
)
async def test_what_no_turn_can_be_put_behind_ends_with_an_error(body: dict[str, Any]) -> None:
    """What an upstream understood, or a form that would begin anew, is not sent on half."""
    broken = dies(chat_chunk("Hel"), chat_chunk("lo"))
    async with (
        open_fake(broken) as one,
        open_fake(broken) as other,
        open_hop(one, other, worker__upstream__resume="vllm") as front,
    ):
        answer = await front.chat(stream=True, **body)

    assert texts_of(answer.text) == "Hello"
    assert '"code":"disconnected"' in answer.text
    assert len(one.asked) + len(other.asked) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "n": 1, "tools": [{}], "tool_choice": "auto"},
    ],
    ids=str,
)
async def test_what_says_that_nothing_is_special_goes_on(body: dict[str, Any]) -> None:
    async with open_two(resume="vllm") as (front, one, other):
        one.answer, other.answer = dies(chat_chunk("Hel"), chat_chunk("lo")), REST
        answer = None
        with trio.fail_after(15):
            while not one.asked:
                answer = await front.chat(stream=True, **body)

    assert answer is not None
    assert texts_of(answer.text) == "Hello you"
