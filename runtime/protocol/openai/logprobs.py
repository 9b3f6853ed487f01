"""Log probabilities as OpenAI's two endpoints write them. Sans-IO.

A token is told by its bytes, which need not be whole characters: its text then has U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from .generate import TokenLogprob


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """One token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of all tokens of an answer, or of those of one event."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The same for `/v1/completions`: one item a token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where the token's text begins in that of the answer, in characters."""


def make_chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    """What a chat says of `tokens`."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                _text(each.token),
                each.logprob,
                list(each.token),
                [TopLogprob(_text(top), logprob, list(top)) for top, logprob in each.top],
            )
            for each in tokens
        ]
    )


class TextOffsets:
    """Where in the text of an answer its tokens begin, in characters; fed with them in order."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._chars = 0

    def push(self, token: bytes) -> int:
        """Where `token` begins: in the middle of a character, where that does."""
        offset = self._chars
        self._chars += len(self._decoder.decode(token))
        return offset


def make_completion_logprobs(
    tokens: Sequence[TokenLogprob], offsets: TextOffsets
) -> CompletionLogprobs:
    """What a completion says of `tokens`. Each is among its alternatives, however unlikely."""
    return CompletionLogprobs(
        [_text(each.token) for each in tokens],
        [each.logprob for each in tokens],
        [
            {_text(token): logprob for token, logprob in [(each.token, each.logprob), *each.top]}
            for each in tokens
        ],
        [offsets.push(each.token) for each in tokens],
    )


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
