"""One request at an upstream, from the head of its answer to the end."""

from __future__ import annotations

from typing import Final

import attrs

from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.context import Context
from trinamo.runtime.errors import OverloadedError, RemoteProtocolError, RequestError, TrinamoError
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason
from trinamo.runtime.sinks import Sink

from .answers import StreamedAnswer, WholeAnswer, refused
from .client import Connections, Response, UpstreamConnection
from .readers import Calls, PushedStream, Readers, UpstreamCall
from .refusals import refusal_of, refusal_unstreamed

_OK: Final = 200
_REFUSAL_BYTES_MAX: Final = 1 << 20


@attrs.define
class KeptBytes:
    """The bytes of whole answers that upstreams have brought, and nobody has taken; 0 at quiescence."""

    bytes_held: int = 0


KEPT: Final = KeptBytes()
"""Of this process: it has one memory, however many upstreams."""


@attrs.define(eq=False)
class UpstreamAnswer:
    """The answer to one request: `forward` it once, then `close` it."""

    _connections: Connections
    _calls: Calls
    _readers: Readers | None
    _section: UpstreamConfig
    _context: Context
    _answer: StreamedAnswer | WholeAnswer
    _connection: UpstreamConnection | None = None
    _response: Response = attrs.field(factory=Response)
    _begun: bytes = b""
    _deltas: list[Delta] = attrs.field(factory=list)
    """All of it, if it is whole already."""
    _held: int = 0
    """What of `KEPT` is its own."""

    def take_end(self, event: bytes) -> None:
        """It is no more than this `event`, with which all its tokens have come."""
        self._deltas = [Delta(finish_reason=FinishReason.LENGTH, raw=event)]

    def take(self, connection: UpstreamConnection, response: Response, begun: bytes) -> None:
        """Its head has come, and `begun` of its body."""
        self._connection, self._response, self._begun = connection, response, begun

    async def begin(self, call: UpstreamCall) -> None:
        """Read what is not streamed; raise the error that its status stands for, if not the client's."""
        response, answer = self._response, self._answer
        coding = response.headers.get(b"content-encoding", b"identity").lower()
        if coding != b"identity":
            raise RemoteProtocolError(f"the upstream encodes its answer: {coding[:40]!r}")
        if response.status != _OK:
            body = await self._read_whole(WholeAnswer(_REFUSAL_BYTES_MAX), call)
            refusal = refusal_of(response.status, response.headers, body)
            self._refuse(refusal or response.status, body)
            return
        kind = response.headers.get(b"content-type", b"").lower()
        if isinstance(answer, StreamedAnswer):
            if b"json" in kind:
                body = await self._read_whole(WholeAnswer(self._section.answer_bytes_max), call)
                self._refuse(refusal_unstreamed(body), body)
            return
        if b"event-stream" in kind:
            # The client's to mend, and no fault of the upstream, which understood the body otherwise.
            raise RequestError("the upstream only streams this answer", param="stream")
        self._deltas = answer.finish(await self._read_whole(answer, call))
        self._settle()

    def _refuse(self, error: TrinamoError | int, body: bytes) -> None:
        """Raise what is an error; a status is the client's to read, with the body that came."""
        self._settle()
        if not isinstance(error, int):
            raise error
        self._deltas = refused(error, body)

    async def forward(self, sink: Sink[Delta]) -> None:
        """Hand its deltas to `sink`; returns at the complete end.

        Stopped, it ends the request at the upstream, and the answer with `STOP`; cancelled,
        likewise without a word. Raises what ended it, `DisconnectedError` if it stalled.
        """
        if self._deltas:
            sink.take(self._deltas)
            return
        answer = self._answer
        if self._connection is not None and isinstance(answer, StreamedAnswer):
            with self._calls.call(self._context) as call:
                call.is_begun = True
                pushed = PushedStream(self._readers, self._connection, self._response, answer, call)
                await pushed.run(self._begun, sink)
                self._settle()
                return
            self.close()
            await self._calls.left(call)
        sink.take([Delta(finish_reason=FinishReason.STOP)])

    def close(self) -> None:
        """Close the connection, unless it was given back, and keep nothing. No checkpoint."""
        KEPT.bytes_held -= self._held
        self._held = 0
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _settle(self) -> None:
        if self._connection is not None:
            self._connections.take_back(self._connection, self._response)
            self._connection = None

    async def _read_whole(self, whole: WholeAnswer, call: UpstreamCall) -> bytes:
        connection, response, body = self._connection, self._response, self._begun
        assert connection is not None, "its head has come"
        while True:
            if KEPT.bytes_held + len(body) > self._section.answers_bytes_max:
                raise OverloadedError("too many long answers of upstreams are kept at present")
            KEPT.bytes_held += len(body)
            self._held += len(body)
            whole.feed(body)
            if response.is_complete:
                return whole.take()
            data = await connection.receive()
            call.heard()
            body = response.feed(data) if data else response.end()
