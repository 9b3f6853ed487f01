"""Parameters that a client's body holds undecoded: those that shape an answer, tools, those we lack.

Every function takes what the client sent and returns what `GenerateRequest` says of it; what is wrong
is a `RequestError` that names the parameter. Of tools the form is checked here; whether a function's
parameters can be a grammar, the engine says, and how an answer calls one, `tool_calls.py`. Sans-IO.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Raw
from typing_extensions import Buffer

from ...errors import RequestError
from ..undecodable import UNDECODABLE, explain
from .generate import (
    LOGIT_BIASES_MAX,
    SCHEMA_CHARS_MAX,
    TOOL_NAMED,
    TOOLS_CHARS_MAX,
    Bias,
    TokenId,
    TopLogprobs,
)

_T = TypeVar("_T")


def decode_json(decoder: msgspec.json.Decoder[_T], data: Buffer, param: str = "") -> _T:
    """What is in a body, or in `param`, which was left undecoded; raises `RequestError`.

    The error names the parameter as if the whole body was decoded.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise explain(error, "the body is wrong", param) from None
    except UNDECODABLE as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def check_length(raw: Raw, param: str, length_max: int, unit: str = "bytes", more: int = 0) -> None:
    """Raise `RequestError` if `param` is longer than it may be, with so much `more` around it."""
    if len(raw) > length_max + more:
        raise RequestError(f"'{param}' is longer than {length_max} {unit}", param=param)


ABSENT: Final = Raw()
"""A parameter that was not given, by identity."""
_LOGIT_BIAS_BYTES_MAX: Final = LOGIT_BIASES_MAX * 64
_SHORT_BYTES_MAX: Final = 256
"""A value of an unsupported parameter that changes nothing is shorter."""


class _JsonSchema(msgspec.Struct, frozen=True):
    schema: Raw = ABSENT


class Format(msgspec.Struct, frozen=True):
    """The form of an answer."""

    type: str
    schema: Raw = ABSENT
    """In `response_format` of `json_object`, as llama.cpp's server has it."""


class _ResponseFormat(Format, frozen=True):
    json_schema: _JsonSchema | None = None


class _Formatted(msgspec.Struct, frozen=True):
    """What holds the form in an API that has no `response_format`."""

    format: Format | None = None


_bool_decoder = msgspec.json.Decoder(bool)
_top_decoder = msgspec.json.Decoder(TopLogprobs)
_bool_or_top_decoder: msgspec.json.Decoder[bool | int] = msgspec.json.Decoder(bool | TopLogprobs)
_bias_decoder = msgspec.json.Decoder(dict[TokenId, Bias])
_format_decoder = msgspec.json.Decoder(_ResponseFormat)
formatted_decoder = msgspec.json.Decoder(_Formatted)
_object_decoder = msgspec.json.Decoder(dict[str, Any])
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def is_absent(raw: Raw) -> bool:
    """Whether the parameter was left out, or is null."""
    return raw is ABSENT or (len(raw) <= len(b"null") and bytes(raw) in (b"", b"null"))


def chat_logprobs(logprobs: Raw, top_logprobs: Raw) -> int | None:
    """How many alternatives a chat wants told, None for no log probabilities at all."""
    is_wanted = not is_absent(logprobs) and decode_json(_bool_decoder, logprobs, "logprobs")
    count = (
        0 if is_absent(top_logprobs) else decode_json(_top_decoder, top_logprobs, "top_logprobs")
    )
    if is_wanted:
        return count
    if count:
        raise RequestError(
            "'top_logprobs' is only allowed when 'logprobs' is true", param="top_logprobs"
        )
    return None


def completion_logprobs(logprobs: Raw) -> int | None:
    """As `chat_logprobs`; 0 asks for the chosen token's alone, and false for none."""
    if is_absent(logprobs):
        return None
    found = decode_json(_bool_or_top_decoder, logprobs, "logprobs")
    if found is True:
        raise RequestError("'logprobs' of a completion is a number, from 0 to 20", param="logprobs")
    return None if found is False else found


def logit_bias(raw: Raw) -> dict[int, float]:
    """What is added to the logits of tokens, by their ids."""
    if is_absent(raw):
        return {}
    check_length(raw, "logit_bias", _LOGIT_BIAS_BYTES_MAX)
    biases = decode_json(_bias_decoder, raw, "logit_bias")
    if len(biases) > LOGIT_BIASES_MAX:
        raise RequestError(
            f"'logit_bias' names {len(biases)} tokens; at most {LOGIT_BIASES_MAX} are allowed",
            param="logit_bias",
        )
    return {token_id: bias for token_id, bias in biases.items() if bias}


