"""The requests of `/v1/messages` and `/v1/messages/count_tokens`, and what they mean to an engine.

A message is the answer to a chat: the blocks of its turns become the turns that
`/v1/chat/completions` would have, and everything behind sees the same `GenerateRequest`. Images,
documents and tools that a server runs itself are refused by name; what an earlier answer thought is
passed over, and where a cache should end is a label. As with OpenAI's requests, long parts stay
undecoded until the model is known. Answers: `answers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, ClassVar, Final, Literal

import msgspec
from msgspec import Raw

from ...errors import RequestError
from ..openai.fields import COUNT_FIELDS, MESSAGES_FIELDS, BodyDecoder
from ..openai.generate import (
    SCHEMA_CHARS_MAX,
    TOOLS_CHARS_MAX,
    ChatMessage,
    GenerateRequest,
    Positive,
    SamplingDefaults,
    Task,
    Temperature,
    TopK,
    TopP,
)
from ..openai.requests import (
    CONTEXT_TOKENS_MAX,
    NO_DEFAULTS,
    SharedRequest,
    fitting_turns,
    sampling_of,
    stop_strings,
)
from ..openai.shaping import (
    ABSENT,
    Name,
    calls_text,
    check_name,
    decode_part,
    is_absent,
    json_text,
    tool_choice,
    tools_text,
)

_PASSED_OVER: Final = ("thinking", "redacted_thinking")
_CALLED: Final = {"response_format": "output_config.format", "continue_final_message": "messages"}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class _Block(msgspec.Struct, frozen=True):
    """One block of a turn: which fields it has depends on its type."""

    type: str
    text: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[_Block] | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct, frozen=True):
    type: str | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Choice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(msgspec.Struct, frozen=True):
    type: str
    schema: Raw = ABSENT


class _OutputConfig(msgspec.Struct, frozen=True):
    format: _Format | None = None


_messages_decoder = msgspec.json.Decoder(list[_Message])
_system_decoder: msgspec.json.Decoder[str | list[_Block]] = msgspec.json.Decoder(str | list[_Block])
_tools_decoder = msgspec.json.Decoder(list[_Tool])
_choice_decoder = msgspec.json.Decoder(_Choice)
_config_decoder = msgspec.json.Decoder(_OutputConfig)
_format_decoder = msgspec.json.Decoder(_Format)
_encode = msgspec.json.Encoder().encode


class _Turned(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a prompt."""

    model: str | None = None
    messages: Raw
    system: Raw = ABSENT
    tools: Raw = ABSENT
    tool_choice: Raw = ABSENT

    choices_each: ClassVar = 1

    @property
    def content_bytes(self) -> int:
        """The part of the body that a request keeps."""
        return len(self.messages) + len(self.system) + len(self.tools)

    def called(self, param: str) -> str:
        """How the client calls what an engine refuses as `param`."""
        return _CALLED.get(param, param)

    def _asked(self, model: str, context_tokens_max: int) -> dict[str, Any]:
        """The arguments of `GenerateRequest` that make a prompt."""
        tools, names = tools_text(_nested_tools(self.tools))
        choice = None
        if not is_absent(self.tool_choice):
            choice = decode_part(_choice_decoder, self.tool_choice, "tool_choice")
        messages = decode_part(_messages_decoder, self.messages, "messages")
        turns = fitting_turns(
            chain(_system_turns(self.system), _turns_of(messages)),
            len(messages),
            context_tokens_max,
            "messages",
        )
        return {
            "model": model,
            "messages": turns,
            # An assistant's turn that stands last is the beginning of the answer.
            "continue_final_message": turns[-1].role == "assistant",
            "tools": tools,
            "tool_choice": tool_choice(_nested_choice(choice), names),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        }


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

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def content_bytes(self) -> int:
        return super().content_bytes + len(self.output_config) + len(self.output_format)

    def to_generate(
        self,
        model: str,
        context_tokens_max: int = CONTEXT_TOKENS_MAX,
        sampling: SamplingDefaults = NO_DEFAULTS,
    ) -> GenerateRequest:
        """What the engine of `model` is asked; raises `RequestError` naming the parameter."""
        shared = SharedRequest(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        more = sampling_of(shared, sampling)
        more["stop"] = stop_strings(self.stop_sequences, "stop_sequences")
        more["json_schema"] = _schema_of(self.output_config, self.output_format)
        return GenerateRequest(
            max_tokens=self.max_tokens, **self._asked(model, context_tokens_max), **more
        )


class CountTokensRequest(_Turned, frozen=True, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    is_streamed: ClassVar = False

    def to_generate(
        self,
        model: str,
        context_tokens_max: int = CONTEXT_TOKENS_MAX,
        _: SamplingDefaults = NO_DEFAULTS,
    ) -> GenerateRequest:
        """As `MessagesRequest.to_generate`."""
        return GenerateRequest(task=Task.TOKENIZE, **self._asked(model, context_tokens_max))


decode_messages_request: Final = BodyDecoder(MessagesRequest, MESSAGES_FIELDS).decode
decode_count_request: Final = BodyDecoder(CountTokensRequest, COUNT_FIELDS).decode


# --- the turns -------------------------------------------------------------------------------


def _system_turns(raw: Raw) -> list[ChatMessage]:
    if is_absent(raw):
        return []
    given = decode_part(_system_decoder, raw, "system")
    return [ChatMessage("system", _text_of(given, "system"))]


def _turns_of(messages: Iterable[_Message]) -> Iterator[ChatMessage]:
    """A turn for each message, and before it one for each result of a tool that it brings."""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ("user", "assistant"):
            raise RequestError(
                f"role {message.role[:40]!r} of '{where}' is not supported; use user or assistant,"
                " and 'system' beside 'messages'",
                param=f"{where}.role",
            )
        if isinstance(message.content, str):
            yield ChatMessage("user" if message.role == "user" else "assistant", message.content)
        elif message.role == "user":
            yield from _user_turns(message.content, f"{where}.content")
        else:
            yield _assistant_turn(message.content, f"{where}.content")


def _user_turns(blocks: list[_Block], where: str) -> Iterator[ChatMessage]:
    texts: list[_Block] = []
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield ChatMessage("user", _text_of(texts, where))
            texts = []
        result = "" if block.content is None else block.content
        text = _text_of(result, f"{where}[{index}].content")
        yield ChatMessage("tool", text, tool_call_id=block.tool_use_id)
    if texts or not blocks:
        yield ChatMessage("user", _text_of(texts, where))


def _assistant_turn(blocks: list[_Block], where: str) -> ChatMessage:
    texts: list[_Block] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block.type == "tool_use":
            check_name(block.name, f"{where}[{index}].name")
            called = {"name": block.name, "arguments": _encode(block.input).decode()}
            calls.append({"function": called, "id": block.id, "type": "function"})
        else:
            texts.append(block)
    return ChatMessage("assistant", _text_of(texts, where), calls_text(Raw(_encode(calls)), where))


def _text_of(content: str | list[_Block], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if block.type in _PASSED_OVER:
            continue
        if block.type != "text" or block.text is None:
            raise RequestError(
                f"a block of type {block.type[:40]!r} is not supported in '{where}'; use text,"
                " tool_use of an assistant or tool_result of a user",
                param=where,
            )
        texts.append(block.text)
    return "".join(texts)


# --- what shapes the answer ------------------------------------------------------------------


def _schema_of(config: Raw, older: Raw) -> str:
    """The JSON schema that `output_config.format` asks for, or `output_format`, as it was called."""
    where, found = "output_config.format", None
    if not is_absent(config):
        found = decode_part(_config_decoder, config, "output_config").format
    elif not is_absent(older):
        where, found = "output_format", decode_part(_format_decoder, older, "output_format")
    if found is None:
        return ""
    if found.type != "json_schema" or is_absent(found.schema):
        raise RequestError(f"'{where}' must be a 'json_schema' with its 'schema'", param=where)
    if len(found.schema) > SCHEMA_CHARS_MAX:
        raise RequestError(f"'{where}' is longer than {SCHEMA_CHARS_MAX} characters", param=where)
    return json_text(found.schema, f"{where}.schema")


def _nested_tools(raw: Raw) -> Raw:
    """The tools in the form that OpenAI's chats have."""
    if is_absent(raw) or len(raw) > TOOLS_CHARS_MAX:
        return raw
    nested = []
    tools = decode_part(_tools_decoder, raw, "tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise RequestError(
                f"'{where}.type' is {tool.type[:40]!r}; only tools of your own are supported",
                param=f"{where}.type",
            )
        if tool.name is None:
            raise RequestError(f"'{where}.name' is missing", param=f"{where}.name")
        check_name(tool.name, f"{where}.name")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.input_schema is not None:
            function["parameters"] = tool.input_schema
        if tool.strict is not None:
            function["strict"] = tool.strict
        nested.append({"type": "function", "function": function})
    return Raw(_encode(nested))


def _nested_choice(choice: _Choice | None) -> Raw:
    """`tool_choice` in the form that OpenAI's chats have."""
    if choice is None:
        return ABSENT
    if choice.type != "tool":
        return Raw(_encode(_CHOICES[choice.type]))
    if choice.name is None:
        raise RequestError("'tool_choice.name' is missing", param="tool_choice.name")
    return Raw(_encode({"type": "function", "function": {"name": choice.name}}))
