"""One answer to one ASGI client: whole, or as a stream of events that can break.

Three tasks a stream: one drives the engine inside `context.scope`, one writes what is ready to
the client, one waits in `receive()`, because a server tells nobody else that the client has left.
An event that comes alone is sent by the first itself, if the server can do so without waiting, for
waking the writer costs more than sending; what is ready together the writer puts into one send.
The first can be cancelled where the engine waits, at the bound of the backlog, and every
`SENDS_PER_CHECKPOINT` events that it sent itself; the second where it waits for events.
The status is sent only once the first event is there, so an early failure has its real status;
later errors become a last event, and the stream ends without `[DONE]`. What this file does not do:
know what an answer looks like (`chat.py`).
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeVar

import trio

from ..config.config import HttpConfig
from ..context import Context, Reason
from ..errors import EngineError, KilledError
from ..metrics.metrics import SUCCESS, RequestRecord
from ..nurseries import open_nursery
from ..protocol.openai.sse import DONE
from .exchange import (
    UNKNOWN_CONNECTION,
    ConnectionExtension,
    Headers,
    Receive,
    Send,
    send_error,
    send_whole,
)
from .status import ErrorAnswer, answer_error

__all__ = ["AnswerWriter"]

ItemT = TypeVar("ItemT")

EVENT_STREAM_TYPE: Final = b"text/event-stream; charset=utf-8"

BURST_GAP_S: Final = 0.0002
"""An event this soon after one that was sent alone is of a burst, and left to the writer."""
SENDS_PER_CHECKPOINT: Final = 32
"""So an engine that never waits, for a client that always reads, does not hold up the others."""


class AnswerWriter:
    """The way of one request's answer to its client. Use one method, once.

    Neither raises: what goes wrong is told to the client, as far as it is there, and becomes
    `record.outcome`. Cancelled from outside, the engine's generator is closed before they leave.
    Of `config`, `backlog_bytes_max` bounds what is kept for a client that reads slowly: at the bound the
    engine waits. How long a client may take to read, the connection decides: one whose connection
    was cut counts as gone. An answer that is not made within `request_timeout_s` is killed; None is
    no bound.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        context: Context,
        record: RequestRecord,
        config: HttpConfig,
        *,
        headers: Headers,
        explain: Callable[[Exception], ErrorAnswer] = answer_error,
        connection: ConnectionExtension = UNKNOWN_CONNECTION,
    ) -> None:
        self._receive, self._send = receive, send
        self._context, self._record = context, record
        self._headers = headers
        self._explain = explain
        self._send_now, self._is_cut = connection["send_now"], connection["is_cut"]
        self._config = config
        self._backlog_bytes_max = config.backlog_bytes_max
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._is_started = False
        self._is_writer_idle = False
        self._sends = 0
        self._sent_at = -math.inf
        self._is_disconnected = False
        self._is_finished = False
        self._error: Exception | None = None
        self._to_write = trio.Event()
        self._room = trio.Event()
        self._produced = trio.Event()

    async def stream(
        self,
        items: AsyncGenerator[ItemT, None],
        encode: Callable[[ItemT], bytes],
        encode_end: Callable[[], bytes] = bytes,
    ) -> None:
        """Send what `encode` makes of each item as it comes, then `encode_end`'s event, then `[DONE]`.

        Both return whole events, or nothing, and their errors are those of the answer. They are
        plain functions because one more generator on an item's way would cost more than they do.
        """
        async with open_nursery() as nursery:
            self._start_watching(nursery)
            nursery.start_soon(self._produce, items, encode, encode_end)
            await self._write()
            # A client that left is watched until its request has ended.
            await self._produced.wait()
            nursery.cancel_scope.cancel()
        self._settle()

    async def whole(self, make_body: Callable[[], Awaitable[bytes]]) -> None:
        """Send what `make_body` returns as one JSON answer."""
        async with open_nursery() as watcher:
            self._start_watching(watcher)
            body = await self._make(make_body)
            if not self._is_disconnected:
                self._is_finished = True
                if body is None:
                    await self._send_error()
                else:
                    await send_whole(self._send, 200, body, self._headers)
            watcher.cancel_scope.cancel()
        self._settle()

    # --- the engine's side -------------------------------------------------------------------

    async def _make(self, make_body: Callable[[], Awaitable[bytes]]) -> bytes | None:
        try:
            with self._context.scope:
                return await make_body()
            self._error = self._killed()
        except Exception as error:  # noqa: BLE001 -- whatever it is, the client is told
            self._error = error
        return None

    async def _produce(
        self,
        items: AsyncGenerator[ItemT, None],
        encode: Callable[[ItemT], bytes],
        encode_end: Callable[[], bytes],
    ) -> None:
        try:
            with self._context.scope as scope:
                async with aclosing(items):
                    async for item in items:
                        event = encode(item)
                        if not self._send_single(event):
                            await self._offer(event)
                        elif self._sends % SENDS_PER_CHECKPOINT == 0:
                            await trio.lowlevel.checkpoint()
                await self._offer(encode_end())
            if scope.cancelled_caught:
                self._error = self._killed()
        except Exception as error:  # noqa: BLE001 -- whatever it is, the client is told
            self._error = error
        finally:
            self._produced.set()
            self._wake_writer()

    async def _offer(self, event: bytes) -> None:
        if self._is_disconnected or not event:
            return
        self._backlog.append(event)
        self._backlog_bytes += len(event)
        self._wake_writer()
        while self._backlog_bytes >= self._backlog_bytes_max and not self._is_disconnected:
            self._room = trio.Event()
            await self._room.wait()

    def _send_single(self, event: bytes) -> bool:
        """Send an event that comes alone, without a checkpoint; False if the writer must have it.

        Only once the answer is under way and the writer has nothing to do, so order is kept.
        """
        if not (self._is_writer_idle and event and self._send_now is not None):
            return False
        now = trio.current_time()
        if now - self._sent_at < BURST_GAP_S or not self._send_now(event):
            return False
        self._sent_at = now
        self._sends += 1
        return True

    def _wake_writer(self) -> None:
        self._is_writer_idle = False
        self._to_write.set()

    def _killed(self) -> KilledError:
        reason = self._context.kill_reason or Reason.CONSUMER_DROPPED
        return KilledError(f"the request was ended: {reason.value}", reason=reason)

    # --- the clock's side --------------------------------------------------------------------

    def _start_watching(self, watcher: trio.Nursery) -> None:
        watcher.start_soon(self._watch_client)
        if self._config.request_timeout_s is not None:
            watcher.start_soon(self._watch_clock, self._config.request_timeout_s)

    async def _watch_clock(self, timeout_s: float) -> None:
        await trio.sleep(timeout_s)
        if not (self._produced.is_set() or self._is_finished):
            self._context.kill(Reason.DEADLINE)

    # --- the client's side -------------------------------------------------------------------

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._is_finished:
            # hypercorn says the same when an answer is complete; nobody left early.
            return
        self._client_left()
        if self._config.on_disconnect == "stop":
            self._context.stop(Reason.CLIENT_DISCONNECT)
            await trio.sleep(self._config.stop_grace_s)
        self._context.kill(Reason.CLIENT_DISCONNECT)

    def _client_left(self) -> None:
        if not self._is_disconnected:
            self._is_disconnected = True
            self._record.disconnected()
            self._wake_writer()
            self._room.set()

    async def _write(self) -> None:
        batch = await self._take()
        if self._is_disconnected:
            return
        if not batch and self._error is not None:
            self._is_finished = True
            await self._send_error()
            return
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", EVENT_STREAM_TYPE),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *self._headers,
                ],
            }
        )
        while batch:
            await self._send({"type": "http.response.body", "body": batch, "more_body": True})
            self._is_started = True
            batch = await self._take()
        await self._finish()

    async def _finish(self) -> None:
        if self._is_disconnected:
            return
        self._is_finished = True
        last = DONE if self._error is None else self._explain(self._error).to_event()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _take(self) -> bytes:
        """Everything that is ready, joined; empty once nothing more is to be sent."""
        while not (self._backlog or self._produced.is_set() or self._is_disconnected):
            self._to_write = trio.Event()
            self._is_writer_idle = self._is_started
            await self._to_write.wait()
        if self._is_disconnected:
            return b""
        batch = b"".join(self._backlog)
        self._backlog.clear()
        self._backlog_bytes = 0
        self._room.set()
        return batch

    async def _send_error(self) -> None:
        assert self._error is not None
        await send_error(self._send, self._explain(self._error), self._headers)

    # --- accounting ----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Say once how the request ended."""
        if self._is_cut():
            self._client_left()
        reason = self._context.reason
        if reason is not None:
            self._record.cancelled(reason)
        if self._is_disconnected:
            self._record.outcome = Reason.CLIENT_DISCONNECT
            return
        if self._error is None:
            self._record.outcome = SUCCESS
            return
        answer = self._explain(self._error)
        self._record.outcome, self._record.detail = answer.code, str(self._error)
        if answer.is_our_fault and not isinstance(self._error, EngineError):
            # Where an engine failed, its worker's log tells.
            self._record.fault = self._error
