"""Grammars and templates of strangers, in a child process that the kernel ends at a bound."""

from __future__ import annotations

import json
import os
import random
import signal
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from tests import needs
from trinamo.runtime.errors import ConfigError, EngineError, RequestError
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest

needs.LLAMACPP.imported()
from trinamo.runtime.engines.llamacpp.forms import Grammars  # noqa: E402
from trinamo.runtime.engines.llamacpp.grammars import Compiler  # noqa: E402
from trinamo.runtime.engines.llamacpp.prompts import Prompts  # noqa: E402
from trinamo.runtime.engines.llamacpp.sandbox.sandbox import BOUNDS, ExceededError, Sandbox  # noqa: E402

pytestmark = pytest.mark.check

END = 256
TOKENS = [*(bytes((each,)) for each in range(256)), b"<end>"]


def patterns(count: int) -> dict[str, Any]:
    """What takes llguidance three times as long with each of them: 24 some weeks."""
    return {
        "type": "string",
        "allOf": [{"pattern": f".*{each}.*"} for each in string.ascii_lowercase[:count]],
    }


def asking(**form: Any) -> GenerateRequest:
    return GenerateRequest(model="m", prompt="a", **form)


def by_schema(schema: Any) -> GenerateRequest:
    return asking(json_schema=json.dumps(schema))


def begins(grammars: Grammars, asked: GenerateRequest, text: str) -> bool:
    """Whether an answer may begin with `text`."""
    opened = grammars.open(asked)
    assert opened is not None
    try:
        opened.follow(list(text.encode()))
    except EngineError:
        return False
    return True


@contextmanager
def opened(kind: str, setup: Any) -> Iterator[Sandbox]:
    sandbox = Sandbox(kind, setup)
    try:
        yield sandbox
    finally:
        sandbox.close()


@contextmanager
def grammars() -> Iterator[Grammars]:
    compiler = Compiler(TOKENS, lambda text: list(text.encode()), end_ids=[END], special_ids=[END])
    with opened("grammar", (TOKENS, [END], [END])) as sandbox:
        yield Grammars(compiler, sandbox)


async def test_a_schema_that_would_take_weeks_is_refused_and_the_next_is_not() -> None:
    """Once: a refusal is remembered. The event loop and the next request go on."""
    hostile, harmless = by_schema(patterns(24)), by_schema({"enum": ["yes", "no"]})
    with grammars() as made:
        for _ in range(2):
            with pytest.raises(RequestError, match=f"takes more than {BOUNDS}") as refused:
                await made.prepare(hostile)
            assert refused.value.param == "response_format"
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await trio.lowlevel.checkpoint()
                beats += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            with pytest.raises(RequestError, match="takes more than"):
                await made.prepare(by_schema(patterns(23)))
            seen = beats
            await made.prepare(harmless)
            nursery.cancel_scope.cancel()
        assert seen > 1
        assert begins(made, harmless, '"yes"')


async def test_what_is_no_grammar_is_refused_by_its_reason() -> None:
    with grammars() as made, pytest.raises(RequestError, match="cannot be a grammar"):
        await made.prepare(by_schema({"$ref": "#/nowhere"}))


@pytest.mark.parametrize(
    ("form", "fits", "does_not"),
    [
        ({"regex": "a|b[0-9]{2}/x"}, "b07/x", "b0x"),
        ({"choices": ["yes", 'n"o\n', "é", "yes please"]}, "yes please", "no"),
        ({"choices": ["yes", 'n"o\n', "é"]}, "é", "maybe"),
        ({"grammar": 'start: "a" call\ncall: "}" | "x"'}, "a}", "a{"),
    ],
    ids=["a regular expression", "texts", "other texts", "a grammar"],
)
async def test_an_answer_is_of_the_language_it_is_to_be_of(
    form: dict[str, Any], fits: str, does_not: str
) -> None:
    """Also beside tools, whose rules have names that a grammar may have, too."""
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    with grammars() as made:
        for asked in (asking(**form), asking(**form, tools=tools)):
            await made.prepare(asked)
            assert begins(made, asked, fits)
            assert not begins(made, asked, does_not)
        assert begins(made, asked, "<tool_call>\n")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nothing"}, "cannot be a grammar"),
        ({"grammar": "{"}, "cannot be a grammar"),
        ({"regex": "(((a{9999}){9999}){9999}){9999}"}, "cannot be a grammar"),
        ({"regex": "a", "choices": ["b"]}, "one form"),
        ({"choices": ["a" * 40_000, "b" * 40_000]}, "at most"),
    ],
    ids=["look-around", "an unknown rule", "no grammar", "a bomb", "two forms", "long texts"],
)
async def test_a_language_that_nobody_can_hold_an_answer_to_is_refused(
    form: dict[str, Any], words: str
) -> None:
    with grammars() as made, pytest.raises(RequestError, match=words) as refused:
        await made.prepare(asking(**form))
    assert refused.value.param == "structured_outputs"


PERSON = {"properties": {"name": {"type": "string"}}}
NAMED = '{"name": "a"'


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (PERSON, True),
        ({**PERSON, "additionalProperties": True}, False),
        ({**PERSON, "additionalProperties": {"type": "integer"}}, False),
        ({**PERSON, "required": ["b"]}, False),
        ({"$ref": "#/$defs/p", "$defs": {"p": PERSON}}, True),
        ({"allOf": [PERSON, {"properties": {"b": {}}}]}, False),
        ({"type": "object"}, False),
        ({"anyOf": [PERSON, {"type": "null"}]}, True),
    ],
    ids=str,
)
async def test_an_object_has_no_other_properties_than_it_names(
    schema: dict[str, Any], is_closed: bool
) -> None:
    """Unless the schema says so itself, or says more of it elsewhere."""
    asked = by_schema({"type": "object", **schema} if "anyOf" not in schema else schema)
    with grammars() as made:
        await made.prepare(asked)
        assert begins(made, asked, NAMED)
        assert begins(made, asked, NAMED + ', "b": 1') is not is_closed


