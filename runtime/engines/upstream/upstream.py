"""One upstream: the client's body out, its answer back, unread; watched while it is open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final

import attrs
import trio

from ...config.upstream import UpstreamConfig
from ...context import Context, State
from ...errors import DisconnectedError, RequestError, TrinamoError
from ...nurseries import open_nursery
from ...protocol.openai.generate import Delta, FinishReason, GenerateRequest
from ...protocol.openai.passing import (
    Renaming,
    decode_passed,
    with_assistant_prefix,
    with_model,
)
from ...sinks import Sink, Sleeper
from .address import Address, find_address
from .answers import StreamedAnswer, WholeAnswer, refused
from .connections import Connection, Connections, request_head
from .refusals import refusal_of
from .response import Response
from .watch import UpstreamView

__all__ = ["Upstream", "open_upstream"]

_CHAT: Final = "/v1/chat/completions"
_PATHS: Final = (_CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses")
_REFUSAL_BYTES_MAX: Final = 1 << 20
_DRAIN_S: Final = 1.0
_PREFIXES: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "llamacpp": {},
}
"""How a server is told to go on with the last turn, beside the turn itself."""


@attrs.define(eq=False)
class _Call:
    """One request under way, as the watch over stalls sees it."""

    scope: trio.CancelScope
    heard_at: float
    is_begun: bool = False
    is_paused: bool = False
    is_stalled: bool = False

    def heard(self) -> None:
        self.heard_at = trio.current_time()


class Upstream:
    """One server: requests go to it by `forward`. Made by `open_upstream`, which watches it."""

    def __init__(self, address: Address, section: UpstreamConfig, nursery: trio.Nursery) -> None:
        self.address = address
        self._section = section
        self._nursery = nursery
        self._connections = Connections(address, section.connect_timeout_s)
        self.view = UpstreamView(
            Connections(address, section.connect_timeout_s), section.health_failures_max
        )
        """Health, load and models."""
        self._calls: dict[_Call, None] = {}

    @property
    def in_flight(self) -> int:
        """Requests under way; zero at quiescence."""
        return len(self._calls)

    async def forward(
        self, request: GenerateRequest, model: str, context: Context, sink: Sink[Delta]
    ) -> None:
        """Send the request's body, for the upstream's `model`, and hand the answer to `sink`.

        Raises `RequestError` for a body that cannot be sent, `TransportError`, `OverloadedError`,
        `UnavailableError` or `RemoteProtocolError` where another upstream may do it. Stopped, it
        ends the request at the upstream, and the answer with `CANCELLED`; cancelled, likewise
        without a word.
        """
        if request.path not in _PATHS:
            raise RequestError("this model takes requests of OpenAI's API alone, with their bodies")
        asked = decode_passed(request.body)
        body = self._body(request, asked.model, model)
        renaming = Renaming(model, asked.model) if asked.model not in (None, model) else None
        answer: StreamedAnswer | WholeAnswer
        if asked.stream:
            answer = StreamedAnswer(
                self._section.event_bytes_max,
                renaming,
                is_resumed=request.is_begun,
            )
        else:
            answer = WholeAnswer(self._section.answer_bytes_max, renaming)
        head = request_head(
            self.address,
            "POST",
            self.address.path + request.path.removeprefix("/v1"),
            len(body),
            _told(context),
        )
        with self._call(context) as call:
            await self._run(call, head, body, answer, sink)
            return
        if call.is_stalled:
            said = "its answer" if call.is_begun else "the beginning of its answer"
            raise DisconnectedError(f"the upstream {self.address.url} has stalled in {said}")
        # A kill cancels the scope around this, too.
        await trio.lowlevel.checkpoint()
        sink.take([Delta(finish_reason=FinishReason.CANCELLED)])

    def _body(self, request: GenerateRequest, asked: str | None, model: str) -> bytes:
        body = request.body
        if request.delivered_text:
            extra = _PREFIXES[self._section.resume]
            body = with_assistant_prefix(
                body, request.delivered_text, request.delivered_tokens, extra
            )
        return body if asked == model else with_model(body, model)

    async def _run(
        self,
        call: _Call,
        head: bytes,
        body: bytes,
        answer: StreamedAnswer | WholeAnswer,
        sink: Sink[Delta],
    ) -> None:
        connection, response, begun = await self._connections.request(head, body, heard=call.heard)
        call.is_begun = True
        try:
            if response.status != 200:
                await self._refuse(connection, response, begun, sink)
            elif isinstance(answer, StreamedAnswer):
                await self._stream(call, connection, response, begun, answer, sink)
            else:
                await _read_whole(connection, response, begun, answer)
                sink.take(answer.finish())
        except BaseException:
            connection.close()
            raise
        if response.is_complete:
            self._connections.give(connection, response)
        else:
            self._nursery.start_soon(self._drain, connection, response)

    async def _refuse(
        self, connection: Connection, response: Response, begun: bytes, sink: Sink[Delta]
    ) -> None:
        kept = WholeAnswer(_REFUSAL_BYTES_MAX)
        await _read_whole(connection, response, begun, kept)
        error = refusal_of(response.status, response.headers, kept.body)
        if error is not None:
            raise error
        sink.take(refused(response.status, kept.body))

    async def _stream(
        self,
        call: _Call,
        connection: Connection,
        response: Response,
        data: bytes,
        answer: StreamedAnswer,
        sink: Sink[Delta],
    ) -> None:
        room = Sleeper()
        sink.starts(room.wake)
        receive, feed, take = connection.receive, response.feed, sink.take
        while True:
            deltas = answer.feed(data) if data else []
            if response.is_complete and not answer.is_done and answer.error is None:
                deltas += answer.finish()
            if deltas and not take(deltas) and not answer.is_done:
                call.is_paused = True
                await room.sleep()
                call.is_paused = False
            if answer.error is not None:
                raise answer.error
            if answer.is_done:
                return
            received = await receive()
            call.heard()
            if received:
                data = feed(received)
            else:
                data = b""
                _end(response)

    async def _drain(self, connection: Connection, response: Response) -> None:
        """After `[DONE]` the end of the body follows; then the connection is of use again."""
        try:
            with trio.move_on_after(_DRAIN_S):
                while not response.is_complete:
                    data = await connection.receive()
                    if not data:
                        break
                    response.feed(data)
        except TrinamoError:
            pass
        finally:
            self._connections.give(connection, response)

    # --- what ends a request besides its answer ---

    def _call(self, context: Context) -> _Calling:
        return _Calling(self._calls, context)

    async def run(self) -> None:
        """Look after health and stalls until cancelled; then close what is idle."""
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._watch_stalls)
                while True:
                    await self.view.look()
                    await trio.sleep(self._section.health_interval_s)
        finally:
            self._connections.close()
            self.view.connections.close()

    async def _watch_stalls(self) -> None:
        section = self._section
        pause_s = min(section.stall_timeout_s, section.first_byte_timeout_s) / 4
        while True:
            await trio.sleep(pause_s)
            now = trio.current_time()
            for call in self._calls:
                limit_s = section.stall_timeout_s if call.is_begun else section.first_byte_timeout_s
                if call.is_paused:
                    call.heard_at = now
                elif now - call.heard_at > limit_s:
                    call.is_stalled = True
                    call.scope.cancel()


class _Calling:
    """A scope that Stop, Kill and a stall leave; whoever leaves it early goes on behind it."""

    __slots__ = ("_call", "_calls", "_context")

    def __init__(self, calls: dict[_Call, None], context: Context) -> None:
        self._calls, self._context = calls, context
        self._call = _Call(trio.CancelScope(), trio.current_time())

    def __enter__(self) -> _Call:
        self._calls[self._call] = None
        self._context.on_change(self._cancel)
        self._call.scope.__enter__()
        return self._call

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        del self._calls[self._call]
        self._context.off_change(self._cancel)
        return bool(self._call.scope.__exit__(exc_type, exc, traceback))

    def _cancel(self, _: State) -> None:
        self._call.scope.cancel()


def _end(response: Response) -> None:
    """The connection is closed: a body without a length is complete then."""
    try:
        response.end()
    except DisconnectedError:
        # The answer itself says better whether it is whole.
        response.is_complete = True


def _told(context: Context) -> dict[str, str]:
    told = {"accept-encoding": "identity", "x-request-id": context.id}
    traceparent = getattr(context, "traceparent", "")
    if traceparent:
        told["traceparent"] = traceparent
    return told


async def _read_whole(
    connection: Connection, response: Response, begun: bytes, whole: WholeAnswer
) -> None:
    whole.feed(begun)
    while not response.is_complete:
        data = await connection.receive()
        if not data:
            response.end()
        else:
            whole.feed(response.feed(data))


@asynccontextmanager
async def open_upstream(url: str, section: UpstreamConfig) -> AsyncIterator[Upstream]:
    """The upstream at `url`, watched while the context is open. Raises `ConfigError`."""
    address = find_address(url, section)
    async with open_nursery() as nursery:
        upstream = Upstream(address, section, nursery)
        nursery.start_soon(upstream.run)
        yield upstream
        nursery.cancel_scope.cancel()
