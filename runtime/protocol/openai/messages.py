"""The messages of a chat, and the turns that they are to an engine.

`turns_of` decodes the `messages` of `/v1/chat/completions` into `ChatMessage`s; the other APIs make turns of
their own items and have them measured by `fitting_turns`. The rest of a request is `requests.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw

from ...errors import ContextLengthError, RequestError
from .generate import TOKEN_CHARS_MAX, ChatMessage, Role
from .shaping import ABSENT, calls_text, decode_json, refuse

ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content: `text`, or an assistant's `refusal`."""

    type: str
    text: str | None = None
    refusal: str | None = None


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
    messages = decode_json(_messages_decoder, raw, "messages")
    turns = (_turn(i, message) for i, message in enumerate(messages))
    return fitting_turns(turns, len(messages), context_tokens_max, "messages")


def fitting_turns(
    made: Iterable[ChatMessage], count: int, context_tokens_max: int, param: str
) -> list[ChatMessage]:
    """The turns that are `made` of `count` things in `param`.

    Raises `RequestError` if there are none, or too many for the context.
    """
    if count > context_tokens_max:
        raise ContextLengthError.of(context_tokens_max, f"{count} messages", param)
    turns = list(made)
    if not turns:
        raise RequestError(f"'{param}' must hold at least one message", param=param)
    chars = sum(len(turn.content) + len(turn.tool_calls) for turn in turns)
    check_chars(chars, context_tokens_max, param)
    return turns


def check_chars(chars: int, context_tokens_max: int, param: str) -> None:
    """Raise unless the text may fit the context: how many tokens it has, only the engine knows."""
    if chars > context_tokens_max * TOKEN_CHARS_MAX:
        raise ContextLengthError.of(context_tokens_max, f"{chars} characters", param)


def _turn(index: int, message: RequestMessage) -> ChatMessage:
    where = f"messages[{index}]"
    role = ROLES.get(message.role)
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
    if content is None:
        content = absent_content(role, f"{where}.content")
    if not isinstance(content, str):
        content = "".join(_text(where, i, part) for i, part in enumerate(content))
    if role == "tool":
        return ChatMessage(
            role, content, tool_call_id=message.tool_call_id or "", name=message.name or ""
        )
    return ChatMessage(role, content, calls)


def absent_content(role: Role, param: str) -> str:
    """The content of a turn that has none; `RequestError` for a role that must have some.

    An answer that was cut while the model reasoned has neither content nor calls, and a function that returns
    nothing has no output. Clients send both back as history, with null.
    """
    if role not in ("assistant", "tool"):
        raise RequestError(f"'{param}' is missing", param=param)
    return ""


def _text(where: str, index: int, part: ContentPart) -> str:
    param = f"{where}.content[{index}]"
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type != "text":
        raise RequestError(
            f"content of type {part.type[:40]!r} is not supported; only 'text' is",
            param=f"{param}.type",
        )
    if part.text is None:
        raise RequestError(f"'{param}.text' is missing", param=f"{param}.text")
    return part.text
