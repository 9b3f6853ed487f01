"""The worker's end: admit envelopes, run handlers, stream their items home.

`Worker` is what every request plane calls into (`RequestService`). An admitted stream is one task
in the worker's nursery: open the stream to the caller, then run the handler inside the context's scope. A
handler is user code: whatever it raises ends its own stream with a typed error and one log line.
Its items go to an `OutgoingAnswer`: a handler that pushes calls it from wherever they are made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final

import msgspec
import trio

from ..context import Context, Reason, State
from ..env import Env
from ..errors import (
    DeadlineError,
    KilledError,
    OverloadedError,
    RequestError,
    TrinamoError,
    UnavailableError,
    UnknownModelError,
)
from ..logs.fields import name_task
from ..logs.notices import log_request
from ..metrics.metrics import SUCCESS
from ..nurseries import forget_frames, open_nursery
from ..planes import CallHome
from ..protocol.discovery.instances import EndpointName
from ..protocol.streams.request import (
    AckStatus,
    Envelope,
    RequestAnswer,
    RequestKind,
    raise_for_nack,
)
from ..sinks import Changes
from ..traces.ring import Traces
from .endpoint import Endpoint, single_error
from .metrics import WorkerMetrics, WorkerRecord
from .outgoing import OutgoingAnswer

_log = logging.getLogger("trinamo.worker")
_CANCELLED_MAX: Final = 4096
"""Cancels remembered for requests that have not arrived; the oldest are forgotten first."""


class Worker:
    """Serves endpoints of one instance; bounded by `requests_max` requests at once."""

    def __init__(
        self,
        call_home: CallHome,
        env: Env,
        *,
        instance_id: str,
        requests_max: int = 256,
        stop_grace_s: float = 5.0,
        cancelled_ttl_s: float = 60.0,
        metrics: WorkerMetrics | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.instance_id = instance_id
        self._call_home = call_home
        self._env = env
        self.requests_max = requests_max
        self._stop_grace_s = stop_grace_s
        self._cancelled_ttl_s = cancelled_ttl_s
        self._metrics = metrics or WorkerMetrics(env)
        self._traces = traces or Traces(env.clock, 0)
        self._endpoints: dict[str, Endpoint] = {}
        self._active: dict[str, Context] = {}
        self._placeless: set[str] = set()
        """Those of them that take no place."""
        self._listeners: dict[str, Callable[[State], None]] = {}
        """To each of their contexts; the two would keep each other alive."""
        self._cancelled: dict[str, float] = {}
        self._nursery: trio.Nursery | None = None
        self._draining = False
        self._idle = Changes()
        self._encode = msgspec.msgpack.Encoder().encode

    # --- what it serves ---

    def add(self, endpoint: Endpoint) -> None:
        """Serve `endpoint`; one of each name."""
        key = str(endpoint.name)
        if key in self._endpoints:
            raise RequestError(f"endpoint {key} is served already")
        self._endpoints[key] = endpoint

    def remove(self, name: EndpointName) -> None:
        """Serve `name` no more; requests under way go on."""
        del self._endpoints[str(name)]

    @property
    def active_count(self) -> int:
        """Requests being served; zero at quiescence."""
        return len(self._active)

    @property
    def admitted_count(self) -> int:
        """Those of them that `requests_max` bounds: without what takes no place."""
        return len(self._active) - len(self._placeless)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    # --- RequestService: called by the request plane ---

    def admit(
        self,
        envelope: Envelope,
        payload: bytes,
        answering: CallHome | None = None,
        *,
        by_worker: bool = True,
    ) -> RequestAnswer:
        """Decide about a streaming request; if accepted its task is started. Synchronous.

        Its streams are opened by `answering`; without, the worker calls home. A probe starts nothing and is no request: it is not counted, and finds room in a full worker.
        """
        if envelope.kind is RequestKind.PROBE:
            found = self._absence(envelope) or RequestAnswer(
                id=envelope.id, status=AckStatus.ACCEPTED
            )
            return msgspec.structs.replace(found, instance_id=self.instance_id)
        ack, request = self._judge(envelope, payload, by_worker=by_worker)
        if ack.status is not AckStatus.ACCEPTED:
            self._metrics.refused(self._label(envelope), str(ack.status))
            return ack
        assert self._nursery is not None, "admitted before run()"
        endpoint = self._endpoints[envelope.endpoint]
        context = self._begin(envelope)
        record = self._metrics.begin(envelope.endpoint, context.trace, is_stream=True)
        call_home = answering or self._call_home
        self._nursery.start_soon(
            self._serve_stream, endpoint, envelope, request, context, record, call_home
        )
        return ack

    async def answer(self, envelope: Envelope, payload: bytes, *, by_worker: bool = True) -> bytes:
        """Run a unary request; raises what it failed with, always a `TrinamoError`."""
        ack, request = self._judge(envelope, payload, by_worker=by_worker)
        if ack.status is not AckStatus.ACCEPTED:
            self._metrics.refused(self._label(envelope), str(ack.status))
            raise_for_nack(ack)
        endpoint = self._endpoints[envelope.endpoint]
        context = self._begin(envelope)
        record = self._metrics.begin(envelope.endpoint, context.trace, is_stream=False)
        self._name_task(envelope, endpoint)
        result, error = b"", None
        try:
            try:
                with context.scope:
                    result = self._encode(await endpoint.run_unary(request, context))
            except BaseException as raised:  # noqa: BLE001 -- handlers are user code
                error = single_error(raised, f"request {envelope.id}")
            error = self._conclude(context, error)
            if error is not None:
                record.failed(error)
                raise error
            record.outcome = SUCCESS
            return result
        finally:
            self._end(context, record)

    def cancel(
        self,
        request_id: str,
        reason: Reason = Reason.CONSUMER_DROPPED,
        *,
        has_arrived: bool = False,
    ) -> None:
        """Kill a request, or remember that it is not wanted should it still arrive."""
        active = self._active.get(request_id)
        if active is not None:
            active.kill(reason)
        if active is not None or has_arrived:
            return
        now = trio.current_time()
        # Oldest first, as they were put in: all have the same time to live.
        self._cancelled.pop(request_id, None)
        while self._cancelled:
            oldest = next(iter(self._cancelled))
            if self._cancelled[oldest] > now and len(self._cancelled) < _CANCELLED_MAX:
                break
            del self._cancelled[oldest]
        self._cancelled[request_id] = now + self._cancelled_ttl_s

    def _judge(
        self, envelope: Envelope, payload: bytes, *, by_worker: bool
    ) -> tuple[RequestAnswer, Any]:
        absent = self._absence(envelope)
        if absent is not None:
            return absent, None
        endpoint = self._endpoints[envelope.endpoint]
        request: Any = None
        status, message = AckStatus.ACCEPTED, ""
        if endpoint.for_workers and not by_worker:
            status = AckStatus.INVALID
            message = f"{endpoint.name} is for workers, and your certificate says that you are none"
        elif self.admitted_count >= self.requests_max and not endpoint.for_workers:
            status = AckStatus.OVERLOADED
            message = f"worker.requests_max {self.requests_max} are in flight"
        elif self._cancelled.get(envelope.id, -math.inf) > trio.current_time():
            status, message = AckStatus.INVALID, "the request was cancelled before it arrived"
        elif envelope.id in self._active:
            status, message = AckStatus.INVALID, f"request id {envelope.id} is in use"
        else:
            try:
                request = endpoint.accept(envelope, payload)
            except OverloadedError as error:
                status, message = AckStatus.OVERLOADED, error.message
            except UnknownModelError as error:
                status, message = AckStatus.UNKNOWN_MODEL, error.message
            except RequestError as error:
                status, message = AckStatus.INVALID, error.message
            except BaseException as raised:  # noqa: BLE001 -- engines and types of requests are user code
                single = single_error(raised, f"request {envelope.id}")
                status, message = AckStatus.FAILED, single.message
        return RequestAnswer(id=envelope.id, status=status, message=message), request

    def _absence(self, envelope: Envelope) -> RequestAnswer | None:
        """A refusal that a retry cannot change: it leaves, or is not the one that is meant."""
        endpoint = self._endpoints.get(envelope.endpoint)
        for_workers = endpoint is not None and endpoint.for_workers
        if self._nursery is None or (self._draining and not for_workers):
            status, message = AckStatus.DRAINING, "this worker is shutting down"
        elif endpoint is None:
            status, message = AckStatus.UNKNOWN_ENDPOINT, f"no endpoint {envelope.endpoint} here"
        elif envelope.instance_id not in ("", self.instance_id):
            status = AckStatus.UNKNOWN_ENDPOINT
            message = f"this is instance {self.instance_id}, not {envelope.instance_id}"
        else:
            return None
        return RequestAnswer(id=envelope.id, status=status, message=message)

    def _label(self, envelope: Envelope) -> str:
        # A stranger's text must not become a time series of its own.
        return envelope.endpoint if envelope.endpoint in self._endpoints else "unknown"

    def _begin(self, envelope: Envelope) -> Context:
        context = Context(envelope.id)
        if envelope.deadline_s:
            context.limit(trio.current_time() + envelope.deadline_s)
        context.trace = self._traces.begin(envelope.id, envelope.traceparent)

        def changed(state: State) -> None:
            kind = "cancel.kill" if state is State.KILLED else "cancel.stop"
            self._env.note(kind, request=envelope.id, reason=str(context.reason))
            if state is State.STOPPED:
                grace_until = trio.current_time() + self._stop_grace_s
                context.scope.deadline = min(context.deadline, grace_until)

        context.on_change(changed)
        self._listeners[envelope.id] = changed
        self._active[envelope.id] = context
        if self._endpoints[envelope.endpoint].for_workers:
            self._placeless.add(envelope.id)
        self._env.note("worker.begin", request=envelope.id)
        return context

    def _name_task(self, envelope: Envelope, endpoint: Endpoint) -> None:
        """Say in the lines of this task whose request it is, who serves it, and by which model."""
        fields = {"model": endpoint.model} if endpoint.model else {}
        name_task(request_id=envelope.id, instance_id=self.instance_id, **fields)

    def _end(self, context: Context, record: WorkerRecord) -> None:
        del self._active[context.id]
        self._placeless.discard(context.id)
        context.off_change(self._listeners.pop(context.id))
        if context.reason is not None:
            record.cancelled(context.reason)
        record.end()
        self._env.note("worker.end", request=context.id, outcome=record.outcome)
        log_request(
            _log,
            record.outcome,
            is_success=record.outcome == SUCCESS,
            duration_s=record.duration_s,
            detail=record.detail,
            endpoint=record.endpoint,
        )
        if not self._active:
            self._idle.notify()

    # --- one stream ---

    async def _serve_stream(
        self,
        endpoint: Endpoint,
        envelope: Envelope,
        request: Any,
        context: Context,
        record: WorkerRecord,
        call_home: CallHome,
    ) -> None:
        self._name_task(envelope, endpoint)
        try:
            assert envelope.response is not None, "checked when the envelope was decoded"
            async with call_home.call_home(envelope.response, context) as sender:
                answer = OutgoingAnswer(sender, self._encode, record.tally, record.leg, context)
                error = await self._run_handler(
                    endpoint, envelope, request, context, answer, call_home
                )
                if not answer.is_complete:
                    error = self._conclude(context, error)
                if error is None:
                    record.outcome = SUCCESS
                    answer.finish()
                else:
                    record.failed(error)
                    sender.fail(error)
                    forget_frames(error)
        except BaseException as raised:  # noqa: BLE001 -- whatever a carrier raises ends its stream only
            # The caller sees its own end of this: no call came, or the rest did not.
            lost = single_error(raised, f"request {envelope.id}")
            record.failed(self._conclude(context, lost) or lost)
        finally:
            self._end(context, record)

    async def _run_handler(
        self,
        endpoint: Endpoint,
        envelope: Envelope,
        request: Any,
        context: Context,
        answer: OutgoingAnswer,
        call_home: CallHome,
    ) -> TrinamoError | None:
        """Run it to its end; what it failed with."""
        try:
            # Inside the `try`: a group of a Cancelled and an error is an `Exception` only once
            # the scope has taken its Cancelled out.
            with context.scope:
                if envelope.request is None:
                    await endpoint.run_stream(request, context, answer)
                else:
                    async with call_home.receive_input(envelope.request, context) as raw:
                        # Now, because the caller sends nothing before: the first item may need it.
                        answer.open()
                        await endpoint.run_bidirectional(request, context, raw, answer)
        except BaseException as raised:  # noqa: BLE001 -- handlers are user code
            return single_error(raised, f"request {envelope.id}")
        return None

    def _conclude(self, context: Context, error: TrinamoError | None) -> TrinamoError | None:
        """What a request ends with whose handler is over, with `error` if it raised; None: it is complete.

        Whoever ended the request decides, not what the handler made of it. One whose time is up is
        killed here.
        """
        cut = context.cut_by
        if cut is not None:
            who = "frontend" if cut is Reason.FRONTEND_SHUTDOWN else "worker"
            message = f"the {who} shut down before the answer was complete"
            return UnavailableError(message, definite=False)
        if context.is_killed:
            return KilledError("the request was killed", reason=str(context.reason))
        scope = context.scope
        if not (scope.cancelled_caught or (error is not None and scope.cancel_called)):
            return error
        is_late = trio.current_time() >= context.deadline
        context.kill(Reason.DEADLINE)
        if is_late:
            return DeadlineError("the request's time is up")
        return DeadlineError(f"the handler did not finish within {self._stop_grace_s:g} s")

    # --- its life ---

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the handlers' tasks until cancelled."""
        async with open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def wait_idle(self) -> None:
        """Return once nothing is being served. Safe to cancel."""
        while self._active:
            await self._idle.wait()

    def refuse_new(self) -> None:
        """From now on answer `draining`. Synchronous, final."""
        self._draining = True

    def stop_all(self) -> None:
        """Ask every request to finish early.

        Whoever asked has what was sent, and `UnavailableError`: the rest is asked for elsewhere.
        """
        for active in tuple(self._active.values()):
            active.stop(Reason.WORKER_SHUTDOWN)

    def kill_all(self) -> None:
        """End every request now."""
        for active in tuple(self._active.values()):
            active.kill(Reason.WORKER_SHUTDOWN)
