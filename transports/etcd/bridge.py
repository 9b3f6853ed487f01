"""A gRPC channel as `rpc.py` wants one: unary calls awaited from trio, without a thread each.

gRPC's blocking API hands out a future and calls back from a thread of its own when it is done. The
callback wakes the trio task, or rather: it notes the task and wakes trio once for all that are done
by then, because a wake-up is a system call. A cancelled task cancels its call, at once and without
waiting.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import trio

from .rpc import METHODS, Metadata, Stream
from .streams import open_stream, status_of


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
        """See `Channel.call`."""
        method = self._method(name, is_stream=False)
        try:
            return await self._bridge.call_unary(
                method, request, timeout_s=timeout_s, metadata=metadata, waits=waits
            )
        except grpc.RpcError as error:
            raise status_of(error) from None

    def open_stream(
        self, name: str, *, metadata: Metadata
    ) -> contextlib.AbstractAsyncContextManager[Stream]:
        """See `Channel.open_stream`."""
        return open_stream(self._method(name, is_stream=True), metadata=metadata)

    def close(self) -> None:
        """See `Channel.close`."""
        self._channel.close()
