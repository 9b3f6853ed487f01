"""Server-sent events of four kinds of servers, as they write them, however the bytes are cut."""

from __future__ import annotations

import json

import pytest

from tests.sse import parse_events
from tests.transports.openai.dialects import DIALECTS, Dialect, read
from trinamo.runtime.errors import (
    DisconnectedError,
    RateLimitedError,
    RemoteProtocolError,
    RequestError,
    UpstreamError,
)
from trinamo.runtime.protocol.openai.generate import FinishReason
from trinamo.runtime.protocol.openai.passing import Renaming
from trinamo.transports.openai import events
from trinamo.transports.openai.answers import StreamedAnswer
from trinamo.transports.openai.events import EventSplitter

EVENT_BYTES_MAX = 1 << 16


named = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)


@named
def test_every_dialect_is_read_to_its_end(dialect: Dialect) -> None:
    deltas, answer = read([dialect.body])

    assert answer.error is None
    assert "".join(each.text for each in deltas) == dialect.text
    assert sum(each.output_tokens for each in deltas) == dialect.output_tokens
    assert max(each.prompt_tokens for each in deltas) == dialect.prompt_tokens
    assert [each.finish_reason for each in deltas if each.finish_reason] == [dialect.finish_reason]


@named
def test_what_the_client_gets_is_what_the_upstream_has_written(dialect: Dialect) -> None:
    """All JSON values, in their order, and no comment: in events that any parser reads."""
    deltas, _ = read([dialect.body])
    passed = parse_events(b"".join(each.raw for each in deltas))
    written = parse_events(dialect.body)

    kept = [each for each in written if each.data != "[DONE]"]
    assert [(e.event, e.data) for e in passed] == [(e.event, e.data) for e in kept]


@pytest.mark.parametrize("end", [b"", b'data: {"choices":[{"index":0,"delta":{"con', b": ping\n\n"])
def test_an_answer_that_breaks_off_is_not_taken_for_whole(end: bytes) -> None:
    head = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    deltas, answer = read([head + end])

    assert [each.text for each in deltas] == ["a"]
    assert isinstance(answer.error, (DisconnectedError, RemoteProtocolError))


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("empty", [b"data:\n\n", b"data: \n\n", b"event: ping\ndata:\ndata:\n\n"])
def test_events_without_data_are_no_events(empty: bytes, size: int) -> None:
    """Gateways keep connections open by them."""
    (vllm, *_) = DIALECTS
    body = empty + vllm.body.replace(b"\n\n", b"\n\n" + empty)
    deltas, answer = read([body[at : at + size] for at in range(0, len(body), size)])

    assert answer.error is None
    assert b"".join(each.raw for each in deltas) + b"data: [DONE]\n\n" == vllm.body


def test_half_an_event_is_the_end_of_the_connection_and_no_nonsense() -> None:
    """Wherever an upstream is killed: nonsense would have it passed over for long."""
    (vllm, *_) = DIALECTS
    for size in range(len(vllm.body)):
        _, answer = read([vllm.body[:size]])
        assert answer.error is None or type(answer.error) is DisconnectedError


def test_an_event_that_never_ends_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a line: a megabyte of short lines held every other answer up for minutes."""
    looks: list[int] = []
    look = events._blocks

    def counted(data: bytes) -> tuple[list[bytes], bytes]:
        looks.append(len(data))
        return look(data)

    monkeypatch.setattr(events, "_blocks", counted)
    splitter = EventSplitter(EVENT_BYTES_MAX)

    def feed_lines() -> None:
        for _ in range(EVENT_BYTES_MAX):
            splitter.feed(b"data: x\n")

    with pytest.raises(RemoteProtocolError, match="an event of more than"):
        feed_lines()

    assert sum(looks) < EVENT_BYTES_MAX


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_ends_at_an_empty_line_however_it_is_cut(end: bytes) -> None:
    body = b"event: a" + end + b"data: 1" + end + b"data: 2" + end + end + b"data: 3" + end + end
    for size in range(1, len(body)):
        splitter = EventSplitter(EVENT_BYTES_MAX)
        cut = [body[at : at + size] for at in range(0, len(body), size)]
        found = [each for piece in cut for each in splitter.feed(piece)] + splitter.finish()
        assert [(each.event, each.data) for each in found] == [(b"a", b"1\n2"), (b"", b"3")]


def test_one_of_two_choices_that_is_finished_does_not_end_the_answer() -> None:
    body = b"".join(
        b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        for choice in (
            {"index": 0, "delta": {"content": "a"}},
            {"index": 1, "delta": {"content": "b"}},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        )
    )
    deltas, answer = read([body])

    assert isinstance(answer.error, DisconnectedError)
    assert not any(each.finish_reason for each in deltas)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'data: {"error":{"message":"out of memory","code":500}}', UpstreamError),
        (b'data: {"error":{"message":"too long","code":400}}', RequestError),
        (b'data: {"error":{"message":"slow down","code":429}}', RateLimitedError),
        (b'data: {"error":"unavailable"}', UpstreamError),
        (b'error: {"code":500,"message":"no slot","type":"server_error"}', UpstreamError),
        (b'event: error\ndata: {"error":{"message":"gone"}}', UpstreamError),
        (b"data: half a", RemoteProtocolError),
    ],
)
def test_an_error_in_the_middle_ends_the_answer_behind_what_came_before(
    event: bytes, error: type[Exception]
) -> None:
    head = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    deltas, answer = read([head + event + b"\n\ndata: [DONE]\n\n"])

    assert [each.text for each in deltas] == ["a"]
    assert isinstance(answer.error, error)


def test_an_event_without_an_end_is_bounded() -> None:
    splitter = EventSplitter(1024)
    splitter.feed(b"data: " + b"x" * 1000)

    with pytest.raises(RemoteProtocolError, match="1024"):
        splitter.feed(b"x" * 100)


def test_text_that_looks_like_the_models_name_is_left_alone() -> None:
    """The name is given where the upstream says its own, and nowhere else."""
    text = 'he said "model":"up" and "model": "up"'
    event = {"model": "up", "choices": [{"index": 0, "delta": {"content": text}}]}
    answer = StreamedAnswer(EVENT_BYTES_MAX, Renaming("up", "mine"))
    (delta,) = answer.feed(b"data: " + json.dumps(event).encode() + b"\n\n")

    passed = json.loads(delta.raw.removeprefix(b"data: "))
    assert passed == event | {"model": "mine"}


def test_a_response_ends_with_its_own_last_event() -> None:
    body = (
        b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
        b'"delta":"hi"}\n\n'
        b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":'
        b'{"input_tokens":4,"output_tokens":1}}}\n\n'
    )
    deltas, answer = read([body])

    assert answer.is_done
    assert [each.output_tokens for each in deltas] == [0, 1, 0]
    assert deltas[-1].prompt_tokens == 4
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[0].raw.startswith(b"event: response.created\ndata: {")
