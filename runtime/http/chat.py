"""The inference endpoints, which share one path: read, find the engine, wait for a place, answer.

A model whose workers take the clients' bodies as they are gets them unread (`PassedBody`).

What this file does not do: cancellation and the form of the answer (`streaming.py`), who gets a
place (`admission/admission.py`), routes (`app.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import attrs
import msgspec
from typing_extensions import Buffer

from ..config.http import HttpConfig
from ..context import Context
from ..engines.generation import Forward, forward_of
from ..errors import (
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from ..logs.access import AccessLog
from ..logs.fields import add_fields, log_fields
from ..metrics.metrics import SUCCESS
from ..nurseries import forget_frames
from ..protocol.discovery.instances import is_instance_id
from ..protocol.openai.answers import AnswerFormat
from ..protocol.openai.fields import UnknownFields
from ..protocol.openai.generate import GenerateRequest, ModelCard, PassedRequest, check_features
from ..protocol.openai.passing import decode_passed
from ..protocol.openai.requests import CHOICES_MAX, CONTEXT_TOKENS_MAX, BodyRequest
from ..traces.ring import Traces
from ..traces.trace import Leg, RequestTrace
from .admission.admission import Admission, Ticket, WaitingRequest
from .bodies import Body
from .choices import ChoicesSink, answer_choices
from .comments import Comments, EventStream
from .endpoints import EndpointKind, MakesAnswer
from .exchanges import (
    ClientGoneError,
    Headers,
    HttpExchange,
    RequestIds,
    check_json,
    find_deadline,
    find_header,
    respond_error,
)
from .metrics import SENT_BACK, RequestRecord
from .models.models import Engine, ModelAwayError, ModelManager, RoutedEngine
from .shares import party_of
from .status import ErrorAnswer, answer_error
from .streaming import (
    AnswerDelivery,
    AnswerSink,
    BodySink,
    EventSink,
    PassedBody,
    PassedEvents,
)

WORKER_HEADER: Final = b"x-trinamo-worker"
"""In a request the instance id of the worker to ask, in an answer of the one that answered."""
CACHED_BLOCKS_HEADER: Final = b"x-trinamo-cached-blocks"
"""In an answer under the policy `kv`: leading blocks of the prompt that the worker had."""
UNKNOWN_FIELDS_HEADER: Final = b"x-trinamo-unknown-fields"
"""In an answer: fields of the request's body that nobody knows, which were passed over."""
DROPPED_TOOLS_HEADER: Final = b"x-trinamo-dropped-tools"
"""In an answer: types of the request's tools that this server does not run, which were left out."""
_DROPPED_MAX: Final = 8
_UNSAFE_TYPE: Final = re.compile(r"[^A-Za-z0-9_.-]")

CLIENT_GONE: Final = 499
"""The status in the log of a request whose client left before it had any; nobody is sent it."""

log = logging.getLogger("trinamo.http")


@attrs.define(eq=False)
class _Post:
    """One request, from the moment at which its head was read."""

    exchange: HttpExchange
    headers: Headers
    """Of its answer."""
    id: str
    """Inside the cluster."""
    came_at: float
    trace: RequestTrace
    leg: Leg
    deadline: float = 0.0
    """On trio's clock."""
    tenant: str = ""
    data: bytearray | None = None
    """Its body, until it is understood."""
    stream: EventStream | None = None
    """Of its answer, if that is one of events."""


@attrs.frozen
class Parsed:
    """What is kept of a request; not its body, unless that is passed on as it is."""

    choices: list[GenerateRequest]
    """One for each choice of the answer, by its index; most have one."""
    engine: Engine
    asked: str
    """The model's name as the client wrote it, which may be an alias: the answer carries it."""
    is_streamed: bool
    wanted: WaitingRequest
    tokens_max: int
    """Of the answer, as far as it can be told here."""
    choices_each: int = 1
    """To one prompt."""
    copy_bytes: int = 0
    """What one choice is on its way to a worker, about."""
    answer: MakesAnswer | None = None
    """None: the answer is passed on as it comes."""


