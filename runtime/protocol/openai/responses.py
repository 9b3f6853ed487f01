"""The requests of `/v1/responses`, and what they mean to an engine.

A response is the answer to a chat: its items become the turns that `/v1/chat/completions` would
have, and everything behind sees the same `GenerateRequest`. Nothing is stored here, so what refers to
an earlier response is refused by name; tools that a server runs itself are left out. As in
`requests.py`, long parts stay undecoded until the model is known. Answers: `responses_answer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, Final

import msgspec
from msgspec import Raw

from ...errors import RequestError
from .generate import (
    SCHEMA_CHARS_MAX,
    TOOL_NAMED,
    ChatMessage,
    GenerateRequest,
    Positive,
    Role,
    SamplingDefaults,
    TopLogprobs,
)
from .messages import ROLES, absent_content, fitting_turns
from .requests import SampledRequest
from .shaping import (
    ABSENT,
    FlatTool,
    Name,
    calls_text,
    check_length,
    check_name,
    chosen_function,
    chosen_mode,
    decode_json,
    formatted_decoder,
    is_absent,
    nested_tools,
    schema_of_type,
    tools_text,
)

LOGPROBS_INCLUDED: Final = "message.output_text.logprobs"
_METADATA_BYTES_MAX: Final = 1 << 14
_INCLUDE_BYTES_MAX: Final = 1 << 12
_TEXT_PARTS: Final = ("input_text", "output_text", "text")


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct, frozen=True):
    """One item of the input: which fields it has depends on its type."""

    type: str = "message"
    role: str = ""
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[_Part] | None = None


class _Tool(FlatTool, frozen=True, kw_only=True):
    type: str


class _Told(msgspec.Struct, frozen=True):
    """A function as an engine is told of it."""

    function: dict[str, Raw]


class _Choice(msgspec.Struct, frozen=True):
    type: str
    name: Name | None = None


_input_decoder: msgspec.json.Decoder[str | list[_Item]] = msgspec.json.Decoder(str | list[_Item])
_tools_decoder = msgspec.json.Decoder(list[_Tool])
_choice_decoder: msgspec.json.Decoder[str | _Choice] = msgspec.json.Decoder(str | _Choice)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])
_told_decoder = msgspec.json.Decoder(list[_Told])
_object_decoder = msgspec.json.Decoder(dict[str, Any])
_include_decoder = msgspec.json.Decoder(list[str])
_encode = msgspec.json.Encoder().encode


class ResponsesRequest(SampledRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/responses`."""

    input: Raw
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    text: Raw = ABSENT
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    top_logprobs: TopLogprobs | None = None
    include: Raw = ABSENT
    metadata: Raw = ABSENT

    kept: ClassVar[tuple[str, ...]] = ("input", "instructions", "tools", "text")
    names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "response_format": "text.format",
        "logprobs": "include",
    }

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:
        tools, names = tools_text(
            nested_tools(_tools_decoder, self.tools, ("function",), "'function' is")
        )
        return dict(
            messages=_turns(self.instructions, self.input, context_tokens_max),
            max_tokens=self._tokens_max("max_output_tokens", sampling.max_tokens),
            logprobs=self._logprobs(),
            tools=tools,
            tool_choice=_chosen(self.tool_choice, names),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            **self.sampled(sampling),
            json_schema=_schema_of(self.text),
        )

    def turn_places(self) -> list[str]:
        first = [] if self.instructions is None else ["instructions"]
        given = decode_json(_input_decoder, self.input, "input")
        if isinstance(given, str):
            return [*first, "input"]
        return [*first, *(place for place, _ in _turns_of(given))]

    def _logprobs(self) -> int | None:
        """Of how many alternatives log probabilities are told; None: of none, nor of the tokens."""
        wanted: list[str] = []
        if not is_absent(self.include):
            check_length(self.include, "include", _INCLUDE_BYTES_MAX)
            wanted = decode_json(_include_decoder, self.include, "include")
        is_wanted = bool(self.top_logprobs) or LOGPROBS_INCLUDED in wanted
        return (self.top_logprobs or 0) if is_wanted else None

    def echo(self, generate: GenerateRequest) -> dict[str, Any]:
        """What the answer repeats of the request, of which the engine is asked `generate`.

        What can be nested is JSON already: as deep as it may be to be read, it could be too deep where
        it is written.
        """
        choice = generate.tool_choice or "auto"
        named = choice.removeprefix(TOOL_NAMED)
        tools = _told_decoder.decode(generate.tools.encode()) if generate.tools else []
        text = {} if is_absent(self.text) else decode_json(_object_decoder, self.text, "text")
        metadata: dict[str, str] = {}
        if not is_absent(self.metadata):
            check_length(self.metadata, "metadata", _METADATA_BYTES_MAX)
            metadata = decode_json(_metadata_decoder, self.metadata, "metadata")
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": metadata,
            "parallel_tool_calls": generate.parallel_tool_calls,
            "temperature": generate.temperature,
            "text": {"format": {"type": "text"}}
            | {name: Raw(_encode(value)) for name, value in text.items()},
            "tool_choice": choice if named == choice else {"type": "function", "name": named},
            "tools": [{"type": "function"} | tool.function for tool in tools],
            "top_logprobs": generate.logprobs or 0,
            "top_p": generate.top_p,
        }


