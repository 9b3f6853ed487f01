"""Log probabilities in answers: OpenAI's own types read them, whole and streamed alike."""

from __future__ import annotations

import msgspec
from openai.types import chat as openai_chat, completion as openai_completion

from tests.sse import parse_events
from trinamo.runtime.protocol.openai.answers import (
    ChatAnswer,
    Completion,
    CompletionAnswer,
    Usage,
)
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, TokenLogprob

USAGE = Usage(4, 4, 8)
TOLD = [
    TokenLogprob("é".encode()[:1], -0.5, [("é".encode()[:1], -0.5), (b"a", -1.0)]),
    TokenLogprob("é".encode()[1:], -0.25),
    TokenLogprob(b"bc", -2.0, [(b"d", -0.1)]),
]
WITH_LOGPROBS = [
    Delta("", [1], logprobs=TOLD[:1], prompt_tokens=4),
    Delta("é", [2], logprobs=TOLD[1:2]),
    Delta("bc", [3, 0], FinishReason.STOP, logprobs=TOLD[2:]),
]


def test_a_chat_s_log_probabilities_are_the_same_whole_and_streamed() -> None:
    streamed, whole = (ChatAnswer("7", "m", 1, wants_usage=False) for _ in range(2))
    body = b"".join(streamed.add_event(delta) for delta in WITH_LOGPROBS)
    chunks = [
        openai_chat.ChatCompletionChunk.model_validate_json(event.data)
        for event in parse_events(body)
    ]
    told = [token for c in chunks for token in (c.choices[0].logprobs.content or [])]  # type: ignore[union-attr]
    for delta in WITH_LOGPROBS:
        whole.add_text(delta)
    answer = openai_chat.ChatCompletion.model_validate_json(whole.to_body(USAGE))
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [each.model_dump() for each in told] == [each.model_dump() for each in content]
    assert bytes(byte for each in content for byte in each.bytes or []) == "ébc".encode()
    assert [each.logprob for each in content] == [-0.5, -0.25, -2.0]
    assert [top.token for top in content[0].top_logprobs] == ["\ufffd", "a"]


def test_a_completion_s_log_probabilities_are_the_same_whole_and_streamed() -> None:
    streamed, whole = (CompletionAnswer("7", "m", 1, wants_usage=False) for _ in range(2))
    body = b"".join(streamed.add_event(delta) for delta in WITH_LOGPROBS)
    events = [msgspec.json.decode(event.data, type=Completion) for event in parse_events(body)]
    for delta in WITH_LOGPROBS:
        whole.add_text(delta)
    answer = openai_completion.Completion.model_validate_json(whole.to_body(USAGE))
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs == [-0.5, -0.25, -2.0]
    assert told.text_offset == [0, 0, 1]
    assert told.top_logprobs == [
        {"\ufffd": -0.5, "a": -1.0},
        {"\ufffd": -0.25},
        {"bc": -2.0, "d": -0.1},
    ]
    pieces = [event.choices[0].logprobs for event in events]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for piece in pieces for item in getattr(piece, name)] == getattr(told, name)


def test_of_alternatives_that_look_alike_the_likeliest_is_told() -> None:
    """Parts of characters are all the same text, and so are tokens without any."""
    answer = CompletionAnswer("7", "m", 1, wants_usage=False)
    alike = [(b"a", -0.2), (b"\xc3", -0.5), (b"\xe2", -3.0), (b"", -4.0), (b"", -5.0)]
    answer.add_text(
        Delta("", [1], FinishReason.STOP, logprobs=[TokenLogprob(b"\xe2", -3.0, alike)])
    )
    told = msgspec.json.decode(answer.to_body(USAGE), type=Completion).choices[0].logprobs
    assert told is not None
    assert told.top_logprobs == [{"\ufffd": -3.0, "a": -0.2, "": -4.0}]
