"""What is asked of a model's vocabulary: tokens of a text, the text of tokens, embeddings. Sans-IO.

`/tokenize` and `/detokenize` are vLLM's, `/v1/embeddings` is OpenAI's. Each is a `GenerateRequest` with
a task, whose answer is one delta and never a stream.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Self

import msgspec
from msgspec import Raw

from ...errors import LocalProtocolError, RequestError
from .answers import Usage
from .generate import Delta, GenerateRequest, SamplingDefaults, Task
from .messages import turns_of
from .requests import (
    BodyRequest,
    all_prompts,
    first_prompt,
    one_prompt,
)
from .shaping import ABSENT, is_absent, tools_text

_encode = msgspec.json.Encoder().encode
_FLOAT_BYTES: Final = 4


class TokenizeRequest(BodyRequest, frozen=True, kw_only=True):
    """The body of `POST /tokenize`: of a prompt, or of a chat."""

    prompt: Raw = ABSENT
    messages: Raw = ABSENT
    tools: Raw = ABSENT

    kept: ClassVar[tuple[str, ...]] = ("prompt", "messages", "tools")

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:  # noqa: ARG002 -- as `BodyRequest` has it
        if is_absent(self.prompt) is is_absent(self.messages):
            raise RequestError("give either 'prompt' or 'messages'", param="prompt")
        if is_absent(self.messages):
            prompt, token_ids = one_prompt(self.prompt, context_tokens_max)
            return {"prompt": prompt, "token_ids": token_ids, "task": Task.TOKENIZE}
        return {
            "messages": turns_of(self.messages, context_tokens_max),
            "tools": tools_text(self.tools)[0],
            "task": Task.TOKENIZE,
        }


class DetokenizeRequest(BodyRequest, frozen=True, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Raw

    kept: ClassVar[tuple[str, ...]] = ("tokens",)
    names: ClassVar[Mapping[str, str]] = {"prompt": "tokens"}

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:  # noqa: ARG002 -- as `BodyRequest` has it
        token_ids = one_prompt(self.tokens, context_tokens_max, "tokens")[1]
        if token_ids is None:
            raise RequestError("'tokens' must be a list of token ids", param="tokens")
        return {"token_ids": token_ids, "task": Task.DETOKENIZE}


class EmbeddingsRequest(BodyRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/embeddings`, of one input or of a list of them."""

    input: Raw
    encoding_format: Literal["float", "base64"] | None = None

    kept: ClassVar[tuple[str, ...]] = ("input",)
    names: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    def asked(self, context_tokens_max: int, sampling: SamplingDefaults) -> dict[str, Any]:  # noqa: ARG002 -- as `BodyRequest` has it
        """See `BodyRequest`; of the first input."""
        prompt, token_ids = first_prompt(self.input, context_tokens_max, "input")
        return {"prompt": prompt, "token_ids": token_ids, "task": Task.EMBED}

    def to_choices(
        self, first: GenerateRequest, context_tokens_max: int, inputs_max: int
    ) -> list[GenerateRequest]:
        return [
            msgspec.structs.replace(first, prompt=prompt, token_ids=token_ids)
            for prompt, token_ids in all_prompts(
                self.input, context_tokens_max, "input", inputs_max
            )
        ]


# --- answers ---------------------------------------------------------------------------------


class Tokens(msgspec.Struct, frozen=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`."""

    prompt: str


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """Of one input."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or, in `base64`, their bytes as float32 in little-endian order."""


class EmbeddingsUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/embeddings`."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class TaskAnswer:
    """An answer that there is in one piece alone: `tell` makes it of the usage and of each choice's deltas."""

    ends_itself: ClassVar = False
    keeps_text: ClassVar = False

    def __init__(self, tell: Callable[[Usage, list[list[Delta]]], msgspec.Struct]) -> None:
        self._tell = tell
        self.deltas: list[Delta] = []

    def _not_streamed(self, *_: object, **__: object) -> bytes:
        raise LocalProtocolError("this answer is not streamed")

    add_event = end_events = error_events = _not_streamed

    def add_text(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def to_body(self, usage: Usage, others: Sequence[Self] = ()) -> bytes:
        return _encode(self._tell(usage, [each.deltas for each in (self, *others)]))


def tell_tokens(context_tokens_max: int, _: Usage, choices: list[list[Delta]]) -> Tokens:
    """The answer of `/tokenize` by a model of so long a context; 0 if that is not known."""
    tokens = [each for delta in choices[0] for each in delta.prompt_token_ids]
    return Tokens(len(tokens), context_tokens_max, tokens)


def tell_text(_: Usage, choices: list[list[Delta]]) -> Detokenized:
    """The answer of `/detokenize`."""
    return Detokenized("".join(delta.text for delta in choices[0]))


def tell_embeddings(
    model: str,
    is_base64: bool,  # noqa: FBT001 -- a partial gives it
    usage: Usage,
    choices: list[list[Delta]],
) -> Embeddings:
    """The answer of `/v1/embeddings`; raises `LocalProtocolError` for what is no embedding."""
    data: list[Embedding] = []
    for index, deltas in enumerate(choices):
        raw = b"".join(delta.raw for delta in deltas)
        count, rest = divmod(len(raw), _FLOAT_BYTES)
        if rest:
            raise LocalProtocolError("an embedding that is no row of float32")
        told = (
            base64.b64encode(raw).decode() if is_base64 else list(struct.unpack(f"<{count}f", raw))
        )
        data.append(Embedding(index=index, embedding=told))
    tokens = usage.prompt_tokens
    return Embeddings(data=data, model=model, usage=EmbeddingsUsage(tokens, tokens))
