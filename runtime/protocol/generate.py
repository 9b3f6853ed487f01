"""What the frontend asks a worker to generate, and what comes back: the payloads of one model.

Encoded as MessagePack by the runtime. `Delta` is an array on the wire, because there is one per
token.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = ["ChatMessage", "Delta", "FinishReason", "GenerateRequest", "ModelCard"]


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
    None draws one. `stop` holds at most 32 strings; none of them appears in the text.
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


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step added to one answer.

    `token_ids` are all tokens generated since the last delta, also those whose text is held back
    (an incomplete character, the possible start of a stop string), so their lengths add up to the
    completion tokens. `prompt_tokens` is set on the first delta only.
    """

    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker publishes under `models/…` so that frontends offer the model."""

    name: str
    endpoint: str
    """`namespace/component/endpoint` that takes a `GenerateRequest` and streams `Delta`s."""
    chat: bool = True
    completions: bool = True
    context_tokens_max: int = 0
    engine: str = ""
    created: int = 0
    """Unix seconds."""
