"""How the engines that need no vocabulary make tokens of a prompt; without numpy, so anybody can.

A frontend makes them to know which blocks a prompt consists of, the engine to compute it. Neither
sends the text twice: `GenerateRequest.token_ids` are taken as they are.

`bytes/exact`: tokens are bytes (0 to 255) and the specials in `Special`. A chat is `START`, then for
each message its role, its bytes and `END`, then `ASSISTANT`; a prompt is `START` and its bytes.
`bytes/mocker`: a start token, then the bytes of the prompt, or of the chat with its roles in it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

from ..errors import ContextLengthError, RequestError
from ..protocol.openai.generate import GenerateRequest

Tokenizer = Callable[[GenerateRequest, int], list[int]]
"""From a checked request and the model's longest context, in tokens, to the prompt's tokens, those
that were delivered left out. Raises `RequestError` if the prompt is too long or has bad token ids."""

BYTES_EXACT: Final = "bytes/exact"
BYTES_MOCKER: Final = "bytes/mocker"
START: Final = 256
"""The mocker's token that every prompt begins with."""


class Special(IntEnum):
    """Tokens of `exact` beyond the 256 bytes; none is ever generated."""

    START = 256
    SYSTEM = 257
    USER = 258
    ASSISTANT = 259
    END = 260


VOCABULARY = 256 + len(Special)
_ROLES = {"system": Special.SYSTEM, "user": Special.USER, "assistant": Special.ASSISTANT}


def tokenizer_of(name: str) -> Tokenizer | None:
    """The tokenizer that `EngineInfo.tokenizer` names; None if only the engine has it."""
    return {BYTES_EXACT: encode_exact, BYTES_MOCKER: encode_mocker}.get(name)


def check_prompt_fits(
    prompt_tokens: int, context_tokens_max: int, request: GenerateRequest | None = None
) -> None:
    """Raise `ContextLengthError` unless the prompt leaves room for at least one generated token.

    Its parameter is that of `request`, if it is known.
    """
    if prompt_tokens == 0:
        raise RequestError("the prompt is empty", param="prompt")
    if prompt_tokens >= context_tokens_max:
        param = "prompt" if request is None or request.messages is None else "messages"
        raise ContextLengthError.of(context_tokens_max, f"{prompt_tokens} tokens", param)


def encode_exact(request: GenerateRequest, context_tokens_max: int) -> list[int]:
    """The tokens of a prompt for `exact`; see `Tokenizer`."""
    if request.token_ids is not None:
        return _checked(request.token_ids, VOCABULARY)
    messages = request.messages
    contents = [request.prompt or ""] if messages is None else [m.content for m in messages]
    texts = [content.encode("utf-8", "replace") for content in contents]
    # Before there is a list of them: the text may be many megabytes.
    check_prompt_fits(sum(map(len, texts)) + 1, context_tokens_max, request)
    if messages is None:
        return [Special.START, *texts[0]]
    token_ids = [int(Special.START)]
    for message, text in zip(messages, texts, strict=True):
        token_ids += [_ROLES[message.role], *text, Special.END]
    token_ids.append(Special.ASSISTANT)
    return token_ids


def encode_mocker(request: GenerateRequest, context_tokens_max: int) -> list[int]:
    """The tokens of a prompt for the mocker; see `Tokenizer`."""
    if request.token_ids is not None:
        return _checked(request.token_ids, START + 1)
    if request.messages is None:
        text = (request.prompt or "").encode("utf-8", "replace")
    else:
        turns = (f"<{each.role}>{each.content}" for each in request.messages)
        text = "".join(turns).encode("utf-8", "replace")
    check_prompt_fits(len(text) + 1, context_tokens_max, request)
    return [START, *text]


def _checked(token_ids: list[int], vocabulary: int) -> list[int]:
    if not all(0 <= token_id < vocabulary for token_id in token_ids):
        raise RequestError(f"every token id must be from 0 to {vocabulary - 1}", param="prompt")
    return list(token_ids)
