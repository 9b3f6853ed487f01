"""The inference endpoints: how each reads a request, and how it makes the answer. One table.

What they share is in `chat.py`, and how the APIs that they belong to tell errors in `status.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import attrs

from ..protocol.anthropic.answers import MessagesAnswer, TokenCount
from ..protocol.anthropic.messages import (
    CountTokensRequest,
    MessagesRequest,
)
from ..protocol.openai.answers import AnswerFormat, ChatAnswer, CompletionAnswer
from ..protocol.openai.fields import ENDPOINTS, BodyDecoder
from ..protocol.openai.generate import GenerateRequest
from ..protocol.openai.requests import (
    BodyRequest,
    ChatCompletionRequest,
    CompletionRequest,
    SharedRequest,
)
from ..protocol.openai.responses import ResponsesRequest
from ..protocol.openai.responses_answer import ResponsesAnswer
from ..protocol.openai.tasks import (
    DetokenizeRequest,
    EmbeddingsRequest,
    TaskAnswer,
    TokenizeRequest,
    tell_embeddings,
    tell_text,
    tell_tokens,
)
from ..protocol.openai.tool_calls import ToolAnswer
from .models.models import ModelKind
from .status import ANTHROPIC, EVENTS_THAT_END, OPENAI, Dialect

MakesAnswer: TypeAlias = Callable[[int, str, str, int], AnswerFormat]
"""The form of a choice, by its index, from the request's id, the model's name as it was asked for, and
Unix seconds. It holds no body."""


@attrs.frozen
class EndpointKind:
    """Where the endpoints differ."""

    name: str
    """In metrics, traces and logs."""
    path: str
    kind: ModelKind
    """What a model must do to be asked."""
    body: type[BodyRequest]
    """What a request is to engines that are given tokens or text."""
    answer: Callable[[Any, list[GenerateRequest], int], MakesAnswer]
    """How its answer is made, of which engines are asked these choices, in so long a context."""
    dialect: Dialect = OPENAI
    decode: Callable[..., BodyRequest] = attrs.Factory(
        lambda self: BodyDecoder(self.body, ENDPOINTS[self.path]).decode, takes_self=True
    )
    """How a body is read: see `BodyDecoder.decode`."""

    @property
    def may_stream(self) -> bool:
        """Whether there are answers as events, whatever a body says."""
        return self.kind in (ModelKind.CHAT, ModelKind.COMPLETIONS)


def _chat(request: ChatCompletionRequest, choices: list[GenerateRequest], _: int) -> MakesAnswer:
    told, calls_max = _told(request, choices), choices[0].calls_max
    if not calls_max:
        return lambda index, *known: ChatAnswer(*known, index=index, **told)
    return lambda index, *known: ToolAnswer(*known, index=index, calls_max=calls_max, **told)


def _completion(request: CompletionRequest, choices: list[GenerateRequest], _: int) -> MakesAnswer:
    told = _told(request, choices)
    prompts = [each.prompt or "" for each in choices] if request.echo else []
    if prompts:
        told["tells_logprobs"] = choices[0].logprobs is not None
    return lambda index, *known: CompletionAnswer(
        *known, index=index, echo=prompts[index] if prompts else None, **told
    )


def _told(request: SharedRequest, choices: list[GenerateRequest]) -> dict[str, Any]:
    return {"wants_usage": request.wants_usage, "tells_ids": choices[0].return_token_ids}


def _response(request: ResponsesRequest, choices: list[GenerateRequest], _: int) -> MakesAnswer:
    echo, calls_max = request.echo(choices[0]), choices[0].calls_max
    return lambda _, *known: ResponsesAnswer(echo, *known, calls_max=calls_max)


def _message(_: MessagesRequest, choices: list[GenerateRequest], __: int) -> MakesAnswer:
    calls_max = choices[0].calls_max
    return lambda _, answer_id, model, __: MessagesAnswer(answer_id, model, calls_max=calls_max)


def _embeddings(request: EmbeddingsRequest, _: list[GenerateRequest], __: int) -> MakesAnswer:
    is_base64 = request.encoding_format == "base64"
    return lambda _, __, model, ___: TaskAnswer(partial(tell_embeddings, model, is_base64))


CHAT: Final = EndpointKind(
    "chat", "/v1/chat/completions", ModelKind.CHAT, ChatCompletionRequest, _chat
)
COMPLETIONS: Final = EndpointKind(
    *("completions", "/v1/completions", ModelKind.COMPLETIONS),
    CompletionRequest,
    _completion,
)
RESPONSES: Final = EndpointKind(
    *("responses", "/v1/responses", ModelKind.CHAT),
    ResponsesRequest,
    _response,
    EVENTS_THAT_END,
)
MESSAGES: Final = EndpointKind(
    "messages", "/v1/messages", ModelKind.CHAT, MessagesRequest, _message, ANTHROPIC
)
COUNT_TOKENS: Final = EndpointKind(
    *("count_tokens", "/v1/messages/count_tokens", ModelKind.TOKENIZE),
    CountTokensRequest,
    lambda *_: lambda *_: TaskAnswer(lambda usage, _: TokenCount(usage.prompt_tokens)),
    ANTHROPIC,
)
EMBEDDINGS: Final = EndpointKind(
    *("embeddings", "/v1/embeddings", ModelKind.EMBEDDINGS),
    EmbeddingsRequest,
    _embeddings,
)
TOKENIZE: Final = EndpointKind(
    *("tokenize", "/tokenize", ModelKind.TOKENIZE),
    TokenizeRequest,
    lambda _, __, context: lambda *_: TaskAnswer(partial(tell_tokens, context)),
)
DETOKENIZE: Final = EndpointKind(
    *("detokenize", "/detokenize", ModelKind.TOKENIZE),
    DetokenizeRequest,
    lambda *_: lambda *_: TaskAnswer(tell_text),
)
