"""The inference endpoints, which share one path: parse, find the engine, answer.

A model whose workers take the clients' bodies as they are gets them unread (`PassedBody`); embeddings
and responses only such models answer.

What this file does not do: cancellation and the form of the answer (`streaming.py`), routes
(`app.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs

from ..config.http import HttpConfig
from ..context import Context
from ..engines.generation import Forward, forward_of
from ..errors import ModelNotFoundError, OverloadedError, RequestError, TrinamoError
from ..logs.access import AccessLog
from ..logs.fields import add_fields, log_fields
from ..metrics.metrics import SUCCESS
from ..nurseries import forget_frames
from ..protocol.discovery.instances import is_instance_id
from ..protocol.openai.answers import ToolAnswer
from ..traces.ring import Traces
from ..traces.trace import Leg, Trace
from .admission.admission import Admission
from .admission.keys import Key
from .admission.queue import Ticket, Wanted
from .bodies import Body
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
from .models.models import Engine, ModelKind, ModelManager, RemoteEngine
from .reading import EndpointKind, Parsed, Read, Reader
from .shares import party_of
from .status import ErrorAnswer, answer_error
from .streaming import (
    AnswerSink,
    BodySink,
    Delivery,
    EventSink,
    PassedBody,
    PassedEvents,
    Recipient,
)

WORKER_HEADER: Final = b"x-trinamo-worker"
"""In a request the instance id of the worker to ask, in an answer of the one that answered."""
CACHED_BLOCKS_HEADER: Final = b"x-trinamo-cached-blocks"
"""In an answer under the policy `kv`: leading blocks of the prompt that the worker had."""

CLIENT_GONE: Final = 499
"""The status in the log of a request whose client left before it had any; nobody is sent it."""

log = logging.getLogger("trinamo.http")


@attrs.frozen
class _Arrived:
    """A request, from the moment at which its head was read."""

    id: str
    """Inside the cluster."""
    at: float
    trace: Trace
    leg: Leg


class Inference:
    """`POST /v1/chat/completions`, or another path, as `endpoint` says."""

    def __init__(
        self,
        endpoint: EndpointKind,
        manager: ModelManager,
        admission: Admission,
        config: HttpConfig,
        traces: Traces,
    ) -> None:
        self._endpoint, self._manager, self._traces = endpoint, manager, traces
        self._admission, self._config = admission, config
        self._access = AccessLog(manager.env.clock)
        self._reader = Reader(endpoint, manager)
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
        if self._admission.cors is not None:
            headers += self._admission.cors.headers(exchange.headers)
        refusal: ErrorAnswer | None = None
        with (
            log_fields(request_id=inner_id),
            trace.begin("http", now, endpoint=self._endpoint.kind.value) as leg,
        ):
            arrived = _Arrived(inner_id, now, trace, leg)
            try:
                await self._admit(exchange, headers, arrived)
            except ClientGoneError:
                self._refused(exchange, arrived, CLIENT_GONE, "client_disconnect")
            except TrinamoError as error:
                refusal = self._explain(inner_id)(error)
                if isinstance(error, OverloadedError):
                    self._admission.refused(error)
                self._refused(exchange, arrived, refusal.status, refusal.code, str(error))
                if self._admission.is_draining:
                    headers.append((b"connection", b"close"))
            # Not while the error is held: its traceback holds the body.
            if refusal is not None:
                respond_error(exchange, refusal, headers)

    def _check_key(self, exchange: HttpExchange) -> Key | None:
        keys = self._admission.keys
        key = None if keys is None else keys.check(exchange.headers)
        if key is not None:
            add_fields(key_name=key.name)
        return key

    def _explain(self, request_id: str) -> Callable[[Exception], ErrorAnswer]:
        return partial(
            answer_error, request_id=request_id, tells_detail=self._config.engine_error_detail
        )

    def _tell(self, exchange: HttpExchange, arrived: _Arrived, record: RequestRecord) -> None:
        """Write the request's line, and a line of its own about a fault of ours."""
        first_token_at, began_at = record.first_token_at, record.started_at
        self._access.tell(
            exchange.method,
            exchange.path,
            exchange.status or CLIENT_GONE,
            record.outcome,
            began_at=arrived.at,
            is_success=record.outcome == SUCCESS,
            error=record.detail,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            first_token_s=None if first_token_at is None else first_token_at - began_at,
        )
        if record.fault is not None:
            log.error("a request failed", exc_info=record.fault)
            forget_frames(record.fault)

    def _refused(
        self,
        exchange: HttpExchange,
        arrived: _Arrived,
        status: int,
        outcome: str,
        error: str = "",
    ) -> None:
        """Count and tell a request that ended before anybody was asked."""
        self._manager.metrics.refused(self._endpoint.kind, outcome)
        # Which model was asked for; of other refusals the access line has the sentence.
        why = {"why": error[:160]} if outcome == ModelNotFoundError.code else {}
        arrived.leg.finish(outcome, **why)
        self._access.tell(
            exchange.method,
            exchange.path,
            status,
            outcome,
            began_at=arrived.at,
            is_success=False,
            error=error,
        )

    async def _admit(self, exchange: HttpExchange, headers: Headers, arrived: _Arrived) -> None:
        """Read the body, wait for a place as often as need be, and answer."""
        admission, key = self._admission, self._check_key(exchange)
        deadline = find_deadline(exchange.headers, self._config.answer_timeout_s)
        tenant = "" if key is None else key.tenant
        party = tenant or party_of(exchange.address)
        with admission.arriving(arrived.id, party) as ticket, Body(admission.bodies, party) as body:
            admission.check_load(self._manager.engines(self._endpoint.kind), party)
            check_json(exchange.headers)
            limits = self._config.body_bytes_max, self._config.body_timeout_s
            data = await exchange.read_body(body, bytes_max=limits[0], timeout_s=limits[1])
            read = Read(data, body, tenant)
            del data
            admission.arrived(ticket)
            arrived.leg.mark("body")
            ticket.sees_workers = key is None or key.is_operator
            record = await self._take_turns(read, ticket, exchange, arrived, headers, deadline)
        arrived.leg.finish(record.outcome, model=record.model)
        self._tell(exchange, arrived, record)

    async def _take_turns(
        self,
        read: Read,
        ticket: Ticket,
        exchange: HttpExchange,
        arrived: _Arrived,
        headers: Headers,
        deadline: float,
    ) -> RequestRecord:
        """Wait for a place as often as need be, and answer."""
        admission, came_at = self._admission, self._manager.metrics.now()
        parsed = self._reader.understand(read)
        while True:
            wanted = parsed.wanted if isinstance(parsed, Parsed) else parsed
            context = admission.enter(ticket, wanted)
            if context is None:
                context = await self._wait(ticket, wanted, exchange, arrived, deadline)
            try:
                if isinstance(parsed, Wanted):
                    parsed = self._reader.understand(read)
                elif ticket.until:
                    # It had to wait, and others may serve the model by now.
                    parsed = attrs.evolve(parsed, engine=wanted.find())
                why = "its model has gone again"
                if isinstance(parsed, Parsed):
                    context.limit(deadline)
                    record = await self._deliver(
                        parsed, ticket, exchange, arrived, headers, context, came_at
                    )
                    if record.outcome != SENT_BACK:
                        return record
                    why = record.detail
                admission.queue.refused(ticket, wanted, OverloadedError(why))
            finally:
                admission.leave(context, ticket)

    async def _deliver(
        self,
        parsed: Parsed,
        ticket: Ticket,
        exchange: HttpExchange,
        arrived: _Arrived,
        headers: Headers,
        context: Context,
        came_at: float,
    ) -> RequestRecord:
        generate, inner_id = parsed.generate, arrived.id
        with (
            self._manager.metrics.request(generate.model, self._endpoint.kind, came_at) as record,
            Body(self._admission.answers) as kept,
        ):
            context.trace = arrived.trace
            bounds = self._config.answer_bytes_max, parsed.tokens_max
            to = Recipient(exchange, record, headers, kept, *bounds)
            sink = self._sink(parsed, inner_id, to)
            forward = self._directed(parsed.engine, ticket, exchange.headers, headers)
            explain = self._explain(inner_id)
            may_wait = self._admission.queue.length_max > 0
            delivery = Delivery(exchange, sink, context, record, self._config, explain, may_wait)
            await delivery.run(forward, generate)
        if record.first_token_at is not None:
            arrived.leg.mark("first_token", record.first_token_at)
        arrived.leg.tell(prompt_tokens=record.prompt_tokens, output_tokens=record.output_tokens)
        self._manager.env.note("http.answered", id=inner_id, outcome=record.outcome)
        return record

    async def _wait(
        self,
        ticket: Ticket,
        wanted: Wanted,
        exchange: HttpExchange,
        arrived: _Arrived,
        deadline: float,
    ) -> Context:
        """Wait for a place, as `AdmissionQueue.wait` does; how long, the request's line tells."""
        metrics = self._manager.metrics
        began_at = metrics.now()
        try:
            with arrived.trace.begin("admission", began_at):
                return await self._admission.queue.wait(ticket, wanted, exchange, deadline)
        finally:
            add_fields(waited_s=round(metrics.now() - began_at, 4))

    def _directed(
        self, engine: Engine, ticket: Ticket, given: Headers, headers: Headers
    ) -> Forward:
        """The engine's way to answer, by the worker that the client names in `given`, if it does.

        `headers` will say who has answered. Raises `RequestError` if the client names a worker and
        there is none to choose.
        """
        name = find_header(given, WORKER_HEADER)
        queue = self._admission.queue
        if isinstance(engine, RemoteEngine):
            worker = None if name is None else name.decode("latin-1")
            if worker is not None and not is_instance_id(worker):
                raise RequestError(
                    "X-Trinamo-Worker is no instance id, such as `trinamo status` shows"
                )

            def tell(instance_id: str, cached_blocks: int | None) -> None:
                """The answer comes from there; until its first byte is sent, the last one counts."""
                queue.took(ticket)
                if ticket.sees_workers:
                    told = (WORKER_HEADER, CACHED_BLOCKS_HEADER)
                    headers[:] = [each for each in headers if each[0] not in told]
                    headers.append((WORKER_HEADER, instance_id.encode()))
                    if cached_blocks is not None:
                        headers.append((CACHED_BLOCKS_HEADER, str(cached_blocks).encode()))

            return engine.directed(worker, tell).forward
        if name is not None:
            raise RequestError("X-Trinamo-Worker: this model has no workers to choose from")
        queue.took(ticket)
        return forward_of(engine)

    def _sink(self, parsed: Parsed, inner_id: str, to: Recipient) -> AnswerSink:
        if parsed.own is not None:
            made = ToolAnswer if parsed.generate.calls_tools else parsed.own.answer
            make_form = partial(
                made,
                inner_id,
                parsed.asked,
                int(self._manager.env.clock.wall()),
                wants_usage=parsed.wants_usage,
            )
            make_sink = EventSink if parsed.is_streamed else BodySink
            return make_sink(to, make_form)
        if not parsed.is_streamed:
            return PassedBody(to)
        ends_with_done = self._endpoint.kind is not ModelKind.RESPONSES
        return PassedEvents(to, ends_with_done=ends_with_done)
