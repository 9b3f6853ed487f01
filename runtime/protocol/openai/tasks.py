"""What is asked of a model's vocabulary: tokens of a text, the text of tokens, embeddings. Sans-IO.

`/tokenize` and `/detokenize` are vLLM's, `/v1/embeddings` is OpenAI's. Each is a `GenerateRequest` with
a task, whose answer is one delta and never a stream.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import ClassVar, Final, Literal, Self

import msgspec
from msgspec import Raw

from ...errors import LocalProtocolError, RequestError
from .answers import ErrorDetail, Usage
from .fields import DETOKENIZE_FIELDS, EMBEDDINGS_FIELDS, TOKENIZE_FIELDS, BodyDecoder
from .generate import UNSAID, Delta, GenerateRequest, SamplingDefaults, Task
from .requests import (
    CONTEXT_TOKENS_MAX,
    BodyRequest,
    all_prompts,
    first_prompt,
    one_prompt,
    turns_of,
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

    def to_generate(
        self,
        model: str,
        context_tokens_max: int = CONTEXT_TOKENS_MAX,
        _: SamplingDefaults = UNSAID,
    ) -> GenerateRequest:
        """What the engine of `model` is asked; raises `RequestError` naming the parameter."""
        if is_absent(self.prompt) is is_absent(self.messages):
            raise RequestError("give either 'prompt' or 'messages'", param="prompt")
        if is_absent(self.messages):
            prompt, token_ids = one_prompt(self.prompt, context_tokens_max)
            return GenerateRequest(
                model=model, prompt=prompt, token_ids=token_ids, task=Task.TOKENIZE
            )
        return GenerateRequest(
            model=model,
            messages=turns_of(self.messages, context_tokens_max),
            tools=tools_text(self.tools)[0],
            task=Task.TOKENIZE,
        )


class DetokenizeRequest(BodyRequest, frozen=True, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Raw

    kept: ClassVar[tuple[str, ...]] = ("tokens",)

    def to_generate(
        self,
        model: str,
        context_tokens_max: int = CONTEXT_TOKENS_MAX,
        _: SamplingDefaults = UNSAID,
    ) -> GenerateRequest:
        token_ids = one_prompt(self.tokens, context_tokens_max, "tokens")[1]
        if token_ids is None:
            raise RequestError("'tokens' must be a list of token ids", param="tokens")
        return GenerateRequest(model=model, token_ids=token_ids, task=Task.DETOKENIZE)


class EmbeddingsRequest(BodyRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/embeddings`, of one input or of a list of them."""

    input: Raw
    encoding_format: Literal["float", "base64"] | None = None

    kept: ClassVar[tuple[str, ...]] = ("input",)

    def to_generate(
        self,
        model: str,
        context_tokens_max: int = CONTEXT_TOKENS_MAX,
        _: SamplingDefaults = UNSAID,
    ) -> GenerateRequest:
        """What the engine of `model` is asked for the first input; see `to_choices`."""
        prompt, token_ids = first_prompt(self.input, context_tokens_max, "input")
        return GenerateRequest(model=model, prompt=prompt, token_ids=token_ids, task=Task.EMBED)

    def to_choices(
        self, first: GenerateRequest, context_tokens_max: int, inputs_max: int
    ) -> list[GenerateRequest]:
        return [
            msgspec.structs.replace(first, prompt=prompt, token_ids=token_ids)
            for prompt, token_ids in all_prompts(
                self.input, context_tokens_max, "input", inputs_max
            )
        ]


decode_tokenize_request: Final = BodyDecoder(TokenizeRequest, TOKENIZE_FIELDS).decode
decode_detokenize_request: Final = BodyDecoder(DetokenizeRequest, DETOKENIZE_FIELDS).decode
decode_embeddings_request: Final = BodyDecoder(EmbeddingsRequest, EMBEDDINGS_FIELDS).decode


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


class Unstreamed:
    """An answer that there is in one piece alone."""

    ends_itself: ClassVar = False
    keeps_text: ClassVar = False

    def add_event(self, delta: Delta) -> bytes:  # noqa: ARG002 -- as `AnswerFormat` has it
        raise LocalProtocolError("this answer is not streamed")

    def end_events(self, usage: Usage) -> bytes:  # noqa: ARG002 -- likewise
        raise LocalProtocolError("this answer is not streamed")

    def error_events(self, status: int, error: ErrorDetail) -> bytes:  # noqa: ARG002 -- likewise
        raise LocalProtocolError("this answer is not streamed")


class TokensAnswer(Unstreamed):
    """One answer of `/tokenize` by a model of so long a context; 0 if that is not known."""

    def __init__(self, context_tokens_max: int) -> None:
        self._context_tokens_max = context_tokens_max
        self._tokens: list[int] = []

    def add_text(self, delta: Delta) -> None:
        self._tokens += delta.prompt_token_ids

    def to_body(self, usage: Usage, others: Sequence[Self] = ()) -> bytes:  # noqa: ARG002 -- likewise
        return _encode(Tokens(len(self._tokens), self._context_tokens_max, self._tokens))


class TextAnswer(Unstreamed):
    """One answer of `/detokenize`."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add_text(self, delta: Delta) -> None:
        self._texts.append(delta.text)

    def to_body(self, usage: Usage, others: Sequence[Self] = ()) -> bytes:  # noqa: ARG002 -- likewise
        return _encode(Detokenized("".join(self._texts)))


class EmbeddingAnswer(Unstreamed):
    """The embedding of one input of `/v1/embeddings`, by its `index`."""

    def __init__(self, index: int, model: str, *, is_base64: bool) -> None:
        self._index, self._model, self._is_base64 = index, model, is_base64
        self._raw = b""

    def add_text(self, delta: Delta) -> None:
        self._raw += delta.raw

    def told(self) -> Embedding:
        """It, as the client wants it; raises `LocalProtocolError` if it is none."""
        count, rest = divmod(len(self._raw), _FLOAT_BYTES)
        if rest:
            raise LocalProtocolError("an embedding that is no row of float32")
        if self._is_base64:
            return Embedding(index=self._index, embedding=base64.b64encode(self._raw).decode())
        return Embedding(index=self._index, embedding=list(struct.unpack(f"<{count}f", self._raw)))

    def to_body(self, usage: Usage, others: Sequence[Self] = ()) -> bytes:
        return _encode(
            Embeddings(
                data=[each.told() for each in (self, *others)],
                model=self._model,
                usage=EmbeddingsUsage(usage.prompt_tokens, usage.prompt_tokens),
            )
        )