ANY_OBJECT: Final = '{"type":"object"}'


def schema_of(raw: Raw) -> str:
    """The JSON schema that `response_format` asks for; empty if the answer is just text."""
    param = "response_format"
    if is_absent(raw):
        return ""
    check_length(raw, param, SCHEMA_CHARS_MAX, "characters", _SHORT_BYTES_MAX)
    found = decode_json(_format_decoder, raw, param)
    if found.type == "json_object" and not is_absent(found.schema):
        return json_text(found.schema, f"{param}.schema")
    schema = ABSENT if found.json_schema is None else found.json_schema.schema
    return schema_of_type(found.type, schema, param, f"{param}.json_schema.schema")


def schema_of_type(kind: str, schema: Raw, param: str, where: str) -> str:
    """The JSON schema of an answer of this `kind`, which `param` says; that of `json_schema` is `where`."""
    if kind == "text":
        return ""
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise RequestError(
            f"'{param}.type' is {kind[:40]!r}; it must be text, json_object or json_schema",
            param=f"{param}.type",
        )
    if is_absent(schema):
        raise RequestError(f"'{where}' is missing", param=where)
    return json_text(schema, where)


def object_text(raw: Raw, param: str, length_max: int = SCHEMA_CHARS_MAX) -> str:
    """The JSON object in `raw` in its shortest form; empty if it has no members."""
    if is_absent(raw):
        return ""
    check_length(raw, param, length_max)
    value = decode_json(_object_decoder, raw, param)
    return msgspec.json.encode(value).decode() if value else ""


def json_text(raw: Raw, param: str) -> str:
    """The JSON in `raw`, an object or a boolean as schemas are, in its shortest form."""
    value = decode_json(_any_decoder, raw, param)
    if not isinstance(value, dict | bool):
        raise RequestError(f"'{param}' must be a JSON schema, which is an object", param=param)
    return msgspec.json.encode(value).decode()


NOTHING: Final[tuple[Any, ...]] = (False, 0, 0.0, "", [], {})
"""What most parameters are when they ask for nothing."""


def refuse(
    value: Raw | float | None,
    param: str,
    *,
    harmless: tuple[Any, ...] = NOTHING,
    instead: str = "",
) -> None:
    """Raise unless the value of an unsupported parameter leaves the answer as it is.

    `instead` says what to do, such as `use tools`.
    """
    found: Any = value
    if value is ABSENT or value is None:
        return
    if isinstance(value, Raw):
        if is_absent(value):
            return
        is_short = len(value) <= _SHORT_BYTES_MAX
        found = decode_json(_any_decoder, value, param) if is_short else value
    # `1 == True` in Python, so the type is compared as well.
    if any(type(found) is type(known) and found == known for known in (None, *harmless)):
        return
    hint = f"; {instead}" if instead else ""
    raise RequestError(f"'{param}' is not supported by this server{hint}", param=param)


# --- tools -----------------------------------------------------------------------------------

_TOOLS_MAX: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}\Z")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class _Function(msgspec.Struct, frozen=True, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True):
    type: str
    function: _Function | None = None


class _Typed(msgspec.Struct, frozen=True):
    type: str | None = None


class FlatTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of an API that tells type and function in one; its `type` each has in its own way."""

    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Named(msgspec.Struct, frozen=True):
    name: Name


class _NamedTool(msgspec.Struct, frozen=True):
    type: str
    function: _Named


class _Called(msgspec.Struct, frozen=True):
    name: Name
    arguments: str = "{}"


class _Call(msgspec.Struct, frozen=True):
    function: _Called
    id: str = ""
    type: str = "function"


_list_decoder = msgspec.json.Decoder(list[_Tool])
_typed_decoder = msgspec.json.Decoder(list[_Typed])
_choice_decoder: msgspec.json.Decoder[str | _NamedTool] = msgspec.json.Decoder(str | _NamedTool)
_calls_decoder = msgspec.json.Decoder(list[_Call])


def dropped_tools(raw: Raw, types: tuple[str | None, ...]) -> list[tuple[int, str]]:
    """Index and type of each of the tools in `raw` that is of none of `types`, and is left out.

    Agents offer what other servers run (`web_search`, `local_shell`, …) beside their functions, whatever server
    they talk to, and work without.
    """
    if is_absent(raw):
        return []
    tools = decode_json(_typed_decoder, raw, "tools")
    return [(index, str(tool.type)) for index, tool in enumerate(tools) if tool.type not in types]


def _kept(tools: list[Any], types: tuple[str | None, ...], only: str) -> list[tuple[str, Any]]:
    """The tools of these `types`, each with its place; `RequestError` if there are none but others."""
    kept = [(f"tools[{index}]", tool) for index, tool in enumerate(tools) if tool.type in types]
    if tools and not kept:
        raise RequestError(
            f"'tools[0].type' is {str(tools[0].type)[:40]!r}; only {only} supported",
            param="tools[0].type",
        )
    return kept


def tools_text(raw: Raw) -> tuple[str, frozenset[str]]:
    """The functions among the tools as JSON for the engine, empty if there are none, and their names."""
    if is_absent(raw):
        return "", frozenset()
    check_length(raw, "tools", TOOLS_CHARS_MAX)
    tools = decode_json(_list_decoder, raw, "tools")
    if len(tools) > _TOOLS_MAX:
        raise RequestError(
            f"'tools' holds {len(tools)} tools; at most {_TOOLS_MAX} are allowed", param="tools"
        )
    functions, names = [], set()
    for where, tool in _kept(tools, ("function",), "'function' is"):
        if tool.function is None:
            raise RequestError(f"'{where}.function' is missing", param=f"{where}.function")
        check_name(tool.function.name, f"{where}.function.name")
        names.add(tool.function.name)
        functions.append(tool)
    if len(names) < len(functions):
        raise RequestError("'tools' holds two functions of one name", param="tools")
    return (msgspec.json.encode(functions).decode() if functions else ""), frozenset(names)


def nested_tools(
    decoder: msgspec.json.Decoder[Any],
    raw: Raw,
    types: tuple[str | None, ...],
    only: str,
) -> Raw:
    """Flat tools in the form that a chat has; `only` says what of no other type is meant by."""
    if is_absent(raw) or len(raw) > TOOLS_CHARS_MAX:
        return raw
    nested = []
    tools: list[Any] = decode_json(decoder, raw, "tools")
    for where, tool in _kept(tools, types, only):
        if tool.name is None:
            raise RequestError(f"'{where}.name' is missing", param=f"{where}.name")
        check_name(tool.name, f"{where}.name")
        function = _Function(tool.name, tool.description, tool.parameters, tool.strict)
        nested.append(_Tool("function", function))
    return Raw(msgspec.json.encode(nested))


def tool_choice(raw: Raw, names: frozenset[str]) -> str:
    """See `GenerateRequest.tool_choice`; `names` are those of the functions there are."""
    if is_absent(raw):
        return ""
    choice = decode_json(_choice_decoder, raw, "tool_choice")
    if isinstance(choice, str):
        return chosen_mode(choice, names)
    return chosen_function(choice.function.name, names)


def chosen_mode(mode: str, names: frozenset[str]) -> str:
    """`tool_choice` for `none`, `auto` or `required`; `RequestError` for another, or without tools."""
    if mode not in ("none", "auto", "required"):
        raise RequestError(
            "'tool_choice' must be none, auto, required, or name a function", param="tool_choice"
        )
    if mode == "required" and not names:
        raise RequestError(
            "'tool_choice' requires a call, but there are no 'tools'", param="tool_choice"
        )
    # Without tools there is nothing to choose.
    return mode if names else ""


def chosen_function(name: str, names: frozenset[str]) -> str:
    """`tool_choice` for the function `name`; `RequestError` if it is not among `names`."""
    if name not in names:
        raise RequestError(
            f"'tool_choice' names the function {name!r}, which is not among the tools",
            param="tool_choice",
        )
    return TOOL_NAMED + name


def calls_text(raw: Raw, where: str) -> str:
    """The calls of an assistant's turn as JSON for the engine, empty if there are none."""
    if is_absent(raw):
        return ""
    check_length(raw, where, TOOLS_CHARS_MAX)
    calls = decode_json(_calls_decoder, raw, where)
    if len(calls) > _TOOLS_MAX:
        raise RequestError(f"'{where}' holds more than {_TOOLS_MAX} calls", param=where)
    for index, call in enumerate(calls):
        check_name(call.function.name, f"{where}[{index}].function.name")
    return msgspec.json.encode(calls).decode() if calls else ""


def check_name(name: str, where: str) -> None:
    """Raise `RequestError` unless `name`, which stands at `where`, can be a function's."""
    if not _NAME.match(name):
        raise RequestError(
            f"'{where}' must be of letters, digits, '_', '-' and '.', at most 64", param=where
        )
