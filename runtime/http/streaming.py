"""One answer to one client: whole, or as a stream of events that can break.

The engine's deltas come to a sink, which makes events of them and writes them to the client at
once. So the task of the request, which is in `AnswerDelivery.run`, sleeps from the first delta to the
end. The status goes out with the first event, so an early failure has its real status; later errors
become the last events, and what ends a whole stream, such as `[DONE]`, does not follow. Answers of
upstreams are passed on as they come; a refusal of theirs, such as a 400 that names a parameter, is
the answer, too: with its status and its words. What this file does not do: know who answers
(`chat.py`), and hold what a slow client has not taken yet (`transports/http/output.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final

import attrs
import msgspec
import trio

from ..config.http import HttpConfig
from ..context import Context, Reason
from ..errors import (
    DeadlineError,
    EngineError,
    KilledError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
)
from ..metrics.metrics import SUCCESS
from ..nurseries import forget_frames
from ..protocol.openai.answers import AnswerFormat, PromptTokensDetails, Usage, encode_data
from ..protocol.openai.generate import Delta
from ..protocol.openai.passing import COMMENT
from ..sinks import Sink
from .bodies import Body
from .comments import EVENT_HEADERS, EventStream
from .exchanges import Headers, HttpExchange, respond_error
from .metrics import SENT_BACK, RequestRecord
from .status import OPENAI, Dialect, ErrorAnswer, answer_error

_OVERSHOOT_TOKENS: Final = 4096
"""What a delta may bring behind the last token that was asked for."""
DELTA_BYTES: Final = 64
"""What a delta takes beside its text, and a log probability beside its token."""
_LOGPROB_BYTES: Final = 128
_ID_BYTES: Final = 8


def check_complete(*, is_complete: bool) -> None:
    """An answer that was cut short must not look whole."""
    if not is_complete:
        raise EngineError("the engine ended its answer without a finish reason")


def kept_bytes(delta: Delta) -> int:
    """What a delta takes until its answer is whole."""
    told = sum(1 + len(each.top) for each in (*delta.logprobs, *delta.prompt_logprobs))
    ids = len(delta.prompt_token_ids)
    return DELTA_BYTES + len(delta.text) + _LOGPROB_BYTES * told + _ID_BYTES * ids


class AnswerSink(Sink[Delta], ABC):
    """Makes one answer of deltas; `finish` or `fail` ends it."""

    def __init__(self, to: AnswerDelivery) -> None:
        super().__init__()
        self._to, self._exchange, self._record = to, to.exchange, to.record
        self._left, self._size = to.count_max, 0
        self._is_complete = False
        self.has_written = False
        """The client has a part of the answer, which is more than comments."""

    @abstractmethod
    def finish(self) -> None:
        """Send what is left. Raises `EngineError`, having sent nothing, if it is no whole answer."""

    def fail(self, answer: ErrorAnswer) -> None:
        """Tell the client what went wrong, as far as that is still possible."""
        if self._exchange.status:
            self._exchange.finish(self._error_events(answer))
        else:
            respond_error(self._exchange, answer, self._to.headers)

    def release(self) -> None:
        """The answer is over, whatever became of it: let go of what leads back here."""

    def _error_events(self, answer: ErrorAnswer) -> bytes:
        return encode_data(answer.to_body(), answer.dialect.error_event)

    def _start(self) -> None:
        # A comment has started it already, perhaps while its request waited.
        if not self._exchange.status:
            self._exchange.start(200, EVENT_HEADERS + self._to.headers)

    def write(self, data: bytes, *, is_comment: bool = False) -> bool:
        """Send it; whether there is room for more."""
        if not data:
            return True
        self._start()
        self.has_written |= not is_comment
        if self._to.stream is not None:
            self._to.stream.written()
        return self._exchange.write(data)

    def restart(self) -> None:
        self._record.prompt(0)
        self._record.output_tokens, self._is_complete = 0, False
        self._record.finish_reasons.clear()
        self._left, self._size = self._to.count_max, 0

    def _bound(self, count: int, size: int = 0) -> None:
        """So many tokens and deltas have come, and so many bytes of them are kept; raise if too many."""
        self._left -= count
        if self._left < 0:
            raise RemoteProtocolError(
                f"the answer goes on behind the {self._to.tokens_max} tokens that it may have"
            )
        if size:
            self._size += size
            bytes_max = self._to.config.answer_bytes_max
            if self._size > bytes_max:
                raise EngineError(f"the answer is longer than http.answer_bytes_max {bytes_max}")
            self._to.kept.hold(self._size)

    def _count(self, delta: Delta) -> None:
        if delta.prompt_tokens:
            self._record.prompt(delta.prompt_tokens, delta.cached_tokens)
        if delta.finish_reason is not None:
            self._is_complete = True
            self._record.finish_reasons.append(delta.finish_reason)

    @property
    def _usage(self) -> Usage:
        record = self._record
        prompt, output = record.prompt_tokens, record.output_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(record.cached_tokens))


class EventSink(AnswerSink):
    """Writes the events of each delta. Those that say that it was the last one wait for the end."""

    def __init__(self, to: AnswerDelivery, make_form: Callable[[], AnswerFormat]) -> None:
        super().__init__(to)
        self._form = make_form()
        self._has_waited = False
        self._last = b""
        to.exchange.on_room(self.room_again)

    def take(self, items: list[Delta]) -> bool:
        tokens, form = 0, self._form
        for delta in items:
            tokens += len(delta.token_ids)
            if delta.prompt_tokens or delta.finish_reason is not None:
                self._count(delta)
        self._bound(tokens + len(items), sum(map(kept_bytes, items)) if form.keeps_text else 0)
        self._record.token(tokens)
        events = [form.add_event(delta) for delta in items]
        if self._last:
            events.insert(0, self._last)
        data = events[0] if len(events) == 1 else b"".join(events)
        if self._is_complete and form.ends_itself and not self._has_waited:
            # Once: whatever comes after it all the same is not kept without a bound.
            self._has_waited, self._last = True, data
            return True
        self._last = b""
        return self.write(data)

    def finish(self) -> None:
        check_complete(is_complete=self._is_complete)
        self._start()
        # Where it fails instead, what waited is not sent: it says that the answer is whole.
        self._exchange.finish(self._last + self._form.end_events(self._usage))

    def _error_events(self, answer: ErrorAnswer) -> bytes:
        return self._form.error_events(answer.status, answer.detail)


class BodySink(AnswerSink):
    """Keeps the text, and answers with all of it at the end."""

    keeps_all = True

    def __init__(self, to: AnswerDelivery, make_form: Callable[[], AnswerFormat]) -> None:
        super().__init__(to)
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
        self._bound(tokens + len(items), sum(map(kept_bytes, items)))
        self._record.token(tokens)
        return True

    def finish(self) -> None:
        check_complete(is_complete=self._is_complete)
        self._exchange.respond(200, self._form.to_body(self._usage), self._to.headers)


@attrs.define(eq=False)
class AnswerDelivery:
    """The way of one request's answer to its client, and its books.

    A client that leaves ends the request as `http.on_disconnect` says. An answer that is not made
    by the context's deadline is killed. How long a client may take to read, its connection
    decides: one that was cut off counts as gone.
    """

    exchange: HttpExchange
    record: RequestRecord
    headers: Headers
    """They are read with the answer's first byte."""
    kept: Body
    """Its share of what all answers may keep."""
    config: HttpConfig
    context: Context
    tokens_max: int = 1 << 20
    """Nobody who makes an answer is trusted to end it."""
    may_wait: bool = False
    """Whether a request that every worker refuses for want of room is sent back, to wait."""
    dialect: Dialect = OPENAI
    names: Mapping[str, str] = attrs.field(factory=dict)
    """As `BodyRequest.names`."""
    stream: EventStream | None = None
    """Whose silence brings comments."""
    _is_made: bool = False

    @property
    def count_max(self) -> int:
        """Tokens and deltas together: each token may come by itself, and the last ones in one."""
        return 2 * self.tokens_max + _OVERSHOOT_TOKENS

    async def run(self, sink: AnswerSink, answer: Callable[[], Awaitable[None]]) -> None:
        """Await `answer`, which hands all of it to `sink`, then the last byte; used once.

        Does not raise: what goes wrong is told to the client, as far as it is there, and becomes the outcome. With the outcome `SENT_BACK` nothing
        was told. Cancelled from outside, `answer` has unwound before this leaves.
        """
        exchange, scope = self.exchange, self.context.scope
        exchange.on_gone(partial(self._client_left, sink))
        error: Exception | None = None
        caught: Exception | None = None
        try:
            with scope:
                await answer()
            if not (scope.cancelled_caught or self.context.cut_by or exchange.is_gone):
                sink.finish()
        except Exception as raised:  # noqa: BLE001 -- whatever it is, the client is told
            error = caught = raised
        if self.context.cut_by or (error is None and scope.cancelled_caught):
            error = self.end_cut(self.context)
        self._is_made = True
        # Once its client has a part of it, it is told: begun anew, the answer would follow itself.
        is_touched = self.context.is_stopped or exchange.is_gone or sink.has_written
        if self.may_wait and type(error) is OverloadedError and error.definite and not is_touched:
            self.record.outcome, self.record.detail = SENT_BACK, error.message
            sink.release()
            forget_frames(caught)
            return
        try:
            if not exchange.is_gone:
                if error is not None:
                    sink.fail(self._explain(error))
                await exchange.sent()
            self._settle(error)
        finally:
            sink.release()
            if self.record.fault is None:
                forget_frames(caught)

    def _explain(self, error: Exception) -> ErrorAnswer:
        answer = answer_error(
            error,
            request_id=self.context.id,
            tells_detail=self.config.engine_error_detail,
            dialect=self.dialect,
        )
        told = answer.detail.param or ""
        # A turn's number is not that of the message, or item, of which it was made.
        param = self.names.get(told) or self.names.get(told.partition("[")[0])
        if param is None:
            return answer
        return attrs.evolve(answer, detail=msgspec.structs.replace(answer.detail, param=param))

    def _client_left(self, sink: AnswerSink) -> None:
        self.record.disconnected()
        if self._is_made:
            return
        if self.config.on_disconnect == "stop":
            self.context.stop(Reason.CLIENT_DISCONNECT)
            scope = self.context.scope
            scope.deadline = min(scope.deadline, trio.current_time() + self.config.stop_grace_s)
            # What is written from now on is dropped, so there is room.
            sink.room_again()
        else:
            self.context.kill(Reason.CLIENT_DISCONNECT)

    def end_cut(self, context: Context) -> KilledError | DeadlineError:
        """Kill a request that was cut off, unless that is what cut it, and say who did: a shutdown, a kill, its deadline.

        `context` is the request's own, or that of one of its choices.
        """
        reason = context.cut_by
        if reason is None:
            if not (context.is_killed or self.exchange.is_gone):
                self.context.kill(Reason.DEADLINE)
                return DeadlineError("the answer was not complete in the time that it had")
            self.context.kill(Reason.CLIENT_DISCONNECT)
            reason = context.kill_reason or Reason.CONSUMER_DROPPED
        return KilledError(f"the request was ended: {reason.value}", reason=reason)

    def _settle(self, error: Exception | None) -> None:
        record, reason = self.record, self.context.reason
        if reason is not None:
            record.cancelled(reason)
        if self.exchange.is_gone:
            record.outcome = Reason.CLIENT_DISCONNECT
        elif error is None:
            record.outcome = SUCCESS
        else:
            answer = self._explain(error)
            record.outcome, record.detail = answer.code, str(error)
            is_ours = answer.status == HTTPStatus.INTERNAL_SERVER_ERROR
            if is_ours and not isinstance(error, EngineError):
                # Where an engine failed, its worker's log tells.
                record.fault = error