async def test_closing_can_be_turned_off() -> None:
    """A property may be called as a keyword is."""
    keyword = {"properties": {"properties": {"type": "array"}}}
    compiler = Compiler(TOKENS, lambda text: list(text.encode()), end_ids=[END], special_ids=[END])
    with opened("grammar", (TOKENS, [END], [END])) as sandbox:
        for closes in (True, False):
            made = Grammars(compiler, sandbox, closes)
            asked = by_schema({"type": "object", **keyword})
            await made.prepare(asked)
            assert begins(made, asked, '{"properties": [1, 1]}')
            assert begins(made, asked, '{"properties": [], "b": 1}') is not closes


HELLO = [ChatMessage("user", "hello")]
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = [
    "{{ 'x'|center(4000000000) }}",
    "{{ messages[0].content.ljust(4000000000) }}",
    "{{ '%4000000000d' % messages|length }}",
    "{{ messages[0].content * 4000000000 }}",
    "{{ (messages|length + 8) ** (9 ** 9) }}",
]


@pytest.mark.parametrize("bomb", [SLOW, *LARGE])
async def test_a_template_is_ended_at_the_bound_and_rendered_again(bomb: str) -> None:
    """For the messages that set it off alone."""
    source = (
        "{% if messages[0].content == 'now' %}" + bomb + "{% endif %}[{{ messages[0].content }}]"
    )
    with opened("template", (source, 1000, "", "", [])) as sandbox:
        assert await sandbox.call(HELLO, "") == "[hello]"
        with pytest.raises((ExceededError, EngineError)):
            await sandbox.call([ChatMessage("user", "now")], "")
        assert await sandbox.call(HELLO, "") == "[hello]"


async def test_a_template_that_folds_into_gigabytes_is_malformed() -> None:
    """Jinja computes what is constant when it reads a template."""
    with (
        opened(
            "template", ("{{ 'x'.ljust(4000000000) ~ 'x'|center(4000000000) }}", 1000, "", "", [])
        ) as sandbox,
        pytest.raises((ConfigError, EngineError, ExceededError)),
    ):
        await sandbox.call(HELLO, "")


async def test_what_a_template_refuses_is_told_and_a_malformed_one_too() -> None:
    with (
        opened("template", ("{{ raise_exception('no') }}", 1000, "", "", [])) as sandbox,
        pytest.raises(RequestError, match="refuses these messages: no"),
    ):
        await sandbox.call(HELLO, "")
    with opened("template", ("{% if %}", 1000, "", "", [])) as sandbox:
        for _ in range(2):
            with pytest.raises(ConfigError, match="malformed"):
                await sandbox.call()


async def test_a_call_that_is_cancelled_leaves_its_answer_to_nobody() -> None:
    with opened("template", ("[{{ messages[0].content }}]", 9_000_000, "", "", [])) as sandbox:
        await sandbox.call()
        for count in range(0, 40, 5):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sandbox.call, [ChatMessage("user", "x" * 300_000)], "")
                    for _ in range(count):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert await sandbox.call(HELLO, "") == "[hello]"


async def test_a_child_that_is_killed_fails_its_request_and_is_replaced() -> None:
    with opened("template", (SLOW, 1000, "", "", [])) as sandbox:
        await sandbox.call()
        assert sandbox._child is not None
        pid = sandbox._child.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ExceededError):
            await sandbox.call(HELLO, "")
        await sandbox.call()
        assert sandbox._child.pid != pid


class Words:
    """A vocabulary of bytes, and of one special token."""

    bos_text, eos_text, special_texts, size = "", "", ["<|end|>"], 257

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        found: list[int] = []
        for index, piece in enumerate(text.split("<|end|>") if parse_special else [text]):
            found += [END] * (index > 0) + list(piece.encode())
        return found


async def test_a_message_cannot_pass_for_the_place_of_another() -> None:
    """The marker of a place is drawn for each request: in a tool's description it is only text."""
    source = "{{ tools[0].function.description }}|{% for m in messages %}{{ m.content }}<|end|>{% endfor %}<tool_call>"
    vocabulary: Any = Words()
    prompts = Prompts(vocabulary, source, context_tokens_max=4096, rng=random.Random(1))
    marker = "\ue0000\ue001\ue00099\ue001"
    try:
        asked = GenerateRequest(
            model="m",
            messages=[ChatMessage("user", "a<|end|>b"), ChatMessage("user", marker)],
            tools=json.dumps(
                [{"type": "function", "function": {"name": "f", "description": marker}}]
            ),
        )
        prepared = await prompts.prepare(asked)
    finally:
        prompts.close()
    token_ids = prepared.token_ids or []
    assert token_ids.count(END) == 2
    said = bytes(each for each in token_ids if each != END).decode()
    assert said.count(marker) == 2
    assert "|a<|end|>b" + marker in said


async def test_a_template_in_a_child_costs_little() -> None:
    """Measured and shown with `-s`; nothing is asserted of time."""
    with opened(
        "template", ("{% for m in messages %}{{ m.content }}{% endfor %}", 9000, "", "", [])
    ) as sandbox:
        await sandbox.call(HELLO, "")
        began, used = time.perf_counter(), time.process_time()
        for _ in range(200):
            await sandbox.call(HELLO, "")
        took, spent = time.perf_counter() - began, time.process_time() - used
        print(f"{took / 200 * 1e3:.3f} ms a call, {spent / 200 * 1e3:.3f} ms of this process")
