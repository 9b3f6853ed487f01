"""JSON schemas of strangers as the grammar engine takes them: bounded, closed, without what is passed over.

An object with `properties` has no others, unless its schema says `additionalProperties` itself: a
small model that may invent keys does. JSON Schema leaves them open, so whoever means that turns it
off. What combines several schemas of one object stays open, as each would refuse what the others ask for.

**What a grammar cannot hold is refused here**, by the keyword and its place: an answer that only mostly fits is
worse than none, and some of it would leave llguidance without any next token in the middle of an answer.
`format` is a note by the standard, so those that the grammar does not know are passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import permutations
from typing import Any, Final

from ...errors import RequestError

DEPTH_MAX: Final = 64
"""Of a schema: what walks it down in native code has a stack."""
FORMED_CHARS_MAX: Final = 1 << 20
"""Of what a schema, or those of all functions, becomes: listed orders, and the schema of a pattern of many names, are written many times."""
INTEGER_MAX: Final = 2**53
"""The grammar counts in floating point: it would let the number beside it stand."""
# No white space but these: a small model that may write as much as it likes writes nothing else.
_FORM: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FORMATS: Final = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""What the grammar holds of `format`."""
_NOT_HELD: Final = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTED_MAX: Final = 5
"""Of values whose every order is listed: 326 lists."""
_NAMES: Final = re.compile(r"\^(?:\((?:\?:)?([\w|-]+)\)|([\w-]+))\$")
"""A pattern that is nothing but names."""
_FINITE: Final = re.compile(r"\^[^*+]*\$")
_WITHOUT_END: Final = re.compile(r"\{\d*,\}")
_LITERAL: Final = ("const", "enum", "default", "examples", "example")
"""What holds values, not schemas."""
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""What holds schemas by names."""
_COMBINING: Final = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"),
    *("patternProperties", "dependentSchemas", "unevaluatedProperties", "propertyNames"),
)
"""What says more of an object beside its own properties."""


def formed(schema: Any, param: str, *, closes_objects: bool, of: str = "the schema") -> str:
    """The schema's JSON with the form that all answers have; `RequestError` for what no grammar holds.

    `of` is whose schema it is, for the message.
    """
    schema = _bounded({} if schema is True else schema, param)
    if not isinstance(schema, dict):
        return json.dumps(schema)
    nodes = list(_schemas(schema))
    closes_objects = closes_objects and not any(_is_combined(node) for _, node in nodes)
    for place, node in nodes:
        if closes_objects and _is_open(node):
            node["additionalProperties"] = False
        if (found := _not_held(node)) is not None:
            keyword, hint = found
            raise RequestError(
                f"'{param}' cannot be held: {of} has '{keyword}' at {place}{hint}", param=param
            )
        if "format" in node and not (isinstance(node["format"], str) and node["format"] in FORMATS):
            del node["format"]
    _check_length(schema, param, {})
    # What a client says of the form would say it of our white space, and of what may be passed over.
    return json.dumps({**schema, "x-guidance": _FORM})


def check_formed(chars: int, param: str) -> None:
    """Raise `RequestError` for more than `FORMED_CHARS_MAX`."""
    if chars > FORMED_CHARS_MAX:
        raise RequestError(
            f"'{param}' is too large once its lists and patterns are written out", param=param
        )


def _check_length(node: Any, param: str, known: dict[int, int]) -> int:
    """About how many characters `node` is written in; `RequestError` for more than `FORMED_CHARS_MAX`.

    What is written in several places is one object and looked at once, as `known` has it: such places within
    one another would double what is written with each, and nobody could write it to measure it.
    """
    if not isinstance(node, dict | list | tuple):
        return len(node) if isinstance(node, str) else 1
    length = known.get(id(node))
    if length is None:
        length = 2
        for each in node.values() if isinstance(node, dict) else node:
            length += 2 + _check_length(each, param, known)
            check_formed(length, param)
        length += sum(map(len, node)) if isinstance(node, dict) else 0
        known[id(node)] = length
    return length


def arguments_of(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a function's arguments: one whose parameters name nothing is called with `{}`.

    An open object, as JSON Schema has it, would have the model invent some.
    """
    given = parameters or {}
    says = ("properties", "required", "additionalProperties", "enum", "const", *_COMBINING)
    is_named = any(given.get(key) not in (None, {}, []) for key in says)
    return given if is_named else {"type": "object", "additionalProperties": False}


def _not_held(node: dict[str, Any]) -> tuple[str, str] | None:
    """The keyword of `node` that no grammar holds, and a hint; what has an equal that one holds becomes that."""
    for keyword in _NOT_HELD:
        if keyword in node:
            return keyword, ", which no grammar holds"
    if node.pop("uniqueItems", False) is True and not _lists_distinct(node):
        return "uniqueItems", (
            f"; a grammar holds it of at most one item, or of an 'enum' of {_LISTED_MAX} values"
        )
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict) and not _names_patterns(node, patterns):
        return "patternProperties", "; list the names that it matches in 'properties'"
    least, required = node.get("minProperties"), node.get("required")
    is_open = node.get("additionalProperties") is not False or "patternProperties" in node
    # Nothing keeps a name that the answer chooses from being chosen twice.
    if isinstance(least, int) and is_open:
        named = len(required) if isinstance(required, list) else 0
        if least > named + 1:
            return "minProperties", "; list the names in 'properties', and close the object"
    return None


