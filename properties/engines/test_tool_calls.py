"""Calls in an answer's text: found, however the text is cut, and nothing of the text is lost."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, strategies as st

from properties.strategies import cuts
from trinamo.runtime.protocol.openai.answers import Usage
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason
from trinamo.runtime.protocol.openai.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    ToolAnswer,
    ToolCallParser,
)

Found = tuple[str, list[tuple[str, str]]]
arguments = st.dictionaries(
    st.text('a"\\{}[]é', max_size=4),
    st.recursive(st.text('a"\\{}[]<é', max_size=5) | st.integers(), st.lists, max_leaves=4),
    max_size=3,
)
calls = st.tuples(st.text("abc_", min_size=1, max_size=5), arguments)
# No text that ends with the beginning of a tag would be the same with something behind it.
plain = st.text('a {}"\n', max_size=8)
noise = st.lists(
    st.sampled_from([CALL_BEGIN, CALL_END, '{"name": "f", "arguments": {', "}", '"', "<tool", "x"])
).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def parse(pieces: list[str]) -> Found:
    """The text, and name and arguments of each call."""
    parser = ToolCallParser()
    text, called = "", list[tuple[str, str]]()
    for found in [*(each for piece in pieces for each in parser.push(piece)), *parser.finish()]:
        if isinstance(found, str):
            text += found
        elif found.name:
            assert found.index == len(called)
            called.append((found.name, found.arguments))
        else:
            assert found.index == len(called) - 1
            called[-1] = (called[-1][0], called[-1][1] + found.arguments)
    assert parser.call_count == len(called)
    return text, called


@given(plain, st.lists(calls, max_size=3), st.booleans(), st.booleans(), cuts)
def test_every_call_is_found_and_the_text_before_is_kept(
    text: str,
    called: list[tuple[str, dict[str, object]]],
    is_swapped: bool,
    is_open: bool,
    where: list[int],
) -> None:
    """Name first or arguments first, in one piece or in many; what separates calls is no text.

    Models forget the tag that ends a call; one whose name comes first is found all the same.
    """
    whole = text
    for name, given_arguments in called:
        call = {"name": name, "arguments": given_arguments}
        if is_swapped:
            call = dict(reversed(call.items()))
        end = "" if is_open and not is_swapped else f"{CALL_END}\n"
        whole += f"{CALL_BEGIN}\n{json.dumps(call)}\n{end}"
    found_text, found = parse([whole])
    assert found_text == text
    assert [(name, json.loads(each)) for name, each in found] == called
    assert parse(cut(whole, where)) == (found_text, found)


@given(noise, cuts)
def test_text_that_only_looks_like_calls_is_the_same_however_it_is_cut(
    text: str, where: list[int]
) -> None:
    """And without a tag that begins a call it stays as it is."""
    assert parse(cut(text, where)) == parse([text])
    if CALL_BEGIN not in text:
        assert parse([text]) == (text, [])


@given(plain, st.lists(calls, max_size=3), noise, cuts)
def test_a_streamed_chat_is_the_whole_one_however_its_text_comes(
    text: str, called: list[tuple[str, dict[str, object]]], tail: str, where: list[int]
) -> None:
    """Text, calls and the reason, put together as clients do."""
    for name, given_arguments in called:
        call = json.dumps({"name": name, "arguments": given_arguments})
        text += f"{CALL_BEGIN}\n{call}\n{CALL_END}\n"
    deltas = [Delta(each) for each in cut(text + tail, where)]
    deltas.append(Delta(finish_reason=FinishReason.STOP))
    whole, live = (ToolAnswer("x", "m", 0, wants_usage=False) for _ in range(2))
    for delta in deltas:
        whole.add_text(delta)
    choice = json.loads(whole.to_body(Usage()))["choices"][0]
    content, streamed, reason = "", list[list[str]](), ""
    for event in b"".join(map(live.add_event, deltas)).split(b"\n\n")[:-1]:
        told = json.loads(event.removeprefix(b"data: "))["choices"][0]
        content += told["delta"].get("content") or ""
        for call in told["delta"].get("tool_calls", ()):
            if "id" in call:
                streamed.append([call["id"], call["function"]["name"], ""])
            streamed[call["index"]][2] += call["function"]["arguments"]
        reason = told.get("finish_reason") or reason
    reply = choice["message"]
    assert content == (reply["content"] or "")
    assert streamed == [
        [call["id"], call["function"]["name"], call["function"]["arguments"]]
        for call in reply.get("tool_calls", ())
    ]
    assert reason == choice["finish_reason"]
