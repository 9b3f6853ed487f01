"""Patterns and parsers that read bytes of a client, an upstream or a member cost linear time.

A pattern that backtracks, or a text that is copied or searched again for each piece, holds up the one
event loop of a process, and with it all its streams. Each pattern of the product has a row here; each
is also tried with strings that are made of its own characters. A run costs its thread's CPU time,
and a quadratic one costs 64 times as much of eight times the length: the bound is 24 times, and what
takes less than `FREE_S` is free, so that a busy machine changes no verdict.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final

import attrs
import msgspec
import pytest

from tests.sources import nodes_of, sources
from trinamo.runtime.engines.text import TextStream
from trinamo.runtime.errors import RemoteProtocolError, RequestError, TrinamoError
from trinamo.runtime.http import endpoints
from trinamo.runtime.http.endpoints import EndpointKind
from trinamo.runtime.http.exchanges import Headers
from trinamo.runtime.http.status import answer_error
from trinamo.runtime.logs.text import mask_text, one_line
from trinamo.runtime.protocol.discovery.instances import EndpointName, decode_instance
from trinamo.runtime.protocol.discovery.model_cards import decode_card
from trinamo.runtime.protocol.openai.passing import (
    Renaming,
    can_go_on,
    continued,
    decode_passed,
    with_model,
)
from trinamo.runtime.protocol.openai.tool_calls import ToolCallParser
from trinamo.runtime.protocol.traceparent import decode_traceparent
from trinamo.runtime.protocol.undecodable import explain
from trinamo.runtime.traces.ring import root_of
from trinamo.transports.http.http1.heads import BodyReader, FaultError, HeadReader, RequestHead
from trinamo.transports.openai.answers import StreamedAnswer, WholeAnswer
from trinamo.transports.openai.refusals import as_json, refusal_of, refusal_unstreamed
from trinamo.transports.openai.watch import parse_load

SHORT: Final = 1_024
LONG: Final = 8 * SHORT
FREE_S: Final = 0.01
"""A quadratic run over `LONG` characters takes three times this at the least."""
TIMES_MAX: Final = 24


def cost(run: Callable[[], object]) -> float:
    """Seconds of this thread's CPU that `run` takes, the least of three."""
    found = []
    for _ in range(3):
        began = time.thread_time()
        run()
        found.append(time.thread_time() - began)
        if found[-1] < FREE_S:
            break
    return min(found)


def check_linear(run: Callable[[int], object], what: str) -> None:
    """Fail if `run`, of so many characters, costs more than its length explains."""
    long = cost(lambda: run(LONG))
    if long < FREE_S:
        return
    short = cost(lambda: run(SHORT))
    assert long < TIMES_MAX * short, (
        f"{what}: {SHORT} characters take {short:.4f} s, {LONG} take {long:.4f} s"
    )


# --- patterns ---------------------------------------------------------------------------------

Worst = Callable[[int], str]
OURS: Final = "only the operator's files and names"


@attrs.frozen
class Row:
    """How a pattern is used, and strings that were found to hurt it, or one of its kind."""

    method: str
    worst: tuple[Worst, ...] = ()


def row(method: str, *worst: Worst) -> Row:
    return Row(method, worst)


