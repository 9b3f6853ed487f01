"""JSON schemas of strangers as the grammar engine takes them: bounded, closed, without what is passed over.

An object with `properties` has no others, unless its schema says `additionalProperties` itself: a
small model that may invent keys does. JSON Schema leaves them open, so whoever means that turns it
off. What combines several schemas of one object stays open, as each would refuse what the others ask for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from ...errors import RequestError

DEPTH_MAX: Final = 64
"""Of a schema: what walks it down in native code has a stack."""
INTEGER_MAX: Final = 2**53
"""The grammar counts in floating point: it would let the number beside it stand."""
# No white space but these: a small model that may write as much as it likes writes nothing else.
_FORM: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PASSED_OVER: Final = ("uniqueItems",)
"""What no grammar can count, and what the answer mostly is anyway."""
_LITERAL: Final = ("const", "enum", "default", "examples", "example")
"""What holds values, not schemas."""
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""What holds schemas by names."""
_COMBINING: Final = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"),
    *("patternProperties", "dependentSchemas", "unevaluatedProperties", "propertyNames"),
)
"""What says more of an object beside its own properties."""


def formed(schema: Any, param: str, *, closes_objects: bool) -> str:
    """The schema's JSON with the form that all answers have; `RequestError` for what no grammar holds."""
    schema = _bounded({} if schema is True else schema, param)
    if not isinstance(schema, dict):
        return json.dumps(schema)
    nodes = list(_schemas(schema))
    closes_objects = closes_objects and not any(map(_is_combined, nodes))
    for node in nodes:
        for key in _PASSED_OVER:
            node.pop(key, None)
        if closes_objects and _is_open(node):
            node["additionalProperties"] = False
    # What a client says of the form would say it of our white space, and of what may be passed over.
    return json.dumps({**schema, "x-guidance": _FORM})


def _is_open(node: dict[str, Any]) -> bool:
    """Whether it names properties, and does not say whether there are others."""
    properties, required = node.get("properties"), node.get("required")
    return (
        isinstance(properties, dict)
        and bool(properties)
        and "additionalProperties" not in node
        and not any(key in node for key in _COMBINING)
        and not (isinstance(required, list) and any(each not in properties for each in required))
    )


def _is_combined(node: dict[str, Any]) -> bool:
    """Whether one object is to be of several schemas, which closed would leave none."""
    several = node.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    return "properties" in node and any(key in node for key in ("allOf", "anyOf", "oneOf", "$ref"))


def _schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each schema within, itself included: no value, and no table of names."""
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key in _NAMED and isinstance(value, dict):
                    pending += value.values()
                elif key not in _LITERAL:
                    pending.append(value)


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
