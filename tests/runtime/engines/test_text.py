"""Bytes to text: whole characters, no stop string, and no difference how it was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.engines.text import StopMatcher, TextStream

LETTERS = "ab\u00e9\U0001f600"
texts = st.text(LETTERS, max_size=30)
stops = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


def until_stop(text: str, stop_strings: list[str]) -> str:
    """The specification: up to the stop string that is complete first, the longest of a tie."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(texts, stops, st.lists(st.integers(0, 200), max_size=12))
def test_any_split_gives_the_text_up_to_the_first_stop(
    text: str, stop_strings: list[str], cuts: list[int]
) -> None:
    """The cuts, also inside a character, change nothing, and no stop string is ever shown."""
    stream = TextStream(stop_strings)
    shown = "".join(stream.push(piece) for piece in pieces(text.encode(), cuts))
    shown += stream.finish()
    assert shown == until_stop(text, stop_strings)
    assert not any(stop in shown for stop in stop_strings)
    assert stream.is_stopped == any(stop in text for stop in stop_strings)
    # What stopped it stands right behind what was shown.
    assert text.startswith(shown + stream.stopped_by)


@given(st.binary(max_size=20), st.lists(st.integers(0, 200), max_size=8))
def test_bytes_that_are_no_text_are_replaced_alike_in_any_split(
    data: bytes, cuts: list[int]
) -> None:
    """Damaged UTF-8 gives the same U+FFFD as decoding the whole at once."""
    stream = TextStream()
    shown = "".join(stream.push(piece) for piece in pieces(data, cuts)) + stream.finish()
    assert shown == data.decode("utf-8", "replace")


@given(texts, stops)
def test_no_more_is_held_back_than_may_begin_a_stop(text: str, stop_strings: list[str]) -> None:
    """What is held is the longest end of the text that is a proper beginning of a stop string."""
    matcher = StopMatcher(stop_strings)
    matcher.push(text)
    if not matcher.is_stopped:
        beginnings = {stop[:k] for stop in stop_strings for k in range(1, len(stop))}
        ends = [text[i:] for i in range(len(text)) if text[i:] in beginnings]
        assert matcher.held == max(ends, key=len, default="")


def test_a_character_is_shown_once_it_is_whole() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_nothing_follows_a_stop() -> None:
    stream = TextStream(["end"])
    assert stream.push(b"the end of") == "the "
    assert stream.is_stopped
    assert stream.push(b" it") == ""
    assert stream.finish() == ""


def test_a_false_beginning_is_shown_late() -> None:
    stream = TextStream(["\n\n"])
    assert stream.push(b"a\n") == "a"
    assert stream.push(b"b\n") == "\nb"
    assert stream.finish() == "\n"


def test_an_empty_stop_string_cannot_be_matched() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher([""])


def test_the_choices_of_a_request_share_what_its_stop_strings_cost() -> None:
    stop = ["ab", "b", "abc"]
    one, other = StopMatcher(stop), StopMatcher(list(stop))
    assert one._borders is other._borders
    assert one.push("xabc") == "x"
    assert other.push("xa") == "x"