# --- the turns -------------------------------------------------------------------------------


def _turns(instructions: str | None, raw: Raw, context_tokens_max: int) -> list[ChatMessage]:
    given = decode_json(_input_decoder, raw, "input")
    if isinstance(given, str):
        given = [_Item(role="user", content=given)]
    if not given:
        raise RequestError("'input' must hold at least one item", param="input")
    first = [] if instructions is None else [ChatMessage("system", instructions)]
    turns = chain(first, (turn for _, turn in _turns_of(given)))
    return fitting_turns(turns, len(given), context_tokens_max, "input")


def _turns_of(items: list[_Item]) -> Iterator[tuple[str, ChatMessage]]:
    """A turn for each message and each tool's answer, and its place; an assistant's calls belong to what it said."""
    said: str | None = None
    said_at = ""
    calls: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "reasoning":
            # What an earlier answer thought is nothing that the next one is told.
            continue
        if item.type == "function_call":
            check_name(item.name, f"{where}.name")
            called = {"name": item.name, "arguments": item.arguments}
            said_at = said_at if calls else where
            calls.append({"function": called, "id": item.call_id, "type": "function"})
            continue
        if said is not None or calls:
            yield said_at, _assistant(said, calls)
            said, calls = None, []
        if item.type == "function_call_output":
            if not item.call_id:
                raise RequestError(f"'{where}.call_id' is missing", param=f"{where}.call_id")
            output = _content(item.output, "tool", f"{where}.output")
            yield where, ChatMessage("tool", output, tool_call_id=item.call_id)
        elif item.type == "message":
            role = _role(item.role, where)
            content = _content(item.content, role, f"{where}.content")
            if role == "assistant":
                said, said_at = content, where
            else:
                yield where, ChatMessage(role, content)
        else:
            raise RequestError(
                f"an item of type {item.type[:40]!r} is not supported; use message, function_call,"
                " function_call_output or reasoning",
                param=f"{where}.type",
            )
    if said is not None or calls:
        yield said_at, _assistant(said, calls)


def _role(said: str, where: str) -> Role:
    if not said:
        raise RequestError(f"'{where}.role' is missing", param=f"{where}.role")
    role = ROLES.get(said) if said != "tool" else None
    if role is None:
        raise RequestError(
            f"role {said[:40]!r} of '{where}' is not supported;"
            " use system, developer, user or assistant",
            param=f"{where}.role",
        )
    return role


def _assistant(said: str | None, calls: list[dict[str, Any]]) -> ChatMessage:
    return ChatMessage("assistant", said or "", calls_text(Raw(_encode(calls)), "input"))


def _content(content: str | list[_Part] | None, role: Role, where: str) -> str:
    if content is None:
        return absent_content(role, where)
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
            continue
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"content of type {part.type[:40]!r} is not supported; only text is",
                param=f"{where}[{index}].type",
            )
        if part.text is None:
            missing = f"{where}[{index}].text"
            raise RequestError(f"'{missing}' is missing", param=missing)
        texts.append(part.text)
    return "".join(texts)


# --- what shapes the answer ------------------------------------------------------------------


def _schema_of(raw: Raw) -> str:
    if is_absent(raw):
        return ""
    check_length(raw, "text", 2 * SCHEMA_CHARS_MAX)
    found = decode_json(formatted_decoder, raw, "text").format
    if found is None:
        return ""
    where = "text.format.schema"
    if found.type == "json_schema":
        check_length(found.schema, where, SCHEMA_CHARS_MAX, "characters")
    return schema_of_type(found.type, found.schema, "text.format", where)


def _chosen(raw: Raw, names: frozenset[str]) -> str:
    if is_absent(raw):
        return ""
    choice = decode_json(_choice_decoder, raw, "tool_choice")
    if isinstance(choice, str):
        return chosen_mode(choice, names)
    if choice.type != "function" or choice.name is None:
        raise RequestError(
            f"'tool_choice' of type {choice.type[:40]!r} is not supported; use none, auto, required,"
            " or name a function",
            param="tool_choice",
        )
    return chosen_function(choice.name, names)
