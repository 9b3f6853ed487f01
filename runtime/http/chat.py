"""Both inference endpoints, which share one path: parse, find the engine, answer.

`Inference` is an ASGI application. What it does not do: cancellation and the wire of the answer
(`streaming.py`), routes (`app.py`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Final

import attrs
from typing_extensions import Buffer

from ..config.config import HttpConfig
from ..errors import EngineError, RequestError, TrinamoError
from ..logs.fields import log_fields
from ..logs.requests import log_request
from ..metrics.metrics import SUCCESS, RequestRecord
from ..protocol.discovery.instances import is_instance_id
from ..protocol.openai.answers import AnswerFormat, ChatAnswer, CompletionAnswer, Usage
from ..protocol.openai.generate import Delta, GenerateRequest
from ..protocol.openai.requests import (
    CONTEXT_TOKENS_MAX,
    ChatCompletionRequest,
    CompletionRequest,
    decode_chat_request,
    decode_completion_request,
)
from .admission import Admission
from .bodies import Body
from .exchange import (
    ClientGoneError,
    Headers,
    Receive,
    Scope,
    Send,
    check_json,
    find_connection,
    find_header,
    make_ids,
    read_body,
    send_error,
)
from .models.models import Engine, ModelKind, ModelManager, RemoteEngine
from .status import ErrorAnswer, answer_error
from .streaming import AnswerWriter

__all__ = ["CHAT", "COMPLETIONS", "EndpointKind", "Inference"]

WORKER_HEADER: Final = b"x-trinamo-worker"
"""In a request the instance id of the worker to ask, in an answer of the one that answered."""

log = logging.getLogger("trinamo.http")


@attrs.frozen
class EndpointKind:
    """Where the two endpoints differ."""

    kind: ModelKind
    decode: Callable[[Buffer], ChatCompletionRequest | CompletionRequest]
    answer: type[ChatAnswer | CompletionAnswer]


CHAT: Final = EndpointKind(ModelKind.CHAT, decode_chat_request, ChatAnswer)
COMPLETIONS: Final = EndpointKind(
    ModelKind.COMPLETIONS, decode_completion_request, CompletionAnswer
)


@attrs.frozen
class _Parsed:
    """What is kept of a request; its body is not, as nothing here refers to it."""

    generate: GenerateRequest
    engine: Engine
    is_streamed: bool
    wants_usage: bool


class Inference:
    """`POST /v1/chat/completions` or `POST /v1/completions`, as `endpoint` says."""

    def __init__(
        self,
        endpoint: EndpointKind,
        manager: ModelManager,
        admission: Admission,
        config: HttpConfig,
    ) -> None:
        self._endpoint, self._manager = endpoint, manager
        self._admission, self._config = admission, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        public_id, inner_id = make_ids(scope, self._manager.env.rng)
        with log_fields(request_id=inner_id):
            await self._serve(scope, receive, send, public_id, inner_id)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, public_id: str, inner_id: str
    ) -> None:
        started_at = self._manager.env.clock.now()
        headers: Headers = [(b"x-request-id", public_id.encode())]
        refusal: ErrorAnswer | None = None
        try:
            with self._admission.bodies.open() as body:
                parsed = await self._parse(scope, receive, body)
                record = await self._answer(parsed, scope, receive, send, inner_id, headers)
            self._tell(
                record.outcome, started_at, record.detail, fault=record.fault, model=record.model
            )
        except ClientGoneError:
            self._manager.metrics.refused(self._endpoint.kind, "client_disconnect")
            self._tell("client_disconnect", started_at)
        except TrinamoError as error:
            refusal = self._explain(inner_id)(error)
            self._manager.metrics.refused(self._endpoint.kind, refusal.code)
            self._tell(refusal.code, started_at, str(error))
            if self._admission.is_draining:
                headers.append((b"connection", b"close"))
        # Not while the error is held: its traceback holds the body.
        if refusal is not None:
            await send_error(send, refusal, headers)

    def _explain(self, request_id: str) -> Callable[[Exception], ErrorAnswer]:
        return partial(
            answer_error, request_id=request_id, tells_detail=self._config.engine_error_detail
        )

    def _tell(
        self,
        outcome: str,
        started_at: float,
        detail: str = "",
        *,
        fault: BaseException | None = None,
        **fields: str,
    ) -> None:
        log_request(
            log,
            outcome,
            is_success=outcome == SUCCESS,
            duration_s=self._manager.env.clock.now() - started_at,
            detail=detail,
            fault=fault,
            endpoint=self._endpoint.kind,
            **fields,
        )

    async def _parse(self, scope: Scope, receive: Receive, body: Body) -> _Parsed:
        with self._admission.arriving():
            check_json(scope)
            data = await read_body(
                scope,
                receive,
                body,
                bytes_max=self._config.body_bytes_max,
                timeout_s=self._config.body_timeout_s,
            )
        request = self._endpoint.decode(data)
        model, engine = self._manager.find(request.model, self._endpoint.kind)
        context_tokens_max = self._manager.context_tokens_max(model) or CONTEXT_TOKENS_MAX
        generate = request.to_generate(model, context_tokens_max)
        # From here on the request is held, not its body, which may have been mostly blanks.
        body.hold(request.content_bytes)
        return _Parsed(generate, engine, request.is_streamed, request.wants_usage)

    async def _answer(
        self,
        parsed: _Parsed,
        scope: Scope,
        receive: Receive,
        send: Send,
        inner_id: str,
        headers: Headers,
    ) -> RequestRecord:
        with (
            self._admission.admit(inner_id) as context,
            self._manager.metrics.request(parsed.generate.model, self._endpoint.kind) as record,
        ):
            writer = AnswerWriter(
                receive,
                send,
                context,
                record,
                self._config,
                headers=headers,
                explain=self._explain(inner_id),
                connection=find_connection(scope),
            )
            answer = self._endpoint.answer(
                inner_id,
                parsed.generate.model,
                int(self._manager.env.clock.wall()),
                wants_usage=parsed.wants_usage,
            )
            engine = _directed(parsed.engine, scope, headers)
            deltas = engine.generate(parsed.generate, context)
            encoder = _Encoder(answer, record)
            if parsed.is_streamed:
                await writer.stream(deltas, encoder.event, encoder.last_event)
            else:
                await writer.whole(lambda: encoder.body(deltas))
        self._manager.env.note("http.answered", id=inner_id, outcome=record.outcome)
        return record


def _directed(engine: Engine, scope: Scope, headers: Headers) -> Engine:
    """`engine`, to the worker that the client names; `headers` will say who has answered.

    Raises `RequestError` if the client names one and there is none to choose.
    """
    given = find_header(scope, WORKER_HEADER)
    if isinstance(engine, RemoteEngine):
        worker = None if given is None else given.decode("latin-1")
        if worker is not None and not is_instance_id(worker):
            raise RequestError("X-Trinamo-Worker is no instance id, such as `trinamo status` shows")
        return engine.directed(
            worker, lambda instance_id: headers.append((WORKER_HEADER, instance_id.encode()))
        )
    if given is not None:
        raise RequestError("X-Trinamo-Worker: this model has no workers to choose from")
    return engine


@attrs.define
class _Encoder:
    """Encodes one answer from its deltas: as events, or as one body."""

    _answer: AnswerFormat
    _record: RequestRecord
    _is_finished: bool = False

    def event(self, delta: Delta) -> bytes:
        """The event of `delta`; empty if there is nothing to send yet."""
        self._count(delta)
        return self._answer.add_event(delta)

    def last_event(self) -> bytes:
        """What follows the last delta. Raises `EngineError` if that was not the answer's end."""
        self._check_finished()
        return self._answer.usage_event(self._usage)

    async def body(self, deltas: AsyncGenerator[Delta, None]) -> bytes:
        """The whole answer. Raises `EngineError` if the deltas stop before its end."""
        async with aclosing(deltas):
            # Read to the end, past the finish reason: leaving earlier would drop the stream before
            # its Sentinel, which kills the worker's handler. `AnswerWriter` does the same.
            async for delta in deltas:
                self._count(delta)
                self._answer.add_text(delta)
        self._check_finished()
        return self._answer.to_body(self._usage)

    def _count(self, delta: Delta) -> None:
        if delta.prompt_tokens:
            self._record.prompt(delta.prompt_tokens)
        self._record.token(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._is_finished = True

    @property
    def _usage(self) -> Usage:
        prompt, output = self._record.prompt_tokens, self._record.output_tokens
        return Usage(prompt, output, prompt + output)

    def _check_finished(self) -> None:
        """An answer that was cut short must not look whole."""
        if not self._is_finished:
            raise EngineError("the engine ended its answer without a finish reason")