class Inference:
    """`POST /v1/chat/completions`, or another path, as `endpoint` says."""

    def __init__(
        self,
        endpoint: EndpointKind,
        manager: ModelManager,
        admission: Admission,
        comments: Comments,
        config: HttpConfig,
        traces: Traces,
    ) -> None:
        self._endpoint, self._manager, self._traces = endpoint, manager, traces
        self._admission, self._comments, self._config = admission, comments, config
        self._access = AccessLog(manager.env.clock)
        self._ids = RequestIds(manager.env.rng, config.request_id_headers)

    async def __call__(self, exchange: HttpExchange) -> None:
        """Answer one request; returns once its client has all of it, or is gone.

        An answer that is an error may still be under way.
        """
        public_id, inner_id = self._ids.make(exchange.headers)
        now = self._manager.env.clock.now()
        traceparent = (find_header(exchange.headers, b"traceparent") or b"").decode("latin-1")
        trace = self._traces.begin(inner_id, traceparent)
        headers = self._ids.answer_headers(exchange.headers, public_id)
        if self._endpoint.dialect.id_header:
            headers.append((self._endpoint.dialect.id_header, public_id.encode()))
        if self._admission.cors is not None:
            headers += self._admission.cors.headers(exchange.headers)
        refusal: ErrorAnswer | None = None
        with (
            log_fields(request_id=inner_id),
            trace.begin("http", now, endpoint=self._endpoint.name) as leg,
        ):
            post = _Post(exchange, headers, inner_id, now, trace, leg)
            try:
                await self._serve(post)
            except ClientGoneError:
                self._refused(post, CLIENT_GONE, "client_disconnect")
            except TrinamoError as error:
                refusal = answer_error(
                    error,
                    request_id=inner_id,
                    tells_detail=self._config.engine_error_detail,
                    dialect=self._endpoint.dialect,
                )
                if isinstance(error, OverloadedError):
                    self._admission.refused(error)
                status = exchange.status or refusal.status
                self._refused(post, status, refusal.code, str(error))
                if self._admission.is_draining:
                    headers.append((b"connection", b"close"))
            # Not while the error is held: its traceback holds the body.
            if refusal is not None:
                respond_error(exchange, refusal, headers)

    def _refused(self, post: _Post, status: int, outcome: str, error: str = "") -> None:
        post.data = None
        self._manager.metrics.refused(self._endpoint.name, outcome)
        # Which model was asked for; of other refusals the access line has the sentence.
        why = {"why": error[:160]} if outcome == ModelNotFoundError.code else {}
        self._ended(post, status, outcome, error, why)

    def _ended(
        self,
        post: _Post,
        status: int,
        outcome: str,
        error: str,
        facts: Mapping[str, str],
        **more: Any,
    ) -> None:
        """Tell of a request that is over; a collector is told what it knows HTTP by, too."""
        exchange = post.exchange
        if post.trace.is_exported:
            method = exchange.method.decode("latin-1")
            post.leg.tell(method=method, path=self._endpoint.path, status=status)
        post.leg.finish(outcome, **facts)
        self._access.tell(
            exchange.method,
            exchange.path,
            status,
            outcome,
            began_at=post.came_at,
            is_success=outcome == SUCCESS,
            error=error,
            **more,
        )

    async def _serve(self, post: _Post) -> None:
        """Look at the key, read the body, answer, and tell how it ended."""
        admission, exchange, config = self._admission, post.exchange, self._config
        key = None if admission.keys is None else admission.keys.check(exchange.headers)
        if key is not None:
            add_fields(key_name=key.name)
            post.tenant = key.tenant
        post.deadline = find_deadline(exchange.headers, config.answer_timeout_s)
        party = post.tenant or party_of(exchange.address)
        with (
            admission.arriving(post.id, party, post.headers) as ticket,
            Body(admission.bodies, party) as body,
        ):
            ticket.sees_workers = key is None or key.is_operator
            if admission.busy is not None:
                admission.check_load(self._manager.engines(self._endpoint.kind), party)
            check_json(exchange.headers)
            post.data = await exchange.read_body(
                body,
                bytes_max=config.body_bytes_max,
                timeout_s=config.body_timeout_s,
                deadline=post.deadline,
            )
            admission.arrived(ticket)
            post.leg.mark("body")
            parsed = self._understand(post, body)
            with nullcontext() if post.stream is None else post.stream:
                record = await self._answer(post, parsed, body, ticket)
        first_token_at = record.first_token_at
        self._ended(
            post,
            exchange.status or CLIENT_GONE,
            record.outcome,
            record.detail,
            {"model": record.model},
            # Upstreams need not tell it; no prompt has none.
            prompt_tokens=record.prompt_tokens or None,
            output_tokens=record.output_tokens,
            first_token_s=None if first_token_at is None else first_token_at - record.started_at,
        )
        if record.fault is not None:
            log.error("a request failed", exc_info=record.fault)
            forget_frames(record.fault)

    async def _answer(
        self, post: _Post, parsed: Parsed | WaitingRequest, body: Body, ticket: Ticket
    ) -> RequestRecord:
        """Wait for a place and have it answered; anew if every worker refuses it for want of room."""
        admission, came_at = self._admission, self._manager.metrics.now()
        silence_count = 0
        while True:
            wanted = parsed.wanted if isinstance(parsed, Parsed) else parsed
            context = admission.enter(ticket, wanted)
            if context is None:
                context = await self._wait(post, ticket, wanted)
            context.silence_count = silence_count
            try:
                if isinstance(parsed, WaitingRequest):
                    parsed = self._understand(post, body)
                asked = parsed
                if isinstance(parsed, Parsed) and ticket.until:
                    # It had to wait, and others may serve the model by now.
                    asked = self._renewed(parsed)
                why = "its model has gone again"
                if isinstance(asked, Parsed):
                    context.limit(post.deadline)
                    record = await self._deliver(post, asked, ticket, context, came_at)
                    if record.outcome != SENT_BACK:
                        return record
                    why = record.detail
                silence_count = context.silence_count
                admission.queue.refused(ticket, wanted, OverloadedError(why))
            finally:
                admission.leave(context, ticket)

    async def _wait(self, post: _Post, ticket: Ticket, wanted: WaitingRequest) -> Context:
        """Wait for a place, as `AdmissionQueue.wait` does; how long, the request's line tells."""
        metrics = self._manager.metrics
        began_at = metrics.now()
        try:
            with post.trace.begin("admission", began_at):
                return await self._admission.queue.wait(
                    ticket, wanted, post.exchange, post.deadline
                )
        finally:
            add_fields(waited_s=round(metrics.now() - began_at, 4))

    # --- what is asked -------------------------------------------------------------------------

    def _understand(self, post: _Post, body: Body) -> Parsed | WaitingRequest:
        """What is asked, and of whom; only of whom, while nobody is there to say what may be.

        Then it is to be read again; else the body is held no more.
        """
        data, decode, name = post.data, self._endpoint.decode, ""
        assert data is not None, "it was understood before"
        parsed: Parsed | None = None
        try:
            if self._manager.passes_any:
                passed = decode_passed(data)
                name = passed.model or ""
                self._streams(post, is_streamed=self._is_streamed(passed))
                parsed = self._pass(data, passed, post.tenant)
            if parsed is None:
                request = decode(data, partial(self._tell_unknown, post))
                name = request.model or ""
                self._streams(post, is_streamed=request.is_streamed)
                parsed = self._take(request, post)
                # The request is held, not its body, which may have been mostly blanks.
                body.hold(request.content_bytes)
        except ModelAwayError:
            return self._wanted(name)
        post.data = None
        return parsed

    def _is_streamed(self, passed: PassedRequest) -> bool:
        return bool(passed.stream) and self._endpoint.may_stream

    def _streams(self, post: _Post, *, is_streamed: bool) -> None:
        if is_streamed and post.stream is None:
            post.stream = self._comments.stream(post.exchange, post.headers)

    def _tell_unknown(self, post: _Post, unknown: UnknownFields) -> None:
        """As `http.unknown_fields` says: refuse the request, or tell its client and the log."""
        if self._config.unknown_fields == "ignore":
            return
        if self._config.unknown_fields == "refuse":
            raise RequestError(
                f"{self._endpoint.path} has no such field: {unknown.sentence}",
                param=unknown.names[0],
            )
        told = (UNKNOWN_FIELDS_HEADER, unknown.sentence.encode())
        # A body may be read twice.
        if told not in post.headers:
            post.headers.append(told)
            log.warning("a request has fields that nobody knows: %s", unknown.sentence)

    def _tell_dropped(self, post: _Post, dropped: Sequence[tuple[int, str]]) -> None:
        """As `http.server_tools` says: refuse the request, or tell its client what was left out."""
        if self._config.server_tools == "refuse":
            index, kind = dropped[0]
            raise RequestError(
                f"'tools[{index}].type' is {kind[:40]!r}, which this server does not run",
                param=f"tools[{index}].type",
            )
        kinds = [*dict.fromkeys(_UNSAFE_TYPE.sub("?", kind[:40]) or "?" for _, kind in dropped)]
        told = (DROPPED_TOOLS_HEADER, ", ".join(kinds[:_DROPPED_MAX]).encode())
        if told not in post.headers:
            post.headers.append(told)

    def _wanted(self, model: str) -> WaitingRequest:
        kind = self._endpoint.kind
        return WaitingRequest(model, lambda: self._manager.find(model, kind)[1])

    def _find(self, model: str | None) -> tuple[str, Engine]:
        return self._manager.find(model, self._endpoint.kind, self._endpoint.path)

    def _take(self, request: BodyRequest, post: _Post) -> Parsed:
        model, engine = self._find(request.model)
        add_fields(model=model)
        card = self._manager.card(model) or ModelCard(name=model, endpoint="")
        context_tokens_max = card.context_tokens_max or CONTEXT_TOKENS_MAX
        generate = request.to_generate(model, context_tokens_max, card.sampling)
        check_features(generate, card.features, request.called)
        if dropped := request.dropped_tools:
            self._tell_dropped(post, dropped)
        if post.tenant:
            generate = msgspec.structs.replace(generate, tenant=post.tenant)
        inputs_max = self._config.embedding_inputs_max
        choices = request.to_choices(generate, context_tokens_max, inputs_max)
        return Parsed(
            choices,
            engine,
            request.model or model,
            is_streamed=request.is_streamed,
            wanted=self._wanted(model),
            tokens_max=_tokens_max(choices, card),
            choices_each=request.choices_each,
            copy_bytes=request.content_bytes * request.choices_each // len(choices),
            answer=self._endpoint.answer(request, choices, context_tokens_max),
        )

    def _renewed(self, parsed: Parsed) -> Parsed | WaitingRequest:
        """What had to wait, of whoever serves the model by now; only of whom, while nobody does.

        Raises `RequestError` for what they are not able to do, and `UnavailableError` where they take
        requests in another form, for which the body would be needed.
        """
        try:
            model, engine = self._find(parsed.wanted.model)
        except ModelAwayError:
            return parsed.wanted
        first, card = parsed.choices[0], self._manager.card(model)
        if card is None:
            return attrs.evolve(parsed, engine=engine)
        if card.passes_through is not bool(first.body):
            raise UnavailableError(
                f"others serve '{model[:80]}' by now, who take its requests otherwise; ask again"
            )
        if not first.body:
            check_features(first, card.features)
        return attrs.evolve(parsed, engine=engine, tokens_max=_tokens_max(parsed.choices, card))

    def _pass(self, data: Buffer, passed: PassedRequest, tenant: str) -> Parsed | None:
        """The request with its body as it is, if it is for a model that takes it so."""
        model, engine = self._find(passed.model)
        card = self._manager.card(model)
        if card is None or not card.passes_through:
            return None
        generate = GenerateRequest(
            model=model,
            body=bytes(data),
            path=self._endpoint.path,
            passed=passed,
            tenant=tenant,
        )
        return Parsed(
            [generate],
            engine,
            passed.model or model,
            is_streamed=self._is_streamed(passed),
            wanted=self._wanted(model),
            tokens_max=_tokens_max([generate], card),
        )

    # --- the answer ----------------------------------------------------------------------------

    async def _deliver(
        self, post: _Post, parsed: Parsed, ticket: Ticket, context: Context, came_at: float
    ) -> RequestRecord:
        """Let the engine answer: the worker that the client names, if it does.

        The answer's head says who has answered. Raises `RequestError` if the client names a worker
        and there is none to choose.
        """
        generate, engine, exchange = parsed.choices[0], parsed.engine, post.exchange
        admission, metrics = self._admission, self._manager.metrics
        name = find_header(exchange.headers, WORKER_HEADER)
        worker = None if name is None else name.decode("latin-1")
        if not isinstance(engine, RoutedEngine):
            if worker is not None:
                raise RequestError("X-Trinamo-Worker: this model has no workers to choose from")
            admission.queue.took(ticket)
        elif worker is not None and not is_instance_id(worker):
            raise RequestError("X-Trinamo-Worker is no instance id, such as `trinamo status` shows")

        def took(instance_id: str, cached_blocks: int | None) -> None:
            """The answer comes from there; until its first byte is sent, the last one counts."""
            admission.queue.took(ticket)
            if ticket.sees_workers:
                told = (WORKER_HEADER, CACHED_BLOCKS_HEADER)
                post.headers[:] = [each for each in post.headers if each[0] not in told]
                post.headers.append((WORKER_HEADER, instance_id.encode()))
                if cached_blocks is not None:
                    post.headers.append((CACHED_BLOCKS_HEADER, str(cached_blocks).encode()))

        with (
            metrics.request(generate.model, self._endpoint.name, came_at) as record,
            Body(admission.answers) as kept,
        ):
            context.trace = post.trace
            delivery = AnswerDelivery(
                exchange,
                record,
                post.headers,
                kept,
                self._config,
                context,
                parsed.tokens_max,
                # Who waits for one worker would stand before all who would be taken by another.
                may_wait=admission.queue.length_max > 0 and worker is None,
                dialect=self._endpoint.dialect,
                names=self._endpoint.body.names,
                stream=post.stream,
            )
            forwarding = partial(self._forward_of, engine, ticket, worker, took)
            sink = self._sink(parsed, delivery)
            answer: Callable[[], Awaitable[None]]
            if isinstance(sink, ChoicesSink):
                answer = partial(
                    answer_choices,
                    parsed.choices,
                    delivery,
                    sink,
                    forwarding,
                    admission,
                    parsed.copy_bytes,
                )
            else:
                answer = partial(forwarding(_nothing), generate, context, sink)
            await delivery.run(sink, answer)
        _tell_answer(post, parsed, record)
        self._manager.env.note("http.answered", id=post.id, outcome=record.outcome)
        return record

    def _forward_of(
        self,
        engine: Engine,
        ticket: Ticket,
        worker: str | None,
        took: Callable[[str, int | None], None],
        begun: Callable[[], None],
    ) -> Forward:
        """What forwards one choice, and calls `begun` when a worker begins to answer it."""
        if not isinstance(engine, RoutedEngine):
            begun()
            return forward_of(engine)
        accepted = partial(self._admission.queue.took, ticket)

        def begin(instance_id: str, cached_blocks: int | None) -> None:
            took(instance_id, cached_blocks)
            begun()

        return partial(engine.forward, worker=worker, took=begin, accepted=accepted)

    def _sink(self, parsed: Parsed, to: AnswerDelivery) -> AnswerSink:
        make = parsed.answer
        if make is None:
            return (PassedEvents if parsed.is_streamed else PassedBody)(to)
        made_at = int(self._manager.env.clock.wall())

        def make_form(index: int) -> AnswerFormat:
            return make(index, to.context.id, parsed.asked, made_at)

        if len(parsed.choices) > 1:
            return ChoicesSink(
                to,
                make_form,
                len(parsed.choices),
                choices_each=parsed.choices_each,
                is_streamed=parsed.is_streamed,
            )
        return (EventSink if parsed.is_streamed else BodySink)(to, partial(make_form, 0))


