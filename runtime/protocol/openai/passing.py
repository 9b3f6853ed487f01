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
from .fields import FORMS, STEERING
from .generate import GenerateRequest, PassedRequest
from .shaping import ABSENT, decode_json, is_absent

_FORMS: Final = tuple(name for name in FORMS if name != "response_format")
COMMENT: Final = b": ping\n\n"
"""The comment of an event stream, which says nothing: as the `raw` of a delta it is no part of the answer."""
_CHOICES_MAX: Final = 4096
"""Of more, as of what is no number, only the upstream can tell; and no message takes any integer."""
_ADDRESS_IN_ID: Final = "_addr_"
"""vLLM's P2pNcclConnector dials what follows `___prefill_addr_` or `___decode_addr_` in an id."""
_SPENT: Final = {"index": 0, "delta": {}, "finish_reason": "length"}


class _Passed(msgspec.Struct, frozen=True):
    model: str | None = None
    stream: bool | None = None
    n: Raw = ABSENT
    request_id: Raw = ABSENT


# Each may be null only. The type refuses it wherever it stands, so a second member of the same name
# does not hide the first from us and show it to an engine.
_nulls: Final = [(name, None, None) for name in STEERING]
_Arguments: Any = msgspec.defstruct("Arguments", _nulls, frozen=True)
_Unsteered: Any = msgspec.defstruct(
    "Unsteered",
    # vLLM hands on what these hold beside its own parameters.
    [*_nulls, ("vllm_xargs", _Arguments | None, None)],
    bases=(_Passed,),
    frozen=True,
)


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


_passed_decoder: msgspec.json.Decoder[_Passed] = msgspec.json.Decoder(_Unsteered)
_text_decoder = msgspec.json.Decoder(str)
_prompt_decoder = msgspec.json.Decoder(_Prompt)
_Formed: Any = msgspec.defstruct(
    "Formed", [(name, Raw, ABSENT) for name in _FORMS], bases=(_Chat,), frozen=True
)
_chat_decoder: msgspec.json.Decoder[_Chat] = msgspec.json.Decoder(_Formed)
_members_decoder = msgspec.json.Decoder(dict[str, Raw])
_turns_decoder = msgspec.json.Decoder(list[Raw])
_usage_decoder: msgspec.json.Decoder[dict[str, Any] | None]
_usage_decoder = msgspec.json.Decoder(dict[str, Any] | None)
_count_decoder: msgspec.json.Decoder[int | None] = msgspec.json.Decoder(int | None)
_encode = msgspec.json.Encoder().encode


def decode_passed(body: Buffer) -> PassedRequest:
    """Decode the few members of `body` that matter to a model that passes it through.

    Raises `RequestError` if it is no JSON object, names no model by text, or directs an engine's
    transfers (`fields.STEERING`).
    """
    try:
        found = decode_json(_passed_decoder, body)
    except RequestError as error:
        steering = STEERING.get((error.param or "").rpartition(".")[2])
        if steering is None:
            raise
        raise RequestError(
            f"'{error.param}' is not supported by this server; {steering.about}", param=error.param
        ) from None
    is_text = bytes(memoryview(found.request_id)[:1]) == b'"'
    if is_text and _ADDRESS_IN_ID in decode_json(_text_decoder, found.request_id, "request_id"):
        raise RequestError(
            f"'request_id' holds '{_ADDRESS_IN_ID}', by which engines find each other",
            param="request_id",
        )
    return PassedRequest(found.model, found.stream, _choices_of(found.n))


def _choices_of(n: Raw) -> int:
    """The number of choices that `n` asks for; 0 if only the upstream can tell."""
    if is_absent(n):
        return 1
    digits = bytes(n) if len(n) <= len(str(_CHOICES_MAX)) else b""
    return int(digits) if digits.isdigit() and int(digits) <= _CHOICES_MAX else 0


def harmless_id(request_id: str) -> str:
    """The id under which an upstream gets a request: it holds no address that an engine dials."""
    return request_id.replace(_ADDRESS_IN_ID, "-addr-")


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
        chat = _chat_decoder.decode(body)
    except UNDECODABLE:
        return False
    if chat.response_format is not None and chat.response_format.type != "text":
        return False
    if not all(is_absent(getattr(chat, name)) for name in _FORMS):
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
