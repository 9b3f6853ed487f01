"""The request plane: one envelope to one instance, one typed answer; and the response plane.

Workers open streams on the link of the request, or by calling home.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, Self

import trio

from ..context import Context
from ..errors import TrinamoError
from ..protocol.streams.request import ConnectionInfo, Envelope, Reason, RequestAnswer
from ..sinks import Sink


class ResponseChannel(Protocol):
    """The caller's end of one response stream, after or before the worker's call."""

    on_call: Callable[[], None] | None
    """Called when the worker opens the stream, which it does as soon as it has taken the request."""

    @property
    def is_called(self) -> bool:
        """Whether the worker has opened it."""
        ...

    @property
    def arrival_count(self) -> int:
        """Batches of items that have come: whether it grows says whether the worker speaks."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether reading waits for the consumer, so that nothing can come from the worker."""
        ...

    async def wait_prologue(self) -> None:
        """Return once the answer begins; raises what the prologue says went wrong."""
        ...

    async def forward(self, sink: Sink[bytes]) -> None:
        """Hand every item to `sink` as it comes; returns after Sentinel, else raises the terminal.

        Instead of iterating, not beside it. Items that came before are handed over at once. Sleeps
        in between: `sink` is called by the connection's reader, in whose context variables it runs.
        While it has no room, its stream gets no credit, and the others of the connection do. What
        it raises kills this stream, and comes out of here.
        """
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes:
        """The next item; ends after Sentinel, else raises the stream's one terminal error."""
        ...

    def fail(self, error: TrinamoError) -> None:
        """End the stream from this side with `error`, such as: the instance vanished."""
        ...


class Registration(AbstractContextManager["Registration"], Protocol):
    """A subject held open for one worker's call; leaving it removes the subject.

    Leaving it before the stream's terminal sends Kill without a checkpoint.
    """

    @property
    def connection(self) -> ConnectionInfo:
        """What the envelope tells the worker: address, subject and stream type."""
        ...

    @property
    def channel(self) -> ResponseChannel:
        """The stream itself."""
        ...

    def close(self) -> None:
        """Leave it. Synchronous, idempotent."""
        ...


class InputRegistration(AbstractContextManager["InputRegistration"], Protocol):
    """A subject held open for one worker that is streamed to; leaving it removes the subject.

    Leaving it before `finish` sends Kill without a checkpoint.
    """

    @property
    def connection(self) -> ConnectionInfo:
        """What the envelope tells the worker: address, subject and stream type."""
        ...

    def close(self) -> None:
        """Leave it. Synchronous, idempotent."""
        ...

    async def send(self, item: bytes) -> None:
        """Queue one input item, waiting for the worker's call and while the bound is reached."""
        ...

    async def finish(self) -> None:
        """Say that the input is complete (Sentinel), once the worker has called."""
        ...


class ResponsePlane(Protocol):
    """The caller's side: where workers call home."""

    def register(self, context: Context) -> Registration:
        """Open a subject for the response of one request; synchronous."""
        ...

    def register_input(self, context: Context) -> InputRegistration:
        """Open a subject for the input of one request; synchronous."""
        ...