ADDRESSES: Final[tuple[Worst, ...]] = (
    lambda n: "a" * n,
    lambda n: "a." * (n // 2),
    lambda n: "a-" * (n // 2) + ":",
    lambda n: "a port " * (n // 7),
    lambda n: "1:" * (n // 2) + "x",
    lambda n: "x://" * (n // 4),
)
# fmt: off
PATTERNS: Final[dict[str, Row | str]] = {
    "runtime/config/models.py:_OWN_ENGINE": OURS,
    "runtime/config/source.py:_SIZE": OURS,
    "runtime/config/source.py:_resolve": OURS,
    "runtime/config/source.py:_checked": OURS,
    "runtime/config/source.py:nearest": OURS,
    "runtime/config/worker.py:endpoint_of_model": row("search", lambda n: "-" * n, lambda n: "a/" * (n // 2)),
    "runtime/engines/echo.py:_WORD": row("finditer", lambda n: " " * n, lambda n: " " * n + "\0", lambda n: "a " * (n // 2)),
    "runtime/engines/llamacpp/chat_template.py:_NO_ID": row("search", lambda n: "a" * n),
    "runtime/engines/llamacpp/grammars.py:_JSON_MARK": row("finditer", lambda n: '"' + "\\a" * (n // 2), lambda n: '"a' * (n // 2), lambda n: '"' + '\\"' * (n // 2) + "\\"),
    "runtime/engines/llamacpp/prompts.py:Prompts": "a mark that is drawn for each request and that no text holds",
    "runtime/engines/llamacpp/schemas.py:_FINITE": row("fullmatch", lambda n: "^" + "a" * n),
    "runtime/engines/llamacpp/schemas.py:_NAMES": row("fullmatch", lambda n: "^(" + "a|" * (n // 2) + "$"),
    "runtime/engines/llamacpp/schemas.py:_WITHOUT_END": row("search", lambda n: "{" + "1" * n, lambda n: "{1" * (n // 2)),
    "runtime/engines/own/items.py:AnswerItems": row("finditer", lambda n: "$[" + "1" * n, lambda n: "$[" * (n // 2)),
    "runtime/http/admission/keys.py:_LINE": OURS,
    "runtime/http/chat.py:_UNSAFE_TYPE": row("finditer"),
    "runtime/http/exchanges.py:_UNSAFE": row("search", lambda n: "a" * n),
    "runtime/http/routes/openapi.py:_describe": "the paths of our own routes",
    "runtime/http/status.py:_ADDRESS": row("finditer", *ADDRESSES),
    "runtime/kv/transfer/metadata.py:_ENGINE_ID": row("fullmatch"),
    "runtime/logs/text.py:USER_PART": row("finditer", lambda n: "://" + "a" * n, lambda n: "://" * (n // 3)),
    "runtime/logs/text.py:_HARMFUL": row("finditer"),
    "runtime/planes/events.py:_GROUP": row("fullmatch"),
    "runtime/planes/events.py:_HEADER_NAME": row("fullmatch"),
    "runtime/planes/events.py:_PATTERN": row("fullmatch", lambda n: "a." * (n // 2) + " ", lambda n: "*." * (n // 2)),
    "runtime/planes/events.py:_SUBJECT": row("fullmatch", lambda n: "a." * (n // 2) + " "),
    "runtime/process/lock.py:_NAME": OURS,
    "runtime/process/settings.py:_of_key": "the descriptions of our own keys",
    "runtime/process/tasks.py:_NAME": "the names of our own tasks",
    "runtime/protocol/discovery/instances.py:_HOST": row("fullmatch", lambda n: "a." * (n // 2) + "/"),
    "runtime/protocol/discovery/instances.py:_ID": row("fullmatch"),
    "runtime/protocol/discovery/instances.py:_NAME": row("fullmatch"),
    "runtime/protocol/discovery/instances.py:_PORT": row("fullmatch"),
    "runtime/protocol/discovery/instances.py:_SUBJECT": row("fullmatch"),
    "runtime/protocol/discovery/instances.py:_ZONE": row("fullmatch"),
    "runtime/protocol/openai/fields.py:_UNKNOWN": row("match", lambda n: "Object contains unknown field `" + "`" * n + "x"),
    "runtime/protocol/openai/fields.py:_UNSAFE": row("finditer"),
    "runtime/protocol/openai/forms.py:_RULE_OF_BNF": row(
        "search", lambda n: "\n" * (n // 2) + " " * (n // 2), lambda n: "a\n" * (n // 2), lambda n: "a" * (n // 2) + " " * (n // 2)
    ),
    "runtime/protocol/openai/passing.py:Renaming": row("search", lambda n: '"model"' + " " * n, lambda n: '"model":' * (n // 8)),
    "runtime/protocol/openai/requests.py:_LIST_START": row("match", lambda n: " " * n, lambda n: "[" + " " * n),
    "runtime/protocol/openai/shaping.py:_NAME": row("match"),
    "runtime/protocol/openai/tool_calls.py:_BEGINS": row("match", lambda n: " " * n),
    "runtime/protocol/openai/tool_calls.py:_HEAD": row("match", lambda n: ' { "name" :' + " " * n, lambda n: " " * n),
    "runtime/protocol/openai/tool_calls.py:_IN_STRING": row("finditer"),
    "runtime/protocol/openai/tool_calls.py:_NAME": row("match"),
    "runtime/protocol/openai/tool_calls.py:_OUTSIDE": row("finditer"),
    "runtime/protocol/openai/tool_calls.py:_TAIL_END": row("search", lambda n: "<tool_call" * (n // 10)),
    "runtime/protocol/queue/jobs.py:_JOB_ID": row("fullmatch"),
    "runtime/protocol/queue/jobs.py:_NAME": row("fullmatch"),
    "runtime/protocol/queue/jobs.py:_REQUEST_ID": row("fullmatch"),
    "runtime/protocol/traceparent.py:_SHAPE": row("fullmatch"),
    "runtime/protocol/versions.py:_TEXT": row("fullmatch"),
    "runtime/traces/ring.py:_ANSWER": row("match"),
    "runtime/traces/ring.py:_ATTEMPTS": row("search", lambda n: "a" * 16 + ".a" * (n // 2) + "x"),
    "runtime/traces/ring.py:_INNER": row("match", lambda n: "-" + "a" * 16 + ".a" * (n // 2) + "x"),
    "runtime/view/dashboard.py:_REQUEST_ID": row("match"),
    "runtime/view/scraping.py:ADDRESS": row("fullmatch"),
    "transports/http/http1/heads.py:HOST_VALUE": row("fullmatch"),
    "transports/http/http1/heads.py:_ABSOLUTE": row("fullmatch"),
    "transports/http/http1/heads.py:_SIZE_LINE": row("fullmatch"),
    "transports/http/http1/heads.py:_TRAILER": row("fullmatch"),
    "transports/http/http2/connection.py:_VALUE": row("search", lambda n: " " * n, lambda n: ":" * n, lambda n: "b" * n),
    "transports/mooncake/engine.py:_SESSION": row("fullmatch"),
    "transports/security/signed.py:_LINE": row("search", lambda n: '\n{"signature":"' * (n // 15), lambda n: '\n{"signature":"' + "A" * n),
}
# fmt: on
"""By the file and the name, or the function in which a pattern is written."""


@cache
def written_patterns() -> dict[str, list[tuple[str, str]]]:
    """Each use of `re` by its key in `PATTERNS`: its module, and its name there or else its text."""
    found: dict[str, dict[tuple[str, str], None]] = {}
    for key, module, text in _uses_of_re():
        found.setdefault(key, {})[module, text] = None
    return {key: list(uses) for key, uses in found.items()}


def _uses_of_re() -> Iterator[tuple[str, str, str]]:
    for source in (*sources("runtime"), *sources("transports")):
        if not any(each.target == "re" for each in source.imports):
            continue
        for top in source.tree.body:
            owner = getattr(top, "name", "")
            for node in nodes_of(top):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                if getattr(node.func.value, "id", "") != "re" or node.func.attr == "escape":
                    continue
                target = top.targets[0] if isinstance(top, ast.Assign) else None
                target = top.target if isinstance(top, ast.AnnAssign) else target
                name = target.id if isinstance(target, ast.Name) else ""
                first = node.args[0]
                text = first.value if isinstance(first, ast.Constant) else ""
                yield f"{source.name}:{name or owner}", source.module, name or str(text)


@pytest.mark.check
def test_each_pattern_of_the_product_has_a_row() -> None:
    assert sorted(written_patterns()) == sorted(PATTERNS)


def patterns_of(key: str) -> Iterator[re.Pattern[Any]]:
    for module, text in written_patterns()[key]:
        loaded = getattr(importlib.import_module(f"trinamo.{module}"), text, None)
        if isinstance(loaded, re.Pattern):
            yield loaded
        elif key.endswith(":Renaming"):
            yield Renaming("theirs", "asked")._pattern
        else:
            yield re.compile(text)


def characters_of(pattern: re.Pattern[Any]) -> list[str]:
    """One of each kind that the pattern tells apart, as far as its syntax shows them."""
    kinds = {"DIGIT": "0", "SPACE": " ", "WORD": "a"}
    text = (
        pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    )
    flags = pattern.flags if isinstance(pattern.pattern, str) else pattern.flags | re.UNICODE
    found = {"a": None, " ": None, "\n": None}

    def walk(node: Any) -> None:
        if isinstance(node, tuple) and len(node) == 2:
            name = str(node[0])
            if name in ("LITERAL", "NOT_LITERAL") and isinstance(node[1], int):
                found[chr(node[1])] = None
            elif name == "RANGE":
                found[chr(node[1][0])] = None
            elif name == "CATEGORY":
                found[kinds.get(str(node[1]).rpartition("_")[2], "a")] = None
        if isinstance(node, tuple | list) or type(node).__name__ == "SubPattern":
            for each in node:
                walk(each)

    walk(re._parser.parse(text, flags))  # type: ignore[attr-defined]
    return [each for each in found if ord(each) < 256 or isinstance(pattern.pattern, str)][:6]


def made_of(characters: list[str]) -> Iterator[Worst]:
    for one, other in itertools.product(characters, repeat=2):
        yield partial(_in_turn, one, other)
        yield partial(_one_by_one, one, other)


def _in_turn(one: str, other: str, n: int) -> str:
    return (one + other) * (n // 2) + "\0"


def _one_by_one(one: str, other: str, n: int) -> str:
    return one * (n // 2) + other * (n // 2) + "\0"


@pytest.mark.parametrize("key", [key for key, each in PATTERNS.items() if isinstance(each, Row)])
def test_a_pattern_costs_linear_time(key: str) -> None:
    row = PATTERNS[key]
    assert isinstance(row, Row)
    for pattern in patterns_of(key):
        for worst in (*row.worst, *made_of(characters_of(pattern))):
            check_linear(
                partial(search, pattern, row, worst), f"{pattern.pattern!r} of {worst(12)!r}"
            )


def search(pattern: re.Pattern[Any], row: Row, worst: Worst, n: int) -> object:
    text = worst(n)
    found = getattr(pattern, row.method)(
        text if isinstance(pattern.pattern, str) else text.encode("latin-1")
    )
    return sum(1 for _ in found) if row.method == "finditer" else found


# --- parsers ----------------------------------------------------------------------------------


def asked(kind: EndpointKind, body: bytes) -> None:
    """As the service reads a body."""
    with suppress(TrinamoError):
        request = kind.decode(body, lambda _: None)
        generate = request.to_generate("m")
        kind.answer(request, request.to_choices(generate, 1 << 20, 64), 1 << 20)
    with suppress(TrinamoError):
        decode_passed(body)
    can_go_on(body)


def object_of(member: Callable[[int], str], count: int) -> str:
    return "{" + ",".join(member(i) for i in range(count)) + "}"


def chat(rest: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"x"}],' + rest.encode() + b"}"


def quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


AT: Final = " - at `$"
BODIES: Final[dict[str, tuple[EndpointKind, Callable[[int], bytes]]]] = {
    "a grammar of line ends and blanks": (
        endpoints.CHAT,
        lambda n: chat(f'"guided_grammar":{quoted(chr(10) * (n // 2) + " " * (n // 2))}'),
    ),
    "a member like the end of a decoder's sentence": (
        endpoints.CHAT,
        lambda n: chat(f'"structured_outputs":{{{quoted(AT * (n // 8) + chr(10) + "x")}:1}}'),
    ),
    "an unknown field like that": (
        endpoints.CHAT,
        lambda n: chat(f"{quoted(AT * (n // 8) + chr(10))}:1"),
    ),
    "many unknown fields": (
        endpoints.CHAT,
        lambda n: chat(",".join(f'"x{i}":1' for i in range(n // 8))),
    ),
    "many forms": (
        endpoints.CHAT,
        lambda n: chat(f'"response_format":{{"type":{quoted("x" * n)}}}'),
    ),
    "many biases": (
        endpoints.CHAT,
        lambda n: chat(f'"logit_bias":{object_of(lambda i: f"{quoted(str(i))}:1", n // 8)}'),
    ),
    "stop strings": (
        endpoints.CHAT,
        lambda n: chat(f'"stop":[{quoted("a" * (n - 1) + "b")}]'),
    ),
    "many tools": (
        endpoints.CHAT,
        lambda n: chat(f'"tools":[{",".join(["{}"] * (n // 3))}]'),
    ),
    "many parts": (
        endpoints.CHAT,
        lambda n: (
            b'{"messages":[{"role":"user","content":['
            + b",".join([b'{"type":"text","text":"a"}'] * (n // 26))
            + b"]}]}"
        ),
    ),
    "lists in lists": (
        endpoints.COMPLETIONS,
        lambda n: b'{"prompt":' + b"[" * n + b"]" * n + b"}",
    ),
    "many prompts": (
        endpoints.COMPLETIONS,
        lambda n: b'{"prompt":[' + b",".join([b'"a"'] * (n // 4)) + b"]}",
    ),
    "many inputs": (
        endpoints.EMBEDDINGS,
        lambda n: b'{"input":[' + b",".join([b"[]"] * (n // 3)) + b"]}",
    ),
    "blanks before a prompt": (
        endpoints.COMPLETIONS,
        lambda n: b'{"prompt":' + b" " * n + b"[" + b" " * n + b"1]}",
    ),
    "items": (
        endpoints.RESPONSES,
        lambda n: b'{"input":[' + b",".join([b'{"type":"reasoning"}'] * (n // 20)) + b"]}",
    ),
    "blocks": (
        endpoints.MESSAGES,
        lambda n: (
            b'{"max_tokens":1,"messages":[{"role":"assistant","content":'
            b'[{"type":"tool_use","name":"a","input":{"a":['
            + b",".join([b"[]"] * (n // 3))
            + b"]}}]}]}"
        ),
    ),
    "many results": (
        endpoints.MESSAGES,
        lambda n: (
            b'{"max_tokens":1,"messages":[{"role":"user","content":['
            + b",".join([b'{"type":"tool_result"}'] * (n // 22))
            + b"]}]}"
        ),
    ),
}


@pytest.mark.parametrize(("kind", "make"), BODIES.values(), ids=BODIES)
def test_a_body_costs_linear_time(kind: EndpointKind, make: Callable[[int], bytes]) -> None:
    check_linear(lambda n: asked(kind, make(n)), make(64).decode())


def read_head(text: bytes, step: int = 1 << 16) -> None:
    reader, buffer = HeadReader(1 << 20), bytearray()
    with suppress(FaultError):
        for at in range(0, len(text), step):
            buffer += text[at : at + step]
            reader.read(buffer)


def read_chunks(text: bytes) -> None:
    headers: Headers = [(b"host", b"a"), (b"transfer-encoding", b"chunked")]
    reader, buffer = BodyReader(RequestHead(b"POST", b"/", b"1.1", headers)), bytearray()
    with suppress(FaultError):
        for at in range(0, len(text), 1024):
            buffer += text[at : at + 1024]
            reader.read(buffer, bytearray())


def parse_calls(text: str, size: int) -> None:
    parser = ToolCallParser()
    for at in range(0, len(text), size):
        parser.push(text[at : at + size])
    parser.finish()


def read_events(text: bytes, size: int) -> None:
    answer = StreamedAnswer(1 << 20)
    for at in range(0, len(text), size):
        answer.feed(text[at : at + size])
    answer.finish()


def refuse(body: bytes) -> None:
    refusal_of(500, {}, body)
    refusal_unstreamed(body)
    as_json(400, body)


def whole(body: bytes) -> None:
    answer = WholeAnswer(1 << 24, Renaming("theirs", "asked"))
    with suppress(RemoteProtocolError):
        answer.feed(body)
        answer.finish(answer.take())


def stopped(stops: list[str], text: str) -> None:
    stream = TextStream(stops)
    for char in text:
        stream.push(char.encode())


def read_entry(value: bytes) -> None:
    for decode in (decode_instance, decode_card):
        with suppress(TrinamoError):
            decode("instances/a/b/c/0123456789abcdef", value)


def explained(text: str) -> None:
    error = explain(ValueError(text), "the body", "prompt")
    assert len(error.message) < 400
    assert len(error.param or "") < 100


def named(text: str) -> None:
    with suppress(RequestError):
        EndpointName.parse(text)


def with_error(worst: Worst, n: int) -> None:
    answer_error(RemoteProtocolError(worst(n)))


HEAD: Final = b"GET / HTTP/1.1\r\nhost: a\r\n"
EMPTY: Final = '{"name":"a","arguments":{}}'
PARSERS: Final[dict[str, Callable[[int], object]]] = {
    "a head of one long field": lambda n: read_head(HEAD + b"a: " + b"b" * n + b"\r\n\r\n"),
    "a head of many fields": lambda n: read_head(HEAD + b"a:b\r\n" * (n // 5) + b"\r\n"),
    "empty lines before a head": lambda n: read_head(b"\r\n" * (n // 2) + HEAD + b"\r\n"),
    "a long target": lambda n: read_head(b"GET /" + b"?" * n + b" HTTP/1.1\r\nhost: a\r\n\r\n"),
    "a line of blanks": lambda n: read_head(b"GET" + b" " * n + b"\r\n\r\n"),
    "short chunks": lambda n: read_chunks(b"1\r\na\r\n" * (n // 6)),
    "an endless extension": lambda n: read_chunks(b"1;" + b"a" * n),
    "trailers": lambda n: read_chunks(b"0\r\n" + b"a:b\r\n" * (n // 5)),
    "a decoder's sentence": lambda n: explained(AT * (n // 8) + "\n"),
    "a missing field": lambda n: explained("Object missing required field `" + AT * (n // 8)),
    "calls without an end": lambda n: parse_calls("<tool_call>" + "a" * (8 * n), 8),
    "calls that are none": lambda n: parse_calls("<tool_call></tool_call>" * (n // 23), 3),
    "a call in another order": lambda n: parse_calls(
        '<tool_call>{"arguments":{"a":"' + "b" * (8 * n) + '"},"name":"a"}</tool_call>', 8
    ),
    "beginnings of calls": lambda n: parse_calls("<tool_call" * (n // 10), 1),
    "arguments": lambda n: parse_calls("<tool_call>" + EMPTY[:-2] + "{" * n, 4),
    "quotes in arguments": lambda n: parse_calls("<tool_call>" + EMPTY[:-2] + '"\\' * n, 4),
    "behind a call": lambda n: parse_calls(f"<tool_call>{EMPTY}" + "<" * n, 1),
    "stop strings": lambda n: stopped(["a" * 2000 + "b", "a" * 1000 + "c"], "a" * n),
    "an event in pieces": lambda n: read_events(b"data: " + b"a" * (8 * n), 64),
    "an event of many lines": lambda n: read_events(b"data: 1\n" * n, 64),
    "many small events": lambda n: read_events(b"data: {}\n\n" * (n // 10), 64),
    "events of carriage returns": lambda n: read_events(b"\r" * n, 64),
    "an error of many values": lambda n: whole(b'{"error":[' + b"[]," * (n // 3) + b"1]}"),
    "an answer of many choices": lambda n: whole(b'{"choices":[' + b"{}," * (n // 3) + b"{}]}"),
    "names of models": lambda n: whole(b'{"a":' + b'"model"' + b" " * n + b"1}"),
    "a refusal of many values": lambda n: refuse(b'{"error":[' + b"[]," * (n // 3) + b"1]}"),
    "a refusal of blanks": lambda n: refuse(b" \n" * (n // 2)),
    "a refusal of an object": lambda n: refuse(
        b'{"error":{"message":"' + b"a " * (n // 2) + b'"}}'
    ),
    "metrics": lambda n: parse_load(b"vllm:num_requests_running{" * (n // 26)),
    "metrics of blanks": lambda n: parse_load(b"vllm:num_requests_running" + b" " * n),
    "an event that goes on": lambda n: continued(
        b'{"a":' + b"[" * 100 + b"]" * 100 + b',"b":"' + b"c" * n + b'"}', b"data: {}", 1
    ),
    "another model": lambda n: with_model(b'{"model":"a","b":"' + b"c" * n + b'"}', "d"),
    "a traceparent": lambda n: decode_traceparent("00-" + "a" * n),
    "an id": lambda n: root_of("a" * 16 + ".a" * (n // 2)),
    "an entry": lambda n: read_entry(b'{"' + b"a" * n + b'":1}'),
    "an entry of many members": lambda n: read_entry(b'{"a":[' + b"[]," * (n // 3) + b"1]}"),
    "a name": lambda n: named("a/" + "b" * n + "/c"),
    "a line for the log": lambda n: one_line("\x00\u2028" * (n // 2)),
    "addresses for the log": lambda n: mask_text("://" + "a" * n),
    **{f"an error of {each(8)!r}": partial(with_error, each) for each in ADDRESSES},
}


@pytest.mark.parametrize("run", PARSERS.values(), ids=PARSERS)
def test_a_parser_costs_linear_time(run: Callable[[int], object]) -> None:
    check_linear(run, "it")


def test_a_refusal_quotes_at_most_eighty_characters() -> None:
    """Also of a name that a decoder quotes, and where it is the parameter."""
    long = "x" * 10_000
    for kind, body in (
        (endpoints.CHAT, chat(f'"structured_outputs":{{"{long}":1}}')),
        (endpoints.CHAT, chat(f'"response_format":{{"type":"{long}"}}')),
        (endpoints.CHAT, chat(f'"tool_choice":"{long}"')),
        (endpoints.CHAT, chat(f'"structured_outputs":{{"{AT * 100}.{long}`":1}}')),
        (endpoints.EMBEDDINGS, f'{{"input":"a","encoding_format":"{long}"}}'.encode()),
        (
            endpoints.MESSAGES,
            f'{{"max_tokens":1,"messages":[],"tool_choice":{{"type":"{long}"}}}}'.encode(),
        ),
        (endpoints.MESSAGES, f'{{"max_tokens":1,"messages":[{{"role":"{long}"}}]}}'.encode()),
    ):
        with pytest.raises(RequestError) as caught:
            kind.decode(body).to_generate("m")
        assert len(caught.value.message) < 300
        assert "x" * 81 not in caught.value.message
        assert len(caught.value.param or "") < 100