_REFUSAL: Final = "the upstream refuses the request"
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


class PassedBody(AnswerSink):
    """Keeps the pieces of one body, which whoever sends them has bounded, and answers with all."""

    keeps_all = True

    def __init__(self, to: AnswerDelivery) -> None:
        super().__init__(to)
        self._pieces: list[bytes] = []
        self._status = 200

    def restart(self) -> None:
        super().restart()
        self._pieces.clear()
        self._status = 200

    def take(self, items: list[Delta]) -> bool:
        for delta in items:
            self._count(delta)
            self._status = delta.status or self._status
            self._bound(0, DELTA_BYTES + len(delta.raw))
            self._pieces.append(delta.raw)
        return True

    def _count(self, delta: Delta) -> None:
        super()._count(delta)
        self._bound(1 + delta.output_tokens)
        self._record.token(delta.output_tokens)

    def finish(self) -> None:
        check_complete(is_complete=self._is_complete)
        if self._status >= 400:
            raise RequestError(f"{_REFUSAL} with {self._status}")
        self._exchange.respond(200, b"".join(self._pieces), self._to.headers)

    def fail(self, answer: ErrorAnswer) -> None:
        # Of an answer that has begun a refusal is the end: whoever was to go on with it did not.
        if not (self._status >= 400 and self._is_complete) or self.has_written:
            super().fail(answer)
        elif self._exchange.status:
            # Line ends are between members, as JSON has none in a string.
            line = b"".join(self._pieces).translate(_ONE_LINE)
            self._exchange.finish(encode_data(line, answer.dialect.error_event))
        else:
            self._exchange.respond(self._status, b"".join(self._pieces), self._to.headers)


class PassedEvents(PassedBody):
    """Writes events on as they come."""

    keeps_all = False

    def __init__(self, to: AnswerDelivery) -> None:
        super().__init__(to)
        to.exchange.on_room(self.room_again)

    def take(self, items: list[Delta]) -> bool:
        if items[0].status:
            # A refusal is no stream: it is kept, and answered whole.
            return super().take(items)
        events = [delta for delta in items if delta.raw != COMMENT]
        for delta in events:
            self._count(delta)
        if events:
            return self.write(b"".join([delta.raw for delta in events]))
        # Before the answer, whatever an upstream sends to keep a connection open, an early failure keeps its real
        # status, and another upstream may answer; a silence that gets long ends with a comment of ours.
        return not self._exchange.status or self.write(COMMENT, is_comment=True)

    def finish(self) -> None:
        if self._status >= 400:
            super().finish()
        if not self.has_written:
            raise EngineError("the upstream ended its answer without an event")
        check_complete(is_complete=self._is_complete)
        self._exchange.finish(self._to.dialect.stream_end)