class ResponseSender(Protocol):
    """The worker's end of one response stream, once it is open."""

    def send_nowait(self, item: bytes) -> bool:
        """Queue one item; False once the byte bound is reached, then wait for `on_room`.

        After a Kill items are dropped silently: the scope of the context is already cancelled.
        """
        ...

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `send_nowait` that was False."""
        ...

    def open(self) -> None:
        """Queue the prologue: the answer begins."""
        ...

    def finish(self) -> None:
        """Queue Sentinel: the answer is complete."""
        ...

    def fail(self, error: TrinamoError) -> None:
        """Queue the terminal error: a declining prologue before `open`, `failed` after it."""
        ...


class CallHome(Protocol):
    """The worker's side of the response plane."""

    def call_home(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[ResponseSender]:
        """Open the response stream, on the link of its request or by dialling, and hold it until all is sent.

        Stop and Kill from the caller, and its death, reach `context` while inside. Raises
        `ConnectError` if the caller cannot be reached, and `KilledError` if the request is killed
        before that, or before the caller has taken what is queued.
        """
        ...

    def receive_input(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a request stream, as `call_home` does, and iterate its input items."""
        ...


TakeAnswer = Callable[[RequestAnswer | TrinamoError, bytes], None]
"""Gets what came of a request: its ACK, NACK or answer, with a result if it was unary, or an error.

No ACK comes for a stream that is opened on the link of its request: that it is opened is the ACK.
"""


class RequestService(Protocol):
    """What the worker offers to whatever request plane brings it envelopes."""

    def admit(
        self,
        envelope: Envelope,
        payload: bytes,
        answering: CallHome | None = None,
        *,
        by_worker: bool = True,
    ) -> RequestAnswer:
        """Decide without waiting. Once `accepted`, the work is started and will open its stream.

        It does so by `answering`, on the link that the request came by; without, it calls home. A
        probe is answered only: nothing is started. Not `by_worker`: who asks has proven to be something
        else, and is refused what workers ask of each other.
        """
        ...

    async def answer(self, envelope: Envelope, payload: bytes, *, by_worker: bool = True) -> bytes:
        """Run a unary request and return its encoded result; raises a `TrinamoError`."""
        ...

    def cancel(
        self,
        request_id: str,
        reason: Reason = Reason.CONSUMER_DROPPED,
        *,
        has_arrived: bool = False,
    ) -> None:
        """The caller wants no answer any more; also if the request has not arrived yet.

        An `answer` that runs is cancelled, and raises without waiting for anything.
        `has_arrived`: it has, or never will, so there is nothing to remember if it does not run.
        """
        ...


class RequestServer(Protocol):
    """The worker's end of a request plane."""

    @property
    def transport(self) -> str:
        """The key of `address` in an instance's `transports`, such as `tcp` or `nats`."""
        ...

    @property
    def address(self) -> str:
        """What callers must know to reach it; valid once `serve` has started."""
        ...

    @property
    def malformed_count(self) -> int:
        """What has arrived and was no request, or no frame at all."""
        ...

    async def serve(
        self,
        service: RequestService,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept envelopes until cancelled; started once `address` is reachable."""
        ...


class PostedRequest(Protocol):
    """A request that was posted; once its answer has been taken both methods do nothing."""

    def cancel(self, reason: Reason = Reason.CONSUMER_DROPPED) -> None:
        """No answer is wanted any more; the worker is told to forget the request. Synchronous."""
        ...

    def forget(self) -> None:
        """No answer is wanted any more, and the worker goes on."""
        ...


class RequestPlane(Protocol):
    """The caller's end: one envelope to one instance, one typed answer."""

    @property
    def transport(self) -> str:
        """Which of an instance's `transports` this plane speaks."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether it can carry anything now, as far as it knows.

        False while a broker in between is away: callers then take another way to the instance, if
        it has one. A plane that only finds out by trying says True.
        """
        ...

    async def hold(
        self, address: str, on_connected: Callable[[], None], *, instance_id: str = ""
    ) -> None:
        """Keep a connection to a worker for as long as it lasts, and return when it is lost.

        Calls `on_connected` whenever it stands. A plane with many of them may close one that is idle and
        make it again for a request; it is not lost then. Raises `ConnectError` if it cannot be made, as
        `ImpostorError` if another instance than `instance_id` answers. A plane without connections
        of its own never returns: it cannot tell.
        """
        ...

    @property
    def acknowledges(self) -> bool:
        """Whether a worker that takes a request for a stream says so by an ACK.

        If not, that it opens the stream is the ACK.
        """
        ...

    def post(
        self, address: str, envelope: Envelope, payload: bytes, take: TakeAnswer
    ) -> PostedRequest | None:
        """Deliver a request without waiting; None, and nothing was done, while that takes a wait.

        `take` is called once at most, later, and must not wait. It gets `ConnectError` if nothing was
        sent, `DisconnectedError` if the connection broke before the answer, `RemoteProtocolError` if
        that is none. Raises at once what can be said at once, such as `ImpostorError`: another
        instance than `envelope.instance_id` answers at the address. How long a worker may take to
        open a stream, or to refuse it, is for the caller to bound.
        """
        ...

    async def wait_room(self, address: str) -> None:
        """Return once `post` may deliver to `address`. Safe to cancel.

        Raises `ConnectError` if the worker cannot be reached.
        """
        ...
