"""The messages of a chat as clients send them, and the turns that they are to an engine. Sans-IO."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from ...errors import RequestError
from .generate import TOKEN_CHARS_MAX, ChatMessage
from .json_parts import decode_part
from .shaping import ABSENT, refuse
from .tools import calls_text

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only `text` parts are supported."""

    type: str
    text: str | None = None


class RequestMessage(msgspec.Struct, frozen=True):
    """One turn as the client sends it."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Raw = ABSENT
    function_call: Raw = ABSENT
    tool_call_id: str | None = None
    name: str | None = None


_messages_decoder = msgspec.json.Decoder(list[RequestMessage])


def turns_of(raw: Raw, context_tokens_max: int) -> list[ChatMessage]:
    """The turns of a chat; raises `RequestError` if they cannot fit the context."""
    messages = decode_part(_messages_decoder, raw, "messages")
    if not messages:
        raise RequestError("'messages' must hold at least one message", param="messages")
    if len(messages) > context_tokens_max:
        raise RequestError(
            f"'messages' holds {len(messages)} messages; the model's context holds"
            f" {context_tokens_max} tokens",
            param="messages",
        )
    turns = [_turn(i, message) for i, message in enumerate(messages)]
    chars = sum(len(turn.content) + len(turn.tool_calls) for turn in turns)
    check_chars(chars, context_tokens_max, "messages")
    return turns


def check_chars(chars: int, context_tokens_max: int, param: str) -> None:
    """Raise unless the text may fit the context: how many tokens it has, only the engine knows."""
    if chars > context_tokens_max * TOKEN_CHARS_MAX:
        raise RequestError(
            f"'{param}' holds {chars} characters, but the model's context holds"
            f" {context_tokens_max} tokens; shorten it",
            param=param,
        )


def _turn(index: int, message: RequestMessage) -> ChatMessage:
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"role {message.role[:40]!r} of '{where}' is not supported; "
            "use system, developer, user, assistant or tool",
            param=f"{where}.role",
        )
    refuse(message.function_call, f"{where}.function_call")
    calls = calls_text(message.tool_calls, f"{where}.tool_calls")
    if calls and role != "assistant":
        raise RequestError(
            f"'{where}' has 'tool_calls', which only an assistant has", param=f"{where}.tool_calls"
        )
    content = message.content
    if content is None and calls:
        content = ""
    if content is None:
        raise RequestError(f"'{where}.content' is missing", param=f"{where}.content")
    if not isinstance(content, str):
        content = "".join(_text(where, i, part) for i, part in enumerate(content))
    if role == "tool":
        return ChatMessage(
            role, content, tool_call_id=message.tool_call_id or "", name=message.name or ""
        )
    return ChatMessage(role, content, calls)


def _text(where: str, index: int, part: ContentPart) -> str:
    param = f"{where}.content[{index}]"
    if part.type != "text":
        raise RequestError(
            f"content of type {part.type[:40]!r} is not supported; only 'text' is", param=param
        )
    if part.text is None:
        raise RequestError(f"'{param}.text' is missing", param=f"{param}.text")
    return part.text
