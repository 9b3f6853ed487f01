"""One bidirectional gRPC stream with its blocking ends in threads and its useful ends in trio.

A stream costs two threads: gRPC's own, which takes requests from a queue, and the reader here,
which hands replies to a bounded channel and so passes on backpressure. That is why the plane has
exactly two streams, however many watches and leases it carries. Both threads are gone when the
context is left. What travels is not known here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc
import trio

from .failures import StatusError, StreamLostError
from .rpc import Metadata

REQUESTS_MAX: Final = 100_000
REPLIES_MAX: Final = 16


class GrpcStream:
    """An open stream; see `Stream`."""

    def __init__(self, method: Any, metadata: Metadata) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self._send, self._receive = trio.open_memory_channel[Any](REPLIES_MAX)
        self._token = trio.lowlevel.current_trio_token()
        self._ended = trio.Event()
        self._error: StatusError | None = None
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="etcd-stream", daemon=True)
        self._reader.start()

    def send_nowait(self, *requests: Any) -> None:
        """Queue requests, in order. Raises `StreamLostError` if far too many are waiting."""
        # A stuck stream is cut after a silence of seconds, so the bound is only reached when
        # something opens watches without end; then a new stream is the remedy as well.
        if self._requests.qsize() >= REQUESTS_MAX:
            raise StreamLostError(f"{REQUESTS_MAX} requests are waiting to be sent")
        for request in requests:
            self._requests.put(request)

    async def receive(self) -> list[Any]:
        """See `Stream.receive`."""
        try:
            replies = [await self._receive.receive()]
        except trio.EndOfChannel:
            why = "the server ended the stream" if self._error is None else self._error.text
            raise StreamLostError(why, self._error) from None
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                replies.append(self._receive.receive_nowait())
        return replies

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

    def _read(self) -> None:
        try:
            for reply in self._call:
                trio.from_thread.run(self._send.send, reply, trio_token=self._token)
        except grpc.RpcError as error:
            self._error = status_of(error)
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
async def open_stream(method: Any, *, metadata: Metadata) -> AsyncIterator[GrpcStream]:
    """Open a stream of `method` for as long as inside. It connects in the background."""
    stream = GrpcStream(method, metadata)
    try:
        yield stream
    finally:
        await stream.close()


def status_of(error: Any) -> StatusError:
    """The same of a gRPC error."""
    return StatusError(error.code().name, str(error.details() or error.code().name))
