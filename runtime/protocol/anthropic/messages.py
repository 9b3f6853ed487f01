"""The requests of `/v1/messages` and `/v1/messages/count_tokens`, and what they mean to an engine.

A message is the answer to a chat: the blocks of its turns become the turns that
`/v1/chat/completions` would have, and everything behind sees the same `GenerateRequest`. Images,
documents are refused by name, tools that a server runs itself are left out; what an earlier answer thought is
passed over, and where a cache should end is a label. As with OpenAI's requests, long parts stay
undecoded until the model is known. Answers: `answers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, Final, Literal, TypeAlias

import msgspec
from msgspec import Raw

from ...errors import RequestError
from ..openai.generate import (
    SCHEMA_CHARS_MAX,
    TOOLS_CHARS_MAX,
    ChatMessage,
    Positive,
    Role,
    SamplingDefaults,
    Task,
    Temperature,
    TopK,
    TopP,
)
from ..openai.messages import absent_content, fitting_turns
from ..openai.requests import SAMPLED, BodyRequest, drawn, stop_strings
from ..openai.shaping import (
    ABSENT,
    FlatTool,
    Format,
    Name,
    calls_text,
    check_length,
    check_name,
    chosen_function,
    chosen_mode,
    decode_json,
    formatted_decoder,
    is_absent,
    json_text,
    nested_tools,
    object_text,
    tools_text,
)

_PASSED_OVER: Final = ("thinking", "redacted_thinking")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class _Block(msgspec.Struct, frozen=True):
    """One block of a turn: which fields it has depends on its type."""

    type: str
    text: str | None = None
    id: str = ""
    name: str = ""
    input: Raw = ABSENT
    tool_use_id: str = ""
    content: str | list[_Block] | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Block] | None = None


class _Tool(FlatTool, frozen=True, kw_only=True):
    type: str | None = None
    parameters: dict[str, Any] | None = msgspec.field(name="input_schema", default=None)


class _Choice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


_messages_decoder = msgspec.json.Decoder(list[_Message])
_system_decoder: msgspec.json.Decoder[str | list[_Block]] = msgspec.json.Decoder(str | list[_Block])
_tools_decoder = msgspec.json.Decoder(list[_Tool])
_choice_decoder = msgspec.json.Decoder(_Choice)
_format_decoder = msgspec.json.Decoder(Format)
_encode = msgspec.json.Encoder().encode


class _Turned(BodyRequest, frozen=True, kw_only=True):
    messages: Raw
    system: Raw = ABSENT
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT

    kept: ClassVar[tuple[str, ...]] = ("messages", "system", "tools")
    tool_types: ClassVar[tuple[str | None, ...]] = (None, "custom")
    names: ClassVar[Mapping[str, str]] = {
        "response_format": "output_config.format",
        "continue_final_message": "messages",
        "messages": "messages",
    }

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:  # noqa: ARG002 -- as `BodyRequest` has it
        tools, names = tools_text(
            nested_tools(_tools_decoder, self.tools, self.tool_types, "tools of your own are")
        )
        choice = None
        if not is_absent(self.tool_choice):
            choice = decode_json(_choice_decoder, self.tool_choice, "tool_choice")
        messages = decode_json(_messages_decoder, self.messages, "messages")
        first = []
        if not is_absent(self.system):
            system = decode_json(_system_decoder, self.system, "system")
            first = [ChatMessage("system", _text_of(system, "system"))]
        turns = fitting_turns(
            chain(first, (turn for _, turn in _turns_of(messages))),
            len(messages),
            context_tokens_max,
            "messages",
        )
        return {
            "messages": turns,
            # An assistant's turn that stands last is the beginning of the answer.
            "continue_final_message": turns[-1].role == "assistant",
            "tools": tools,
            "tool_choice": _chosen(choice, names),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        }

    def turn_places(self) -> list[str]:
        first = [] if is_absent(self.system) else ["system"]
        messages = decode_json(_messages_decoder, self.messages, "messages")
        return [*first, *(place for place, _ in _turns_of(messages))]


class MessagesRequest(_Turned, frozen=True, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Positive
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Raw = ABSENT
    stream: bool | None = None
    output_config: Raw = ABSENT
    output_format: Raw = ABSENT

    kept: ClassVar[tuple[str, ...]] = (
        "messages",
        "system",
        "tools",
        "output_config",
        "output_format",
    )

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:
        given = [getattr(self, name, None) for name in SAMPLED]
        return {
            **super().asked(context_tokens_max, sampling),
            **drawn(given, sampling),
            "max_tokens": self.max_tokens,
            "stop": stop_strings(self.stop_sequences, "stop_sequences"),
            "json_schema": _schema_of(self.output_config, self.output_format),
        }


class CountTokensRequest(_Turned, frozen=True, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:
        return {**super().asked(context_tokens_max, sampling), "task": Task.TOKENIZE}


# --- the turns -------------------------------------------------------------------------------


_Placed: TypeAlias = tuple[str, ChatMessage]
"""A turn, and where in the body it is."""


def _turns_of(messages: Iterable[_Message]) -> Iterator[_Placed]:
    """A turn for each message, and before it one for each result of a tool that it brings."""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ("user", "assistant"):
            raise RequestError(
                f"role {message.role[:40]!r} of '{where}' is not supported; use user or assistant,"
                " and 'system' beside 'messages'",
                param=f"{where}.role",
            )
        role: Role = "user" if message.role == "user" else "assistant"
        content = message.content
        if content is None:
            content = absent_content(role, f"{where}.content")
        if isinstance(content, str):
            yield where, ChatMessage(role, content)
        elif role == "user":
            yield from _user_turns(content, where)
        else:
            yield where, _assistant_turn(content, f"{where}.content")


_Numbered: TypeAlias = list[tuple[int, _Block]]


def _user_turns(blocks: list[_Block], message: str) -> Iterator[_Placed]:
    where = f"{message}.content"
    texts: _Numbered = []
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append((index, block))
            continue
        if texts:
            yield message, ChatMessage("user", _text_in(texts, where))
            texts = []
        place = f"{where}[{index}]"
        if not block.tool_use_id:
            raise RequestError(f"'{place}.tool_use_id' is missing", param=f"{place}.tool_use_id")
        result = "" if block.content is None else block.content
        text = _text_of(result, f"{place}.content")
        yield place, ChatMessage("tool", text, tool_call_id=block.tool_use_id)
    if texts or not blocks:
        yield message, ChatMessage("user", _text_in(texts, where))


def _assistant_turn(blocks: list[_Block], where: str) -> ChatMessage:
    texts: _Numbered = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block.type == "tool_use":
            check_name(block.name, f"{where}[{index}].name")
            arguments = object_text(block.input, f"{where}[{index}].input", TOOLS_CHARS_MAX)
            called = {"name": block.name, "arguments": arguments or "{}"}
            calls.append({"function": called, "id": block.id, "type": "function"})
        else:
            texts.append((index, block))
    return ChatMessage("assistant", _text_in(texts, where), calls_text(Raw(_encode(calls)), where))


def _text_of(content: str | list[_Block], where: str) -> str:
    return content if isinstance(content, str) else _text_in([*enumerate(content)], where)


def _text_in(blocks: _Numbered, where: str) -> str:
    """The text of blocks, each of which is in `where` at its number."""
    texts = []
    for index, block in blocks:
        if block.type in _PASSED_OVER:
            continue
        place = f"{where}[{index}]"
        if block.type != "text":
            raise RequestError(
                f"a block of type {block.type[:40]!r} is not supported in '{place}'; use text,"
                " tool_use of an assistant or tool_result of a user",
                param=f"{place}.type",
            )
        if block.text is None:
            raise RequestError(f"'{place}.text' is missing", param=f"{place}.text")
        texts.append(block.text)
    return "".join(texts)


# --- what shapes the answer ------------------------------------------------------------------


def _schema_of(config: Raw, older: Raw) -> str:
    """The JSON schema that `output_config.format` asks for, or `output_format`, as it was called."""
    where, found = "output_config.format", None
    if not is_absent(config):
        found = decode_json(formatted_decoder, config, "output_config").format
    elif not is_absent(older):
        where, found = "output_format", decode_json(_format_decoder, older, "output_format")
    if found is None:
        return ""
    if found.type != "json_schema" or is_absent(found.schema):
        raise RequestError(f"'{where}' must be a 'json_schema' with its 'schema'", param=where)
    check_length(found.schema, where, SCHEMA_CHARS_MAX, "characters")
    return json_text(found.schema, f"{where}.schema")


def _chosen(choice: _Choice | None, names: frozenset[str]) -> str:
    if choice is None:
        return ""
    if choice.type != "tool":
        return chosen_mode(_CHOICES[choice.type], names)
    if choice.name is None:
        raise RequestError("'tool_choice.name' is missing", param="tool_choice.name")
    return chosen_function(choice.name, names)