def _lists_distinct(node: dict[str, Any]) -> bool:
    """Whether the items of an array differ, now that its lists are listed where there are few."""
    kinds, most, items = node.get("type", "array"), node.get("maxItems"), node.get("items")
    if not isinstance(kinds, str | list) or "array" not in kinds or most in (0, 1):
        return True
    values = items.get("enum") if isinstance(items, dict) else None
    if not isinstance(values, list) or not {"prefixItems", "enum", "const"}.isdisjoint(node):
        return False
    values = [json.loads(text) for text in dict.fromkeys(map(json.dumps, values))]
    least, most = node.get("minItems", 0), len(values) if most is None else most
    if kinds != "array" or not (isinstance(least, int) and isinstance(most, int)):
        return False
    if len(values) > _LISTED_MAX or not 0 <= least <= most:
        return False
    for keyword in ("items", "minItems", "maxItems"):
        node.pop(keyword, None)
    lengths = range(least, min(most, len(values)) + 1)
    node["enum"] = [each for length in lengths for each in permutations(values, length)]
    return True


def _names_patterns(node: dict[str, Any], patterns: dict[str, Any]) -> bool:
    """Make properties of patterns that are names; whether none is left that may match named ones alone.

    Of a pattern llguidance takes the named properties away, and does not see when nothing is left: behind the
    comma before such a property no token fits.
    """
    properties = node.get("properties", {})
    if not isinstance(properties, dict):
        return True
    named: dict[str, list[Any]] = {}
    for pattern, schema in list(patterns.items()):
        found = _NAMES.fullmatch(pattern)
        if found is not None:
            for name in dict.fromkeys((found[1] or found[2]).split("|")):
                named.setdefault(name, []).append(schema)
            del patterns[pattern]
    for name, schemas in named.items():
        several = [each for each in (properties.get(name, True), *schemas) if each is not True]
        properties[name] = {"allOf": several} if len(several) > 1 else [*several, True][0]
        node["properties"] = properties
    if not patterns:
        del node["patternProperties"]
    return not (properties and any(map(_is_finite, patterns)))


def _is_finite(pattern: str) -> bool:
    return bool(_FINITE.fullmatch(pattern)) and not _WITHOUT_END.search(pattern)


def _is_open(node: dict[str, Any]) -> bool:
    """Whether it names properties, and does not say whether there are others."""
    properties, required = node.get("properties"), node.get("required")
    return (
        isinstance(properties, dict)
        and bool(properties)
        and "additionalProperties" not in node
        and not any(key in node for key in _COMBINING)
        and not (
            isinstance(required, list)
            and any(not isinstance(each, str) or each not in properties for each in required)
        )
    )


def _is_combined(node: dict[str, Any]) -> bool:
    """Whether one object is to be of several schemas, which closed would leave none."""
    several = node.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    return "properties" in node and any(key in node for key in ("allOf", "anyOf", "oneOf", "$ref"))


def _schemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema within and its place, itself included: no value, and no table of names."""
    pending: list[tuple[str, Any]] = [("#", schema)]
    while pending:
        place, node = pending.pop()
        if isinstance(node, list):
            pending += [(f"{place}/{index}", each) for index, each in enumerate(node)]
        elif isinstance(node, dict):
            yield place, node
            for key, value in node.items():
                if key in _NAMED and isinstance(value, dict):
                    pending += [(f"{place}/{key}/{name}", each) for name, each in value.items()]
                elif key not in _LITERAL and not key.startswith("x-"):
                    pending.append((f"{place}/{key}", value))


def _bounded(schema: Any, param: str) -> Any:
    """The schema; `RequestError` for what a grammar cannot hold."""
    pending: list[tuple[int, Any]] = [(0, schema)]
    while pending:
        depth, node = pending.pop()
        if not isinstance(node, dict | list):
            continue
        if isinstance(node, dict) and _has_inexact(node):
            raise RequestError(
                f"'{param}' asks for an integer beyond ±2**53, which the grammar cannot hold exactly",
                param=param,
            )
        if depth > DEPTH_MAX:
            raise RequestError(f"'{param}' is more than {DEPTH_MAX} deep", param=param)
        items = node.values() if isinstance(node, dict) else node
        pending += [(depth + 1, each) for each in items]
    return schema


def _has_inexact(node: dict[str, Any]) -> bool:
    """Whether an answer may be, word for word, an integer that is not held exactly."""
    listed = node.get("enum")
    values = [node.get("const"), *(listed if isinstance(listed, list) else ())]
    return any(isinstance(value, int) and abs(value) > INTEGER_MAX for value in values)
