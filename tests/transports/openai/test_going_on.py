"""Chats whose upstream breaks, and that go on at another one, where they can."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.transports.openai.fake import (
    STREAM_HEAD,
    Answer,
    Asked,
    Front,
    chat_chunk,
    chunk,
    events,
    open_fake,
    open_hop,
    open_two,
    says,
    streams,
    texts_of,
    whole,
)

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
        with trio.fail_after(120):
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
        with trio.fail_after(120):
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
        with trio.fail_after(120):
            while not one.asked:
                answer = await front.chat(stream=True, **body)

    assert answer is not None
    assert texts_of(answer.text) == "Hello you"


async def test_a_refusal_of_who_was_to_go_on_is_told_by_an_event() -> None:
    """The client reads events: a body behind them is read over, and what was cut short looks whole."""
    said = {"error": {"message": "no turn of the assistant may be the last", "code": 400}}
    async with (
        open_fake(dies(chat_chunk("Hel"), chat_chunk("lo"))) as one,
        open_fake(says(whole(said, 400))) as other,
        open_hop(one, other, worker__upstream__resume="vllm") as front,
    ):
        answer = None
        with trio.fail_after(120):
            while not one.asked:
                answer = await front.chat(stream=True)

    assert answer is not None
    assert texts_of(answer.text) == "Hello"
    *_, last = answer.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "invalid_request_error"
    assert last.startswith("data: ")


@pytest.mark.parametrize(
    ("allowed", "left"),
    [
        ({"max_tokens": -1}, {"max_tokens": -1}),
        ({"n_predict": -1, "max_tokens": None}, {"n_predict": -1, "max_tokens": None}),
        ({"n_predict": 10}, {"n_predict": 8}),
    ],
    ids=str,
)
async def test_the_bounds_of_llama_cpp_s_server_are_what_they_are_there(
    allowed: dict[str, Any], left: dict[str, Any]
) -> None:
    """-1 is none: it must not end the answer that goes on."""
    async with (
        open_fake(dies(chat_chunk("Hel"), chat_chunk("lo"))) as one,
        open_fake(REST) as other,
        open_hop(one, other, worker__upstream__resume="llamacpp") as front,
    ):
        answer = None
        with trio.fail_after(120):
            while not one.asked:
                answer = await front.chat(stream=True, **allowed)

    assert answer is not None
    assert texts_of(answer.text) == "Hello you"
    assert {name: other.asked[-1].json[name] for name in left} == left


def response(kind: str, **more: Any) -> bytes:
    """An event of `/v1/responses`, which has its name twice."""
    name = f"response.{kind}"
    return f"event: {name}\ndata: {json.dumps({'type': name, **more})}\n\n".encode()


OPENED = response("created", response={"id": "resp_1", "status": "in_progress", "output": []})


@pytest.mark.parametrize("begun", [b"", OPENED], ids=["before it", "behind it"])
async def test_a_response_is_done_elsewhere_only_before_its_first_event(begun: bytes) -> None:
    """Behind it another one's would have other ids, and its items would be missing: clients raise."""
    rest = OPENED + response("output_text.delta", delta="hi") + response("completed", response={})

    async def die(_: Asked, stream: trio.SocketStream) -> None:
        await stream.send_all(STREAM_HEAD + (chunk(begun) if begun else b""))
        await stream.aclose()

    async with (
        open_fake(die) as one,
        open_fake(streams(rest)) as other,
        open_hop(one, other) as hop,
    ):
        body = {"model": "m", "input": "hi", "stream": True}
        answer = None
        with trio.fail_after(120):
            while not one.asked:
                other.asked.clear()
                answer = await hop.client.post("/v1/responses", json=body)

    assert answer is not None
    if begun:
        assert answer.content.startswith(begun)
        assert '"code":"disconnected"' in answer.text.removeprefix(begun.decode())
        assert "event: response" not in answer.text.removeprefix(begun.decode())
        assert not other.asked
    else:
        assert answer.content == rest
        assert len(other.asked) == 1


def usages_of(answer: str) -> list[Any]:
    found = [json.loads(each[6:]) for each in answer.splitlines() if each.startswith("data: {")]
    return [each["usage"] for each in found if "usage" in each]


async def told_prompt_tokens(front: Front) -> float:
    page = (await front.client.get("/metrics")).text
    found = [line for line in page.splitlines() if "_input_tokens_total{" in line]
    return sum(float(line.split()[-1]) for line in found)


@pytest.mark.parametrize("k", [1, 2, 3])
async def test_usage_counts_what_came_before_to_the_answer_and_the_id_stays(k: int) -> None:
    """Of five tokens the first `k` came from an upstream that died; the prompt has seven."""
    words = [chat_chunk(word) for word in "abcde"]
    usage = {"prompt_tokens": 7 + k, "completion_tokens": 5 - k, "total_tokens": 12}
    rest = events(
        *(each | {"id": "chatcmpl-other"} for each in words[k:]),
        chat_chunk(finish="length") | {"id": "chatcmpl-other"},
        chat_chunk(choices=[], usage=usage) | {"id": "chatcmpl-other"},
    )
    async with (
        open_fake(dies(*words[:k])) as one,
        open_fake(streams(rest)) as other,
        open_hop(one, other, worker__upstream__resume="vllm") as front,
    ):
        answer = None
        with trio.fail_after(120):
            while not one.asked:
                answer = await front.chat(stream=True, stream_options={"include_usage": True})
            # Those before went to the other alone.
            expected = (len(other.asked) - 1) * (7 + k) + 7
            while await told_prompt_tokens(front) != expected:
                await trio.sleep(0.05)

    assert answer is not None
    assert texts_of(answer.text) == "abcde"
    assert usages_of(answer.text) == [usage | {"prompt_tokens": 7, "completion_tokens": 5}]
    assert answer.text.count('"chatcmpl-up"') == 7
    assert "chatcmpl-other" not in answer.text


async def test_an_answer_that_has_all_its_tokens_ends_without_another() -> None:
    """Only its end was lost: nobody is asked for a token that the client has not allowed."""
    async with (
        open_fake(dies(chat_chunk("Hel"), chat_chunk("lo"))) as one,
        open_fake() as other,
        open_hop(one, other, worker__upstream__resume="vllm") as front,
    ):
        answer = None
        with trio.fail_after(120):
            while not one.asked:
                other.asked.clear()
                answer = await front.chat(stream=True, max_tokens=2)

    assert answer is not None
    *_, last, done = answer.text.strip().split("\n\n")
    assert (texts_of(answer.text), done) == ("Hello", "data: [DONE]")
    (choice,) = json.loads(last[6:])["choices"]
    assert choice == {"index": 0, "delta": {}, "finish_reason": "length"}
    assert json.loads(last[6:])["id"] == "chatcmpl-up"
    assert not other.asked
