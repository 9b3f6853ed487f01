"""The inference endpoints, and what is read of a request: whom it is for, and what they are asked.

What this file does not do: wait for whoever is not there, and answer (`chat.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import msgspec
from typing_extensions import Buffer

from ..logs.fields import add_fields
from ..protocol.openai.answers import ChatAnswer, CompletionAnswer
from ..protocol.openai.generate import GenerateRequest, PassedRequest, check_features
from ..protocol.openai.passing import decode_passed
from ..protocol.openai.requests import (
    CONTEXT_TOKENS_MAX,
    ChatCompletionRequest,
    CompletionRequest,
    decode_chat_request,
    decode_completion_request,
)
from .admission.queue import Wanted
from .bodies import Body
from .models.models import Engine, ModelAwayError, ModelKind, ModelManager


@attrs.frozen
class _OwnForm:
    """How a request is understood, and its answer made, by engines that are given tokens or text."""

    decode: Callable[[Buffer], ChatCompletionRequest | CompletionRequest]
    answer: type[ChatAnswer | CompletionAnswer]


@attrs.frozen
class EndpointKind:
    """Where the endpoints differ."""

    kind: ModelKind
    path: str
    own: _OwnForm | None = None
    """None: only models that pass requests through answer it."""


CHAT: Final = EndpointKind(
    ModelKind.CHAT, "/v1/chat/completions", _OwnForm(decode_chat_request, ChatAnswer)
)
COMPLETIONS: Final = EndpointKind(
    ModelKind.COMPLETIONS,
    "/v1/completions",
    _OwnForm(decode_completion_request, CompletionAnswer),
)
EMBEDDINGS: Final = EndpointKind(ModelKind.EMBEDDINGS, "/v1/embeddings")
RESPONSES: Final = EndpointKind(ModelKind.RESPONSES, "/v1/responses")


_CHOICES_MAX: Final = 128
"""Of an answer of which only the upstream can tell; OpenAI's own bound."""


@attrs.frozen
class Parsed:
    """What is kept of a request; its body is not, as nothing here refers to it."""

    generate: GenerateRequest
    engine: Engine
    asked: str
    """The model's name as the client wrote it, which may be an alias: the answer carries it."""
    is_streamed: bool
    wants_usage: bool
    own: _OwnForm | None
    """None: the answer is passed on as it comes."""
    wanted: Wanted
    tokens_max: int
    """Of the answer, as far as it can be told here."""

    def of_tenant(self, tenant: str) -> Parsed:
        """The same, as a request of `tenant`."""
        if not tenant:
            return self
        return attrs.evolve(self, generate=msgspec.structs.replace(self.generate, tenant=tenant))


@attrs.define
class Read:
    """A request's body, until it is understood."""

    data: bytearray | None
    body: Body
    tenant: str


class Reader:
    """Reads the bodies of one endpoint's requests, for the models of `manager`."""

    def __init__(self, endpoint: EndpointKind, manager: ModelManager) -> None:
        self._endpoint, self._manager = endpoint, manager

    def understand(self, read: Read) -> Parsed | Wanted:
        """What is asked, and of whom; only of whom, while nobody is there to say what may be.

        Then it is to be read again; else the body is held no more.
        """
        data, own, name = read.data, self._endpoint.own, ""
        assert data is not None, "it was understood before"
        parsed: Parsed | None = None
        try:
            if own is None or self._manager.passes_any:
                passed = decode_passed(data)
                name = passed.model or ""
                parsed = self._pass(data, passed)
            if parsed is None:
                assert own is not None, "no model of ours has this kind"
                request = own.decode(data)
                name = request.model or ""
                parsed = self._take(own, request)
                # The request is held, not its body, which may have been mostly blanks.
                read.body.hold(request.content_bytes)
        except ModelAwayError:
            return self._wanted(name)
        read.data = None
        return parsed.of_tenant(read.tenant)

    def _wanted(self, model: str) -> Wanted:
        kind = self._endpoint.kind
        return Wanted(model, lambda: self._manager.find(model, kind)[1])

    def _take(self, own: _OwnForm, request: ChatCompletionRequest | CompletionRequest) -> Parsed:
        model, engine = self._manager.find(request.model, self._endpoint.kind)
        add_fields(model=model)
        context_tokens_max = self._manager.context_tokens_max(model) or CONTEXT_TOKENS_MAX
        generate = request.to_generate(model, context_tokens_max)
        check_features(generate, self._manager.features(model))
        return Parsed(
            generate,
            engine,
            request.model or model,
            is_streamed=request.is_streamed,
            wants_usage=request.wants_usage,
            own=own,
            wanted=self._wanted(model),
            tokens_max=min(generate.max_tokens or context_tokens_max, context_tokens_max),
        )

    def _pass(self, data: Buffer, passed: PassedRequest) -> Parsed | None:
        """The request with its body as it is, if it is for a model that takes it so."""
        model, engine = self._manager.find(passed.model, self._endpoint.kind)
        if not self._manager.passes_through(model):
            return None
        generate = GenerateRequest(
            model=model, body=bytes(data), path=self._endpoint.path, passed=passed
        )
        return Parsed(
            generate,
            engine,
            passed.model or model,
            is_streamed=bool(passed.stream) and self._endpoint.kind is not ModelKind.EMBEDDINGS,
            wants_usage=False,
            own=None,
            wanted=self._wanted(model),
            tokens_max=(self._manager.context_tokens_max(model) or CONTEXT_TOKENS_MAX)
            * (passed.choices or _CHOICES_MAX),
        )
