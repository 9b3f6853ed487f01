"""Calls in an answer's text: found, however the text is cut, and nothing of the text is lost."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, strategies as st

from properties.strategies import cuts
from trinamo.runtime.protocol.openai.tool_calls import (
    CALL_BEGIN,
    CALL_END,
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


@given(plain, st.lists(calls, max_size=3), st.booleans(), cuts)
def test_every_call_is_found_and_the_text_before_is_kept(
    text: str, called: list[tuple[str, dict[str, object]]], is_swapped: bool, where: list[int]
) -> None:
    """Name first or arguments first, in one piece or in many; what separates calls is no text."""
    whole = text
    for name, given_arguments in called:
        call = {"name": name, "arguments": given_arguments}
        if is_swapped:
            call = dict(reversed(call.items()))
        whole += f"{CALL_BEGIN}\n{json.dumps(call)}\n{CALL_END}\n"
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
