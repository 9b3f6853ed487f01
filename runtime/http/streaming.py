"""One answer to one client: whole, or as a stream of events that can break.

The engine's deltas come to a sink, which makes events of them and writes them to the client at
once. So the task of the request, which is in `Delivery.run`, sleeps from the first delta to the end.
The status goes out with the first event, so an early failure has its real status; later errors
become a last event, and the stream ends without `[DONE]`. What this file does not do: know who
answers (`chat.py`), and hold what a slow client has not taken yet (the exchange).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

from ..config.config import HttpConfig
from ..context import Context, Reason
from ..errors import DeadlineError, EngineError, KilledError, OverloadedError
from ..metrics.frontend import SENT_BACK, RequestRecord
from ..metrics.metrics import SUCCESS
from ..protocol.openai.answers import AnswerFormat, PromptTokensDetails, Usage
from ..protocol.openai.generate import Delta
from ..protocol.openai.sse import DONE
from ..sinks import Sink
from .exchanges import Headers, HttpExchange, respond_error
from .status import ErrorAnswer

EVENT_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerSink(Sink[Delta], ABC):
    """Makes one answer of deltas; `finish` or `fail` ends it. `headers` are read with its first byte."""

    def __init__(self, exchange: HttpExchange, record: RequestRecord, headers: Headers) -> None:
        super().__init__()
        self._exchange, self._record = exchange, record
        self._headers = headers
        self._is_complete = False

    @abstractmethod
    def finish(self) -> None:
        """Send what is left. Raises `EngineError`, having sent nothing, if it is no whole answer."""

    @abstractmethod
    def fail(self, answer: ErrorAnswer) -> None:
        """Tell the client what went wrong, as far as that is still possible."""

    def restart(self) -> None:
        self._record.output_tokens, self._is_complete = 0, False

    def _count(self, delta: Delta) -> None:
        if delta.prompt_tokens:
            self._record.prompt(delta.prompt_tokens, delta.cached_tokens)
        if delta.finish_reason is not None:
            self._is_complete = True

    def _check_complete(self) -> None:
        """An answer that was cut short must not look whole."""
        if not self._is_complete:
            raise EngineError("the engine ended its answer without a finish reason")

    @property
    def _usage(self) -> Usage:
        record = self._record
        prompt, output = record.prompt_tokens, record.output_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(record.cached_tokens))


class EventSink(AnswerSink):
    """Writes an event for each delta. The last one waits for the end, and goes out with `[DONE]`."""

    def __init__(
        self,
        exchange: HttpExchange,
        make_form: Callable[[], AnswerFormat],
        record: RequestRecord,
        headers: Headers,
    ) -> None:
        super().__init__(exchange, record, headers)
        self._form = make_form()
        self._is_started = self._has_waited = False
        self._last = b""
        exchange.on_room(self.resume)

    def take(self, items: list[Delta]) -> bool:
        tokens, add_event = 0, self._form.add_event
        events = [self._last] if self._last else []
        for delta in items:
            tokens += len(delta.token_ids)
            if delta.prompt_tokens or delta.finish_reason is not None:
                self._count(delta)
            events.append(add_event(delta))
        self._record.token(tokens)
        data = events[0] if len(events) == 1 else b"".join(events)
        if self._is_complete and not self._has_waited:
            # Once: whatever comes after it all the same is not kept without a bound.
            self._has_waited, self._last = True, data
            return True
        self._last = b""
        if not data:
            return True
        if not self._is_started:
            self._start()
        return self._exchange.write(data)

    def _start(self) -> None:
        self._is_started = True
        self._exchange.start(200, EVENT_HEADERS + self._headers)

    def finish(self) -> None:
        self._check_complete()
        if not self._is_started:
            self._start()
        self._exchange.finish(self._last + self._form.usage_event(self._usage) + DONE)

    def fail(self, answer: ErrorAnswer) -> None:
        # What waited for the end says that the answer is whole: it is not sent.
        if self._is_started:
            self._exchange.finish(answer.to_event())
        else:
            respond_error(self._exchange, answer, self._headers)


class BodySink(AnswerSink):
    """Keeps the text, and answers with all of it at the end."""

    keeps_all = True

    def __init__(
        self,
        exchange: HttpExchange,
        make_form: Callable[[], AnswerFormat],
        record: RequestRecord,
        headers: Headers,
    ) -> None:
        super().__init__(exchange, record, headers)
        self._make_form, self._form = make_form, make_form()

    def restart(self) -> None:
        super().restart()
        self._form = self._make_form()

    def take(self, items: list[Delta]) -> bool:
        tokens = 0
        for delta in items:
            tokens += len(delta.token_ids)
            self._count(delta)
            self._form.add_text(delta)
        self._record.token(tokens)
        return True

    def finish(self) -> None:
        self._check_complete()
        self._exchange.respond(200, self._form.to_body(self._usage), self._headers)

    def fail(self, answer: ErrorAnswer) -> None:
        respond_error(self._exchange, answer, self._headers)


@attrs.define(eq=False)
class Delivery:
    """The way of one request's answer to its client, and its books.

    A client that leaves ends the request as `http.on_disconnect` says. An answer that is not made
    by the context's deadline is killed. How long a client may take to read, its connection
    decides: one that was cut off counts as gone.
    """

    _exchange: HttpExchange
    _sink: AnswerSink
    _context: Context
    _record: RequestRecord
    _config: HttpConfig
    _explain: Callable[[Exception], ErrorAnswer]
    _may_wait: bool = False
    """Whether a request that every worker refuses for want of room is sent back, to wait."""
    _is_made: bool = False

    async def run(self, forward: Callable[[AnswerSink], Awaitable[None]]) -> None:
        """Await `forward`, which fills the sink, then the last byte; used once.

        Does not raise: what goes wrong is told to the client, as far as it is there, and becomes
        the outcome. With the outcome `SENT_BACK` nothing was told. Cancelled from outside, `forward` has unwound before this leaves.
        """
        exchange, scope = self._exchange, self._context.scope
        exchange.on_gone(self._client_left)
        error: Exception | None = None
        try:
            with scope:
                await forward(self._sink)
            if not (scope.cancelled_caught or self._context.cut_by or exchange.is_gone):
                self._sink.finish()
        except Exception as raised:  # noqa: BLE001 -- whatever it is, the client is told
            error = raised
        if self._context.cut_by or (error is None and scope.cancelled_caught):
            error = self._why_cut()
        self._is_made = True
        if self._may_wait and type(error) is OverloadedError and self._is_untouched(error):
            self._record.outcome, self._record.detail = SENT_BACK, error.message
            return
        if not exchange.is_gone:
            if error is not None:
                self._sink.fail(self._explain(error))
            await exchange.sent()
        self._settle(error)
        # Its traceback holds this frame, and so itself.
        del error

    def _is_untouched(self, error: OverloadedError) -> bool:
        return error.definite and not (self._context.is_stopped or self._exchange.is_gone)

    def _client_left(self) -> None:
        self._record.disconnected()
        if self._is_made:
            return
        if self._config.on_disconnect == "stop":
            self._context.stop(Reason.CLIENT_DISCONNECT)
            scope = self._context.scope
            scope.deadline = min(scope.deadline, trio.current_time() + self._config.stop_grace_s)
            # What is written from now on is dropped, so there is room.
            self._sink.resume()
        else:
            self._context.kill(Reason.CLIENT_DISCONNECT)

    def _why_cut(self) -> KilledError | DeadlineError:
        """Say who ended the request: a shutdown, a kill, or its deadline, which is one."""
        reason = self._context.cut_by
        if reason is None:
            if not (self._context.is_killed or self._exchange.is_gone):
                self._context.kill(Reason.DEADLINE)
                return DeadlineError("the answer was not complete in the time that it had")
            self._context.kill(Reason.CLIENT_DISCONNECT)
            reason = self._context.kill_reason or Reason.CONSUMER_DROPPED
        return KilledError(f"the request was ended: {reason.value}", reason=reason)

    def _settle(self, error: Exception | None) -> None:
        """Say once how the request ended."""
        record, reason = self._record, self._context.reason
        if reason is not None:
            record.cancelled(reason)
        if self._exchange.is_gone:
            record.outcome = Reason.CLIENT_DISCONNECT
        elif error is None:
            record.outcome = SUCCESS
        else:
            answer = self._explain(error)
            record.outcome, record.detail = answer.code, str(error)
            if answer.is_our_fault and not isinstance(error, EngineError):
                # Where an engine failed, its worker's log tells.
                record.fault = error
