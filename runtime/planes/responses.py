"""The response plane: workers open streams, on the link of the request or by calling home."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, Self

from ..context import Context
from ..errors import TrinamoError
from ..protocol.streams.request import ConnectionInfo
from ..sinks import Sink


class ResponseChannel(Protocol):
    """The caller's end of one response stream, after or before the worker's call."""

    @property
    def is_called(self) -> bool:
        """Whether the worker has called home."""
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
        """Return once the handler has started; raises what the prologue says went wrong."""
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
    """The worker's end of one response stream, after it has called home."""

    def send_nowait(self, item: bytes) -> bool:
        """Queue one item; False once the byte bound is reached, then wait for `on_room`.

        After a Kill items are dropped silently: the scope of the context is already cancelled.
        """
        ...

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `send_nowait` that was False."""
        ...

    def open(self) -> None:
        """Queue the prologue: the handler has started."""
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
        """Dial the caller, greet, and hold the stream until all that is queued is sent.

        Stop and Kill from the caller, and its death, reach `context` while inside. Raises
        `ConnectError` if the caller cannot be reached, `RefusedError` if it refuses the subject.
        """
        ...

    def receive_input(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Dial the caller for a request stream and iterate its input items."""
        ...
