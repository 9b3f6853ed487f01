"""How `make search WHAT=answers` judges an answer."""

from __future__ import annotations

import pytest

from tests.search.answers import QUESTIONS, RIGHT_ONES, Answer, is_repeating, request_of
from trinamo.runtime.engines.llamacpp.model_file import SAMPLING
from trinamo.runtime.protocol.openai.generate import UNSAID


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The sea is wide. The sea is  wide! And so: the sea is wide.", False),
        ("The sea is wide. The sea is  wide! the SEA is wide", True),
        ("A line of it\nanother line\nA line of it\nA line of it\n", True),
        ("Yes. Yes. Yes. Yes.", False),
        ("", False),
    ],
)
def test_an_answer_repeats_itself_if_a_sentence_comes_three_times(
    text: str, *, expected: bool
) -> None:
    assert is_repeating(text) is expected


def test_a_right_answer_has_the_word_and_a_question_without_one_has_none() -> None:
    assert RIGHT_ONES == 14
    assert Answer(0, "It is Paris.").is_right
    assert not Answer(0, "It is parish.").is_right
    assert not Answer(len(QUESTIONS) - 1, "Sleep.").is_right


def test_a_question_is_asked_with_the_model_s_defaults_and_always_with_a_bound() -> None:
    asked = request_of("Who?", 3, SAMPLING)
    assert (asked.seed, asked.temperature, asked.max_tokens) == (3, 0.3, 600)
    assert (asked.min_p, asked.repetition_penalty, asked.top_p) == (0.2, 1.15, 1)
    assert request_of("Who?", 3, UNSAID).max_tokens == 700
