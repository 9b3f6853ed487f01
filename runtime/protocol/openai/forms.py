"""What holds an answer to a form: JSON by a schema, a regular expression, a list of texts, a grammar.

Clients have ten names for it (`fields.FORMS`), an engine four. Two forms of one request contradict
each other, so one at most is given. What is long is measured before it is decoded, and read as text
here; whether it can be a grammar, the engine says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from ...errors import RequestError
from .fields import CHAT_FIELDS
from .generate import CHOICES_MAX, SCHEMA_CHARS_MAX, STOP_CHARS_MAX
from .shaping import (
    ABSENT,
    ANY_OBJECT,
    check_length,
    decode_json,
    is_absent,
    json_text,
    refuse,
    schema_of,
)

_MORE_BYTES: Final = 256
_RULE_OF_BNF: Final = re.compile(r"^[ \t]*<?[\w-]+>?[ \t]*::=", re.MULTILINE)
"""Of one line: blanks that run over line ends would be read again from each of them."""


_MEMBERS: Final = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choices",
    "grammar": "grammar",
}
"""Of vLLM's `structured_outputs`: which field of `GenerateRequest` each sets."""
_REFUSED: Final = ("structural_tag", "whitespace_pattern", "disable_any_whitespace")
_PASSED: Final = ("disable_additional_properties", "disable_fallback")
"""They only say how its engine goes about it."""
_Structured: Any = msgspec.defstruct(
    "StructuredOutputs",
    [(name, Raw, ABSENT) for name in (*_MEMBERS, "json_object", *_REFUSED, *_PASSED)],
    forbid_unknown_fields=True,
)
_structured_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Structured)
_text_decoder = msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(list[str])


def form_of(given: Mapping[str, Raw]) -> dict[str, Any]:
    """The fields of `GenerateRequest` that say the form, from those of `FORMS` that are `given`.

    Raises `RequestError` for what is no form, and for a second one.
    """
    found: dict[str, Any] = {}
    first = ""
    for name, raw in given.items():
        if not (form := _read(name, raw)):
            continue
        if first:
            raise RequestError(
                f"'{first}' and '{name}' both say what form the answer has; send one of them",
                param=name,
            )
        first, found = name, form
    return found


def _read(name: str, raw: Raw) -> dict[str, Any]:
    if name == "response_format":
        schema = schema_of(raw)
        return {"json_schema": schema} if schema else {}
    if name != "structured_outputs":
        (kind,) = CHAT_FIELDS[name].sets
        return {kind: _READERS[kind](raw, name)}
    check_length(raw, name, SCHEMA_CHARS_MAX, "characters", 2 * _MORE_BYTES)
    asked = decode_json(_structured_decoder, raw, name)
    for member in _REFUSED:
        refuse(getattr(asked, member), f"{name}.{member}")
    forms = [
        {kind: _READERS[kind](value, f"{name}.{member}")}
        for member, kind in _MEMBERS.items()
        if not is_absent(value := getattr(asked, member))
    ]
    if bytes(asked.json_object) == b"true":
        forms.append({"json_schema": ANY_OBJECT})
    if len(forms) != 1:
        raise RequestError(
            f"'{name}' must have one of json, regex, choice, grammar and json_object,"
            f" not {len(forms)}",
            param=name,
        )
    return forms[0]


def _schema(raw: Raw, param: str) -> str:
    """A schema, or JSON text of one."""
    check_length(raw, param, SCHEMA_CHARS_MAX, "characters", _MORE_BYTES)
    if not bytes(raw).startswith(b'"'):
        return json_text(raw, param)
    text = decode_json(_text_decoder, raw, param)
    try:
        return json_text(Raw(text.encode()), param)
    except RequestError as error:
        raise RequestError(f"'{param}' holds no schema: {error.message}", param=param) from None


def _text(raw: Raw, param: str) -> str:
    check_length(raw, param, SCHEMA_CHARS_MAX, "characters", _MORE_BYTES)
    found = decode_json(_text_decoder, raw, param)
    if not found:
        raise RequestError(f"'{param}' is empty, which no answer is", param=param)
    return found


def _choices(raw: Raw, param: str) -> list[str]:
    check_length(raw, param, SCHEMA_CHARS_MAX, "characters", _MORE_BYTES)
    found = decode_json(_texts_decoder, raw, param)
    if not 1 <= len(found) <= CHOICES_MAX:
        raise RequestError(
            f"'{param}' holds {len(found)} texts; it must have 1 to {CHOICES_MAX}", param=param
        )
    if not all(1 <= len(text) <= STOP_CHARS_MAX for text in found):
        raise RequestError(
            f"every text of '{param}' must have 1 to {STOP_CHARS_MAX} characters", param=param
        )
    return found


def _grammar(raw: Raw, param: str) -> str:
    """A grammar in Lark's notation: others look alike, and would mean something else."""
    found = _text(raw, param)
    if _RULE_OF_BNF.search(found):
        raise RequestError(
            f"'{param}' has rules with '::=' (GBNF, EBNF), which are not supported by this server;"
            ' write it as Lark does, such as start: "yes" | "no"',
            param=param,
        )
    return found


_READERS: Final = {
    "json_schema": _schema,
    "regex": _text,
    "choices": _choices,
    "grammar": _grammar,
}
"""By the field of `GenerateRequest`: what reads it."""
