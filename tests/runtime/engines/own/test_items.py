"""What a generator yields becomes an answer: counts, bounds and the end are filled in."""

from __future__ import annotations

from typing import Any

import pytest

from trinamo import ChatMessage, Delta, EngineError, FinishReason, GenerateRequest, RequestError
from trinamo.runtime.engines.own.items import AnswerItems
from trinamo.runtime.protocol.openai.generate import TokenLogprob


def answer(items: list[object], *, context_tokens_max: int = 64, **given: Any) -> list[Delta]:
    """The deltas of an answer to two words, until it is over."""
    request = GenerateRequest(model="m", prompt="two words", **given)
    taken = AnswerItems("parrot", request, context_tokens_max)
    deltas = []
    for item in items:
        delta = taken.take(item)
        if delta is not None:
            deltas.append(delta)
        if taken.is_over:
            return deltas
    return [*deltas, taken.finish()]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens(deltas: list[Delta]) -> int:
    return sum(len(delta.token_ids) for delta in deltas)


@pytest.mark.parametrize("item", ["half \ud83d", Delta("\ud83d")])
def test_half_a_character_is_a_sentence(item: object) -> None:
    with pytest.raises(
        EngineError, match=r"engine parrot yielded text .*'\\ud83d', half of a pair"
    ):
        answer([item])


@pytest.mark.parametrize(
    "fields",
    [
        {"text": 5},
        {"text": None},
        {"text": b"x"},
        {"text": "x", "token_ids": ["x"]},
        {"text": "x", "token_ids": [object()]},
        {"text": "x", "token_ids": [1 << 70]},
        {"text": "x", "prompt_tokens": -1},
        {"text": "x", "finish_reason": "tired"},
        {"text": "x", "logprobs": [3]},
    ],
)
def test_a_delta_that_no_frontend_could_read_is_the_engine_s_error(fields: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="engine parrot yielded a Delta that cannot be sent: "):
        answer([Delta(**fields)])


def test_the_field_that_is_wrong_is_named() -> None:
    with pytest.raises(EngineError, match=r"sent: Expected `int`, got `str` - at `token_ids\[0\]`"):
        answer([Delta("x", ["x"])])  # type: ignore[list-item]


def test_what_stands_for_a_value_of_a_delta_becomes_it() -> None:
    fields: dict[str, Any] = {"token_ids": (1, 2), "finish_reason": "length"}
    (delta,) = answer([Delta("x", **fields)])
    assert (delta.token_ids, delta.finish_reason) == ([1, 2], FinishReason.LENGTH)


def test_texts_are_tokens_the_prompt_is_its_words_and_the_end_is_a_stop() -> None:
    deltas = answer(["Hello, ", "", "you"])

    assert (text(deltas), tokens(deltas)) == ("Hello, you", 2)
    assert [delta.prompt_tokens for delta in deltas] == [2, 0, 0]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_an_answer_of_nothing_still_has_its_counts_and_its_end() -> None:
    assert answer([]) == [Delta("", [], FinishReason.STOP, 2)]


def test_counts_that_a_generator_gives_are_taken() -> None:
    deltas = answer([Delta("a", [7, 8], None, 5), Delta("b"), Delta("c", [9])])

    assert [delta.token_ids for delta in deltas] == [[7, 8], [], [9], []]
    assert [delta.prompt_tokens for delta in deltas] == [5, 0, 0, 0]


def test_a_delta_without_token_ids_is_one_token_until_somebody_counts() -> None:
    assert tokens(answer([Delta("a"), "b"])) == 2


def test_a_reason_of_the_generator_s_own_ends_the_answer() -> None:
    deltas = answer([Delta("a", finish_reason=FinishReason.LENGTH), "never"])

    assert deltas == [Delta("a", [0], FinishReason.LENGTH, 2)]


def test_max_tokens_ends_the_answer() -> None:
    deltas = answer(["a", "b", "c"], max_tokens=2)

    assert (text(deltas), deltas[-1].finish_reason) == ("ab", FinishReason.LENGTH)


def test_the_context_ends_the_answer() -> None:
    deltas = answer(["x"] * 99, context_tokens_max=16)

    assert (tokens(deltas), deltas[-1].finish_reason) == (14, FinishReason.LENGTH)


def test_a_stop_string_across_two_items_ends_the_answer_before_it() -> None:
    deltas = answer(["one E", "N", "D two"], stop=["END"])

    assert (text(deltas), deltas[-1].finish_reason) == ("one ", FinishReason.STOP)
    assert tokens(deltas) == 3


def test_log_probabilities_stay_with_their_tokens_while_text_is_held_back() -> None:
    first, second = TokenLogprob(b"E", -0.5), TokenLogprob(b"x", -1.0)
    deltas = answer(
        [Delta("E", [1], logprobs=[first]), Delta("x", [2], logprobs=[second])], stop=["END"]
    )

    assert [(delta.token_ids, delta.logprobs) for delta in deltas] == [
        ([1, 2], [first, second]),
        ([], []),
    ]


def test_a_prompt_s_length_is_told_once_and_again_where_it_turns_out_otherwise() -> None:
    same = answer([Delta("a", [1], prompt_tokens=7), Delta("b", [2], prompt_tokens=7)])
    other = answer(["a", "b", Delta("c", [3], prompt_tokens=12)])

    assert [delta.prompt_tokens for delta in same] == [7, 0, 0]
    assert [delta.prompt_tokens for delta in other] == [2, 0, 12, 0]


def test_text_that_was_held_back_comes_with_the_end() -> None:
    deltas = answer(["E", "N"], stop=["END"])

    assert (text(deltas), tokens(deltas)) == ("EN", 2)


@pytest.mark.parametrize(("item", "type_name"), [(4, "int"), (None, "NoneType"), (b"x", "bytes")])
def test_anything_else_is_an_error_that_names_the_engine(item: object, type_name: str) -> None:
    words = f"engine parrot yielded an item of type {type_name}; an engine yields str"
    with pytest.raises(EngineError, match=words):
        answer([item])


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    request = GenerateRequest(model="m", prompt="word " * 64)

    with pytest.raises(RequestError, match="64 tokens"):
        AnswerItems("parrot", request, 64)


def test_a_request_says_what_to_answer_and_the_conversation() -> None:
    turns = [ChatMessage("system", "s"), ChatMessage("user", "u"), ChatMessage("assistant", "a")]
    chat = GenerateRequest(model="m", messages=turns)
    prompt = GenerateRequest(model="m", prompt="p")

    assert (chat.text, chat.turns) == ("u", turns)
    assert (prompt.text, prompt.turns) == ("p", [ChatMessage("user", "p")])
    with pytest.raises(RequestError, match="no token ids"):
        _ = GenerateRequest(model="m", token_ids=[1]).text
