"""What is refused before it reaches a broker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from trinamo.runtime.errors import RequestError
from trinamo.runtime.planes.events import check_message, check_pattern, check_subject

SUBJECTS = st.text(alphabet="ab.*> \né\x00", max_size=12)


def accepts(check: Callable[[str], None], text: str) -> bool:
    try:
        check(text)
    except RequestError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(SUBJECTS)
def test_no_subject_can_break_the_line_protocol(text: str) -> None:
    """What passes has no empty token, no whitespace and no control character."""
    if accepts(check_pattern, text):
        assert all(text.split("."))
        assert not set(text) & set(" \t\r\n\x00")
    if accepts(check_subject, text):
        assert accepts(check_pattern, text)
        assert not set(text) & set("*>")


@pytest.mark.parametrize("group", ["", "workers", "a.b", "*"])
def test_a_group_is_any_word(group: str) -> None:
    check_pattern("a.*", group)


@pytest.mark.parametrize("group", ["a b", "a\r\n", "\x00", "x" * 1025])
def test_a_group_that_is_no_word_is_refused(group: str) -> None:
    with pytest.raises(RequestError):
        check_pattern("a.*", group)


def size_of(headers: dict[str, str]) -> int:
    return check_message("a", b"12345", "", headers, bytes_max=100)


def test_the_size_of_a_message_counts_its_headers_as_the_server_does() -> None:
    assert size_of({}) == 5
    assert size_of({"A": "b", "C": "é"}) == len(b"NATS/1.0\r\nA: b\r\nC: \xc3\xa9\r\n\r\n") + 5
