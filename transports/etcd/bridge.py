"""A gRPC channel as `rpc.py` wants one: its threads on one side, trio on the other.

A stream costs two threads: gRPC's own, which takes requests from a queue, and the reader here,
which hands replies to a bounded channel and so passes on backpressure. That is why the plane has
exactly two streams, however many watches and leases it carries. Both threads are gone when the
context is left. What travels is not known here.

Unary calls cost no thread each. gRPC's blocking API hands out a future and calls back from a thread of its own when it is done. The
callback wakes the trio task, or rather: it notes the task and wakes trio once for all that are done
by then, because a wake-up is a system call. A cancelled task cancels its call, at once and without
waiting.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

import grpc
import trio

from .rpc import METHODS, Metadata, StatusError, Stream, StreamLostError

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
        # A stuck stream is cut after a silence of seconds, so the bound is only reached when
        # something opens watches without end; then a new stream is the remedy as well.
        if self._requests.qsize() >= REQUESTS_MAX:
            raise StreamLostError(f"{REQUESTS_MAX} requests are waiting to be sent")
        for request in requests:
            self._requests.put(request)

    async def receive(self) -> list[Any]:
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


def status_of(error: Any) -> StatusError:
    """The same of a gRPC error."""
    return StatusError(error.code().name, str(error.details() or error.code().name))


class Bridge:
    """The way back from gRPC's threads into this trio run, for all calls of one client."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        # At most one entry a call in flight, so its bound is that of the callers' tasks.
        self._wakes: deque[Callable[[], None]] = deque()
        self._is_told = False

    async def call_unary(
        self,
        method: Any,
        request: Any,
        *,
        timeout_s: float,
        metadata: Metadata,
        waits: bool = False,
    ) -> Any:
        """Call `method` and return its reply; raises `grpc.RpcError`.

        `timeout_s` is gRPC's own deadline, so the server gives up with us. When cancelled, the
        call may still have taken effect.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        task = trio.lowlevel.current_task()
        future = method.future(request, timeout=timeout_s, metadata=metadata, wait_for_ready=waits)
        is_waiting = True

        def wake() -> None:
            nonlocal is_waiting
            # The callback may have been queued before the task was cancelled.
            if is_waiting:
                is_waiting = False
                trio.lowlevel.reschedule(task)

        def on_done(_: Any) -> None:
            # Have trio call `wake`; from any thread.
            # First the entry, then the look: `_wake_all` does the two in the opposite order, so an
            # entry that finds trio told is always seen by it. No lock is needed.
            self._wakes.append(wake)
            if not self._is_told:
                self._is_told = True
                with contextlib.suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._wake_all)

        def abort(_: Any) -> trio.lowlevel.Abort:
            nonlocal is_waiting
            is_waiting = False
            future.cancel()
            return trio.lowlevel.Abort.SUCCEEDED

        future.add_done_callback(on_done)
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
            return future.result()
        except grpc.FutureCancelledError:
            # Somebody closed the channel under the call. The future is itself the gRPC error.
            raise future from None

    def _wake_all(self) -> None:
        self._is_told = False
        while self._wakes:
            self._wakes.popleft()()


class GrpcChannel:
    """The methods of etcd over an open `grpc.Channel`, which it closes. Implements `Channel`."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._bridge = Bridge()
        self._methods: dict[str, Any] = {}

    def _method(self, name: str, *, is_stream: bool) -> Any:
        made = self._methods.get(name)
        if made is None:
            method, channel = METHODS[name], self._channel
            make = channel.stream_stream if is_stream else channel.unary_unary
            made = self._methods[name] = make(
                f"/etcdserverpb.{method.service}/{name}",
                method.request.SerializeToString,
                method.reply.FromString,
            )
        return made

    async def call(
        self, name: str, request: Any, *, timeout_s: float, metadata: Metadata, waits: bool = False
    ) -> Any:
        method = self._method(name, is_stream=False)
        try:
            return await self._bridge.call_unary(
                method, request, timeout_s=timeout_s, metadata=metadata, waits=waits
            )
        except grpc.RpcError as error:
            raise status_of(error) from None

    @contextlib.asynccontextmanager
    async def open_stream(self, name: str, *, metadata: Metadata) -> AsyncIterator[Stream]:
        stream = GrpcStream(self._method(name, is_stream=True), metadata)
        try:
            yield stream
        finally:
            await stream.close()

    def close(self) -> None:
        self._channel.close()
