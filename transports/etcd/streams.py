"""One bidirectional gRPC stream with its blocking ends in threads and its useful ends in trio.

A stream costs two threads: gRPC's own, which takes requests from a queue, and the reader here,
which hands replies to a bounded channel and so passes on backpressure. That is why the plane has
exactly two streams, however many watches and leases it carries. Both threads are gone when the
context is left. What travels is not known here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Generic, TypeVar

import grpc
import trio

from .failures import Verdict, judge, words

__all__ = ["Stream", "StreamLostError", "open_stream"]

Request = TypeVar("Request")
Reply = TypeVar("Reply")

REQUESTS_MAX: Final = 100_000
REPLIES_MAX: Final = 16


class StreamLostError(Exception):
    """The stream is over, whoever ended it. Open another; never leaves this package."""

    def __init__(self, message: str, verdict: Verdict = Verdict.UNKNOWN, cause: Any = None) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.cause = cause


class Stream(Generic[Request, Reply]):
    """An open stream; see `open_stream`."""

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._requests: queue.Queue[Request | None] = queue.Queue()
        self._send, self._receive = trio.open_memory_channel[Reply](REPLIES_MAX)
        self._token = trio.lowlevel.current_trio_token()
        self._ended = trio.Event()
        self._error: Any = None
        self._call = method(self._take_requests(), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="etcd-stream", daemon=True)
        self._reader.start()

    def send_nowait(self, request: Request) -> None:
        """Queue a request. Raises `StreamLostError` if far too many are waiting."""
        # A stuck stream is cut after a silence of seconds, so the bound is only reached when
        # something opens watches without end; then a new stream is the remedy as well.
        if self._requests.qsize() >= REQUESTS_MAX:
            raise StreamLostError(f"{REQUESTS_MAX} requests are waiting to be sent")
        self._requests.put(request)

    async def receive(self) -> Reply:
        """The next reply; raises `StreamLostError` when there is none. A cancelled wait loses none."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise self._lost() from None

    def cancel(self) -> None:
        """End the call; whoever receives gets `StreamLostError`."""
        self._call.cancel()

    async def close(self) -> None:
        """End the call and wait for the reader thread, which ends at once."""
        self._receive.close()
        self._call.cancel()
        self._requests.put(None)
        # No I/O is waited for: the cancelled call raises in the thread, whatever the server does.
        with trio.CancelScope(shield=True):
            await self._ended.wait()
        self._reader.join()

    def _lost(self) -> StreamLostError:
        if self._error is None:
            return StreamLostError("the server ended the stream")
        return StreamLostError(words(self._error), judge(self._error), self._error)

    def _take_requests(self) -> Iterator[Request]:
        while (request := self._requests.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for reply in self._call:
                trio.from_thread.run(self._send.send, reply, trio_token=self._token)
        except grpc.RpcError as error:
            self._error = error
        except (
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.Cancelled,
            trio.RunFinishedError,
        ):
            self._call.cancel()
        finally:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._end)

    def _end(self) -> None:
        self._send.close()
        self._ended.set()


@asynccontextmanager
async def open_stream(
    method: Any, *, metadata: tuple[tuple[str, str], ...]
) -> AsyncIterator[Stream[Any, Any]]:
    """Open a stream of `method` for as long as inside. It connects in the background."""
    stream: Stream[Any, Any] = Stream(method, metadata)
    try:
        yield stream
    finally:
        await stream.close()
