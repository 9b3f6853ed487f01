"""Long answers of an upstream: what is made of them is bounded, and not only what is read of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from trinamo.runtime.errors import RemoteProtocolError, RequestError, UpstreamError
from trinamo.transports.openai.answers import StreamedAnswer, WholeAnswer
from trinamo.transports.openai.client import Response
from trinamo.transports.openai.refusals import as_json, refusal_of, refusal_unstreamed
from trinamo.transports.openai.watch import parse_models, settled

SIZE = 1 << 21
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def many(before: bytes, item: bytes, after: bytes) -> bytes:
    return before + (item + b",") * (SIZE // (len(item) + 1)) + item + after


def peak_of(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def finish(body: bytes) -> Any:
    return WholeAnswer(1 << 24).finish(body)


# --- what is around a body --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"3\r\n:a\n\r\n0\r\nX-A: ", b"a" * 65_536),
        (b"0\r\n", b"A: b\r\n" * 10_000),
        (b"3;", b"a" * 65_536),
        (b"", b"1;" + b"a" * 200 + b"\r\nb\r\n"),
    ],
    ids=["a trailer", "many trailers", "an extension", "many extensions"],
)
def test_what_is_around_a_body_has_a_bound(begin: bytes, more: bytes) -> None:
    response = Response()
    response.feed(CHUNKED)
    response.feed(begin)

    def feed() -> None:
        for _ in range(1000):
            response.feed(more)

    with pytest.raises(RemoteProtocolError, match="trailers of the answer of the upstream"):
        feed()


def test_the_smallest_chunks_and_short_trailers_pass() -> None:
    """However many: a token a chunk is how servers stream, and one may write its size in 16 digits."""
    response = Response()
    response.feed(CHUNKED)
    for size in (b"1", b"0" * 15 + b"1"):
        for _ in range(20_000):
            assert response.feed(size + b"\r\na\r\n") == b"a"
    assert response.feed(b"0\r\nserver-timing: a\r\n\r\n") == b""
    assert response.is_complete


# --- what is made of a body -------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        many(b'{"choices":[{"finish_reason":"length"},', b"{}", b"]}"),
        many(b'{"choices":[],"error":[', b"[]", b"]}"),
        many(b'{"a":[', b"[]", b"]}"),
        many(b'{"a":[{},', b'{"b":1}', b"]}"),
    ],
    ids=["choices", "an error", "another member", "objects"],
)
def test_what_is_long_is_read_over_and_not_made(body: bytes) -> None:
    """60 MB of it took 1.5 GB and eleven seconds of the loop."""

    def read() -> None:
        finish(body)
        refusal_unstreamed(body)
        refusal_of(500, {}, body)
        as_json(400, body)

    # The answer itself is cut into pieces once.
    assert peak_of(read) < 2 * len(body) + (1 << 20)


def test_the_first_choice_of_a_long_answer_tells_its_end() -> None:
    long = many(
        b'{"usage":{"prompt_tokens":3},"choices":[{"finish_reason":"length"},', b"{}", b"]}"
    )
    *_, end = finish(long)
    assert (end.finish_reason, end.prompt_tokens) == ("length", 3)


def test_an_event_holds_no_more_choices_than_were_asked_for() -> None:
    answer = StreamedAnswer(1 << 20, choices=1)
    assert answer.feed(b'data: {"choices":[{"index":0},{"index":0}]}\n\n') == []
    assert isinstance(answer.error, RemoteProtocolError)


def test_a_long_error_is_cut_and_a_short_one_is_read() -> None:
    long = b'{"error":{"message":"' + b"a" * (1 << 17) + b'","code":503}}'
    refusal = refusal_of(500, {}, long)
    assert isinstance(refusal, UpstreamError)
    assert refusal.message.endswith('{"message":"' + "a" * (500 - len('{"message":"')))
    assert refusal_unstreamed(long) == 400
    assert as_json(400, long) is long

    short = refusal_unstreamed(b'{"error":{"message":"no","code":503}}')
    assert isinstance(short, UpstreamError)
    assert short.message.endswith(": no")
    assert refusal_unstreamed(b'{"error":{"code":404}}') == 404
    assert isinstance(refusal_unstreamed(b"{}"), RequestError)
    assert b"upstream_refusal" in as_json(400, b" { }\n")


# --- its models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        many(b'{"data":[', b'{"id":"a"}', b"]}"),
        many(b'{"data":[{"id":"a","meta":[', b"[]", b"]}]}"),
        many(b'{"data":[{"id":"a","max_model_len":[', b"[]", b"]}]}"),
    ],
)
def test_a_list_of_models_of_megabytes_is_not_made_whole(body: bytes) -> None:
    parse_models(body)
    assert peak_of(lambda: parse_models(body)) < 1 << 20
    assert parse_models(body) == {"a": 0}


@pytest.mark.parametrize(
    ("told", "count"),
    [
        ('"max_model_len":8192', 8192),
        ('"meta":{"n_ctx":4096,"n_ctx_train":1}', 4096),
        ('"meta":{"n_ctx_train":1024}', 1024),
        ('"max_model_len":null,"meta":{"n_ctx":2}', 2),
        ('"max_model_len":1e9', 0),
        ('"max_model_len":true', 0),
        ('"max_model_len":-1', 0),
        ('"max_model_len":2147483648', 0),
        ('"max_model_len":' + "9" * 5000, 0),
        ('"meta":[1]', 0),
        ('"meta":null', 0),
        ('"owned_by":"me"', 0),
    ],
)
def test_the_context_of_a_model_is_a_number_or_not_told(told: str, count: int) -> None:
    assert parse_models(f'{{"data":[{{"id":"a",{told}}}]}}'.encode()) == {"a": count}


def test_an_upstream_has_so_many_models_with_names_that_can_be_one() -> None:
    listed = ",".join(f'{{"id":"{name}"}}' for name in ["", "a" * 257, *range(2000)])
    assert len(parse_models(f'{{"data":[{listed}]}}'.encode())) == 1022
    assert parse_models(b'{"data":null}') == {}


def test_few_models_come_or_go_at_one_look() -> None:
    """But the first: each change is announced to all who ask for models."""
    first = {f"a{i}": 1 for i in range(1000)}
    assert settled({}, first) == first
    assert settled(first, first | {"b": 2}) == first | {"b": 2}

    other, known = {f"b{i}": 1 for i in range(1000)}, first
    for look in range(1, 64):
        before, known = known, settled(known, other)
        assert len(before.keys() ^ known.keys()) <= 32, look
    assert known == other
