"""One request at an upstream, from the head of its answer to the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...context import Context
from ...errors import RequestError
from ...protocol.openai.generate import Delta, FinishReason
from ...sinks import Sink, Sleeper
from .answers import StreamedAnswer, WholeAnswer, refused
from .calls import Call, Calls
from .connections import Connection, Connections
from .readers import PushedStream, Readers
from .refusals import refusal_of
from .response import Response

_OK: Final = 200
_REFUSAL_BYTES_MAX: Final = 1 << 20


class UpstreamAnswer:
    """The answer to one request: `forward` it once, then `close` it."""

    __slots__ = (
        "_answer",
        "_begun",
        "_calls",
        "_connection",
        "_connections",
        "_context",
        "_deltas",
        "_readers",
        "_response",
    )

    def __init__(
        self,
        connections: Connections,
        calls: Calls,
        readers: Readers | None,
        context: Context,
        answer: StreamedAnswer | WholeAnswer,
    ) -> None:
        self._connections, self._calls, self._readers = connections, calls, readers
        self._context, self._answer = context, answer
        self._connection: Connection | None = None
        self._response = Response()
        self._begun = b""
        self._deltas: list[Delta] = []
        """All of it, if it is whole already."""

    def take(self, connection: Connection, response: Response, begun: bytes) -> None:
        """Its head has come, and `begun` of its body."""
        self._connection, self._response, self._begun = connection, response, begun

    async def begin(self, call: Call) -> None:
        """Read what is not streamed; raise the error that its status stands for, if not the client's."""
        connection, response, answer = self._connection, self._response, self._answer
        assert connection is not None, "its head has come"
        if response.status != _OK:
            kept = WholeAnswer(_REFUSAL_BYTES_MAX)
            await _read_whole(connection, response, self._begun, kept, call.heard)
            error = refusal_of(response.status, response.headers, kept.body)
            self._settle()
            if error is not None:
                raise error
            self._deltas = refused(response.status, kept.body)
            return
        kind = response.headers.get(b"content-type", b"").lower()
        # The client's to mend, and no fault of the upstream, which understood the body otherwise.
        if isinstance(answer, StreamedAnswer):
            if b"json" in kind:
                raise RequestError("the upstream does not stream this answer", param="stream")
            return
        if b"event-stream" in kind:
            raise RequestError("the upstream only streams this answer", param="stream")
        await _read_whole(connection, response, self._begun, answer, call.heard)
        self._deltas = answer.finish()
        self._settle()

    async def forward(self, sink: Sink[Delta]) -> None:
        """Hand its deltas to `sink`; returns at the complete end.

        Stopped, it ends the request at the upstream, and the answer with `CANCELLED`; cancelled,
        likewise without a word. Raises what ended it, `DisconnectedError` if it stalled.
        """
        if self._deltas:
            sink.take(self._deltas)
            return
        answer = self._answer
        if self._connection is not None and isinstance(answer, StreamedAnswer):
            with self._calls.call(self._context) as call:
                call.is_begun = True
                await self._stream(call, self._connection, answer, sink)
                self._settle()
                return
            self.close()
            await self._calls.left(call)
        sink.take([Delta(finish_reason=FinishReason.CANCELLED)])

    def close(self) -> None:
        """Close the connection, unless it was given back. No checkpoint."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _settle(self) -> None:
        if self._connection is not None:
            self._connections.take_back(self._connection, self._response)
            self._connection = None

    async def _stream(
        self, call: Call, connection: Connection, answer: StreamedAnswer, sink: Sink[Delta]
    ) -> None:
        if self._readers is not None and connection.plain is not None:
            pushed = PushedStream(self._readers, connection.plain, self._response, answer, call)
            await pushed.run(self._begun, sink)
            return
        room, response, data = Sleeper(), self._response, self._begun
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
                response.cut()


async def _read_whole(
    connection: Connection,
    response: Response,
    begun: bytes,
    whole: WholeAnswer,
    heard: Callable[[], None],
) -> None:
    whole.feed(begun)
    while not response.is_complete:
        data = await connection.receive()
        heard()
        if not data:
            response.end()
        else:
            whole.feed(response.feed(data))