def _nothing() -> None:
    pass


def _tokens_max(choices: Sequence[GenerateRequest], card: ModelCard) -> int:
    """Of the whole answer, as far as it can be told here."""
    first, context_tokens_max = choices[0], card.context_tokens_max or CONTEXT_TOKENS_MAX
    if first.passed is not None:
        return context_tokens_max * (first.passed.choices or CHOICES_MAX)
    tokens_max = context_tokens_max if first.max_tokens is None else first.max_tokens
    return min(tokens_max, context_tokens_max) * len(choices)


def _tell_answer(post: _Post, parsed: Parsed, record: RequestRecord) -> None:
    """What is known of an answer; a collector is told more, in numbers and names of ours alone."""
    if record.first_token_at is not None:
        post.leg.mark("first_token", record.first_token_at)
    post.leg.tell(prompt_tokens=record.prompt_tokens, output_tokens=record.output_tokens)
    if not post.trace.is_exported:
        return
    generate = parsed.choices[0]
    if generate.passed is None:
        post.leg.tell(temperature=generate.temperature, top_p=generate.top_p)
        if generate.max_tokens is not None:
            post.leg.tell(max_tokens=generate.max_tokens)
    post.leg.tell(
        asked_model=parsed.asked,
        cached_tokens=record.cached_tokens,
        finish_reasons=",".join(record.finish_reasons),
    )
