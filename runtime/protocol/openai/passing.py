"""Bodies that are passed through: the little that we read of them, and the little that we change.

For models whose card says `passes_through`. What is not read here reaches the upstream, and the
client, as it was written; what was not set stays unset. Sans-IO.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw
from typing_extensions import Buffer

from ...errors import RequestError
from ..undecodable import UNDECODABLE
from .fields import FORMS
from .generate import GenerateRequest, PassedRequest
from .shaping import ABSENT, decode_json

_FORMS: Final = tuple(name for name in FORMS if name != "response_format")
_CHOICES_MAX: Final = 4096
"""Of more, as of what is no number, only the upstream can tell; and no message takes any integer."""
_SPENT: Final = {"index": 0, "delta": {}, "finish_reason": "length"}


class _Passed(msgspec.Struct, frozen=True):
    model: str | None = None
    stream: bool | None = None
    n: Any = None


class _Turn(msgspec.Struct, frozen=True):
    role: str = ""


class _Format(msgspec.Struct, frozen=True):
    type: str = ""


class _Chat(msgspec.Struct, frozen=True):
    """Of a chat, what says whether its answer can go on elsewhere."""

    messages: list[_Turn]
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    """As llama.cpp's server calls it."""
    response_format: _Format | None = None
    tool_choice: Literal["auto", "none"] | None = None


class _Prompt(msgspec.Struct, frozen=True):
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT


_passed_decoder = msgspec.json.Decoder(_Passed)
_prompt_decoder = msgspec.json.Decoder(_Prompt)
_chat_decoder = msgspec.json.Decoder(_Chat)
_members_decoder = msgspec.json.Decoder(dict[str, Raw])
_turns_decoder = msgspec.json.Decoder(list[Raw])
_usage_decoder: msgspec.json.Decoder[dict[str, Any] | None]
_usage_decoder = msgspec.json.Decoder(dict[str, Any] | None)
_count_decoder: msgspec.json.Decoder[int | None] = msgspec.json.Decoder(int | None)
_encode = msgspec.json.Encoder().encode


def decode_passed(body: Buffer) -> PassedRequest:
    """What is read of `body`; `RequestError` if it is no JSON object, or names no model by text."""
    found = decode_json(_passed_decoder, body)
    n = 1 if found.n is None else found.n
    is_known = type(n) is int and 0 < n <= _CHOICES_MAX
    return PassedRequest(found.model, found.stream, n if is_known else 0)


def prompt_of(request: GenerateRequest) -> bytes:
    """The part of a body that is computed first: equal beginnings may be cached in one place."""
    try:
        found = _prompt_decoder.decode(request.body)
    except UNDECODABLE:
        return b""
    return bytes(found.messages or found.prompt or found.input)


def with_model(body: bytes, model: str) -> bytes:
    """`body` with another model; all other members as they were written. `RequestError`."""
    members = decode_json(_members_decoder, body)
    members["model"] = Raw(_encode(model))
    return _encode(members)


def can_go_on(body: bytes) -> bool:
    """Whether a chat can be gone on with behind a part of its answer: see `with_assistant_prefix`.

    Not one of several answers, nor one in a form that would begin anew, nor one that goes on with a
    turn of the client's own; nor what we do not understand, though an upstream may.
    """
    try:
        chat, members = _chat_decoder.decode(body), _members_decoder.decode(body)
    except UNDECODABLE:
        return False
    if chat.response_format is not None and chat.response_format.type != "text":
        return False
    if any(bytes(members.get(name, ABSENT)) not in (b"", b"null") for name in _FORMS):
        return False
    has_turn = bool(chat.messages) and chat.messages[-1].role != "assistant"
    return has_turn and chat.n in (None, 1)


def with_assistant_prefix(
    body: bytes, text: str, tokens: int, extra: dict[str, Any]
) -> bytes | None:
    """A chat whose answer goes on behind `text`: the last turn is the answer so far.

    `extra` are members that say so to the upstream, such as vLLM's `continue_final_message`. The
    `tokens` that were delivered count for what the client has allowed: None if nothing is left of
    it. `RequestError` for a body of which `can_go_on` is false.
    """
    if not can_go_on(body):
        raise RequestError("this chat cannot go on behind a part of its answer")
    members = decode_json(_members_decoder, body)
    turns = decode_json(_turns_decoder, members["messages"], "messages")
    turns.append(Raw(_encode({"role": "assistant", "content": text})))
    members["messages"] = Raw(_encode(turns))
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        if name in members:
            allowed = decode_json(_count_decoder, members[name], name)
            # llama.cpp's server takes -1 for no bound.
            if allowed is not None and allowed >= 0:
                if allowed <= tokens:
                    return None
                members[name] = Raw(_encode(allowed - tokens))
    members |= {name: Raw(_encode(value)) for name, value in extra.items()}
    return _encode(members)


def continued(data: bytes, opening: bytes, delivered: int) -> bytes:
    """An event of an answer that goes on as one of the answer that the event `opening` began.

    It has the same id, and its usage counts the `delivered` tokens to the answer, not to the prompt.
    """
    event = decode_json(_members_decoder, data)
    event |= {name: told for name, told in _opened(opening).items() if name == "id"}
    usage = decode_json(_usage_decoder, event.get("usage", Raw(b"null")), "usage")
    for name, more in (("prompt_tokens", -delivered), ("completion_tokens", delivered)):
        if usage and type(usage.get(name)) is int:
            usage[name] = max(usage[name] + more, 0)
            event["usage"] = Raw(_encode(usage))
    return _encode(event)


def last_chunk(opening: bytes) -> bytes:
    """The event that ends a chat which `opening` began, and that has all tokens it may have."""
    event = _opened(opening) | {"choices": Raw(_encode([_SPENT]))}
    return b"data: " + _encode(event) + b"\n\n"


def _opened(opening: bytes) -> dict[str, Raw]:
    try:
        return _members_decoder.decode(opening.partition(b"data: ")[2])
    except UNDECODABLE:
        return {}


class Renaming:
    """Gives answers the name that the client asked for, where the upstream has another one.

    The first `"model": "…"` of a piece is replaced. Inside a JSON string the quotes would be
    escaped, so no text of the model is ever mistaken for it.
    """

    def __init__(self, theirs: str, asked: str) -> None:
        name = _encode(theirs)
        self._pattern = re.compile(rb'"model"\s*:\s*' + re.escape(name))
        self._by = b'"model":' + _encode(asked)

    def apply(self, piece: bytes) -> bytes:
        return self._pattern.sub(lambda _: self._by, piece, count=1)
