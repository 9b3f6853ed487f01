"""Tools in a request: which functions the model may call, which it has to, and what it called.

Sans-IO. What is checked here is the form; whether a function's parameters can be a grammar, the
engine says. How an answer calls a tool is in `tool_calls.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw

from ...errors import RequestError
from .generate import TOOL_NAMED, TOOLS_CHARS_MAX
from .json_parts import decode_part
from .shaping import is_absent

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
    function: _Function


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
_choice_decoder: msgspec.json.Decoder[str | _NamedTool] = msgspec.json.Decoder(str | _NamedTool)
_calls_decoder = msgspec.json.Decoder(list[_Call])


def tools_text(raw: Raw) -> tuple[str, frozenset[str]]:
    """The tools as JSON for the engine, empty if there are none, and the functions' names."""
    if is_absent(raw):
        return "", frozenset()
    if len(raw) > TOOLS_CHARS_MAX:
        raise RequestError(f"'tools' is longer than {TOOLS_CHARS_MAX} bytes", param="tools")
    tools = decode_part(_list_decoder, raw, "tools")
    if len(tools) > _TOOLS_MAX:
        raise RequestError(
            f"'tools' holds {len(tools)} tools; at most {_TOOLS_MAX} are allowed", param="tools"
        )
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise RequestError(
                f"'{where}.type' is {tool.type[:40]!r}; only 'function' is supported",
                param=f"{where}.type",
            )
        _check_name(tool.function.name, f"{where}.function.name")
    names = frozenset(tool.function.name for tool in tools)
    if len(names) < len(tools):
        raise RequestError("'tools' holds two functions of one name", param="tools")
    return (msgspec.json.encode(tools).decode() if tools else ""), names


def tool_choice(raw: Raw, names: frozenset[str]) -> str:
    """See `GenerateRequest.tool_choice`; `names` are those of the functions there are."""
    if is_absent(raw):
        return ""
    choice = decode_part(_choice_decoder, raw, "tool_choice")
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise RequestError(
                "'tool_choice' must be none, auto, required, or name a function",
                param="tool_choice",
            )
        if choice == "required" and not names:
            raise RequestError(
                "'tool_choice' requires a call, but there are no 'tools'", param="tool_choice"
            )
        # Without tools there is nothing to choose.
        return choice if names else ""
    name = choice.function.name
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
    if len(raw) > TOOLS_CHARS_MAX:
        raise RequestError(f"'{where}' is longer than {TOOLS_CHARS_MAX} bytes", param=where)
    calls = decode_part(_calls_decoder, raw, where)
    if len(calls) > _TOOLS_MAX:
        raise RequestError(f"'{where}' holds more than {_TOOLS_MAX} calls", param=where)
    for index, call in enumerate(calls):
        _check_name(call.function.name, f"{where}[{index}].function.name")
    return msgspec.json.encode(calls).decode() if calls else ""


def _check_name(name: str, where: str) -> None:
    if not _NAME.match(name):
        raise RequestError(
            f"'{where}' must be of letters, digits, '_', '-' and '.', at most 64", param=where
        )
