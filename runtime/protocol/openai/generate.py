"""What the frontend asks a worker to generate, and what comes back: the payloads of one model.

Encoded as MessagePack by the runtime. `Delta` is an array on the wire, because there is one per
token.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Final

import msgspec

from ...errors import RequestError

__all__ = [
    "ALIASES_MAX",
    "STOP_CHARS_MAX",
    "STOP_STRINGS_MAX",
    "TOKEN_CHARS_MAX",
    "ChatMessage",
    "Delta",
    "FinishReason",
    "GenerateRequest",
    "ModelCard",
    "bounded_request_type",
    "payload_bytes_max_for",
]

ALIASES_MAX: Final = 32
"""Of one worker for one model."""
STOP_STRINGS_MAX: Final = 32
STOP_CHARS_MAX: Final = 4096
"""Of one stop string; the text that can be held back is as long."""
TOKEN_CHARS_MAX: Final = 256
"""No token stands for more characters: the longest of known vocabularies are 128 spaces. So a text
of more characters than a context has room for is refused before anybody makes tokens of it."""
_UTF8_BYTES_MAX: Final = 4
_TOKEN_ID_BYTES_MAX: Final = 5
_OTHER_FIELDS_BYTES: Final = 1 << 16

# What no answer has more of; a worker that tells other numbers breaks the protocol.
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

# Of an alias: what a client may ask for, and a line of a table shows.
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class FinishReason(enum.StrEnum):
    """Why generation ended; the last delta of a complete answer carries one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    """The caller asked to stop early, and this is the partial answer."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `messages`, `prompt` and `token_ids` is set.

    `max_tokens` None means up to the model's context length. `temperature` 0 is greedy; `seed`
    None draws one. `stop` holds at most `STOP_STRINGS_MAX` strings; none of them appears in the text.

    `delivered_ids` are the tokens of this answer that the client has already, made by another
    engine of this model: it goes on behind them as if it had never stopped. Only an engine that
    says `can_resume` may be given any. All other fields are those of the first request, the seed
    that was drawn included; the deltas tell of new tokens alone.
    """

    model: str
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    delivered_ids: list[int] = []

    @property
    def turns(self) -> list[ChatMessage]:
        """The conversation; a prompt is one turn of the user.

        Raises `RequestError` for a prompt of token ids.
        """
        if self.messages is not None:
            return self.messages
        if self.prompt is None:
            raise RequestError(
                "this model has no vocabulary; send messages or a prompt, no token ids",
                param="token_ids",
            )
        return [ChatMessage("user", self.prompt)]

    @property
    def text(self) -> str:
        """What to answer: what the user said last, or the prompt.

        Raises `RequestError` for a prompt of token ids.
        """
        turns = self.turns
        asked = (turn.content for turn in reversed(turns) if turn.role == "user")
        return next(asked, turns[-1].content if turns else "")


def bounded_request_type(context_tokens_max: int) -> type[GenerateRequest]:
    """`GenerateRequest` for a model of that context: one that decodes cannot be much too long.

    Lists are measured before they are made, so that a request of a million token ids costs its
    bytes and no more.
    """
    count = msgspec.Meta(max_length=context_tokens_max)
    text: Any = Annotated[str, msgspec.Meta(max_length=context_tokens_max * TOKEN_CHARS_MAX)]
    tokens: Any = Annotated[list[int], count]
    turns: Any = Annotated[list[ChatMessage], count]
    stops: Any = Annotated[list[str], msgspec.Meta(max_length=STOP_STRINGS_MAX)]
    bounded: Any = msgspec.defstruct(
        "BoundedRequest",
        [
            ("messages", turns | None, None),
            ("prompt", text | None, None),
            ("token_ids", tokens | None, None),
            ("delivered_ids", tokens, []),
            ("stop", stops, []),
        ],
        bases=(GenerateRequest,),
        frozen=True,
        kw_only=True,
        omit_defaults=True,
    )
    made: type[GenerateRequest] = bounded
    return made


def payload_bytes_max_for(context_tokens_max: int) -> int:
    """How long an encoded `GenerateRequest` that such a model can take is at most."""
    stops = STOP_STRINGS_MAX * STOP_CHARS_MAX
    text_bytes = (context_tokens_max * TOKEN_CHARS_MAX + stops) * _UTF8_BYTES_MAX
    return text_bytes + context_tokens_max * _TOKEN_ID_BYTES_MAX + _OTHER_FIELDS_BYTES


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step added to one answer.

    `token_ids` are all tokens generated since the last delta, also those whose text is held back
    (an incomplete character, the possible start of a stop string), so their lengths add up to the
    completion tokens. `prompt_tokens` is set on the first delta only.
    """

    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    prompt_tokens: TokenCount = 0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker publishes under `models/…` so that frontends offer the model."""

    name: str
    endpoint: str
    """`namespace/component/endpoint` that takes a `GenerateRequest` and streams `Delta`s."""
    chat: bool = True
    completions: bool = True
    context_tokens_max: int = 0
    engine: str = ""
    fingerprint: str = ""
    """Of what computes the answers: workers of one model whose fingerprints differ disagree."""
    block_tokens: int = 0
    """Of one KV block; 0 where the engine keeps none."""
    tokenizer: str = ""
    """How a frontend can make the prompt's tokens itself (`engines/prompts.py`); empty: it cannot."""
    created: int = 0
    """Unix seconds."""
    can_resume: bool = False
    """Whether its workers take `delivered_ids`, so that an answer may move to another one."""
    aliases: Annotated[list[ModelName], msgspec.Meta(max_length=ALIASES_MAX)] = []
    """Other names that clients may ask for; workers of one model may differ in them."""
