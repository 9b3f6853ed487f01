"""One unary gRPC call awaited from trio, without a thread of its own.

gRPC's blocking API hands out a future and calls back from a thread of its own when it is done;
the callback wakes the trio task. A cancelled task cancels the call, at once and without waiting.
"""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import trio

__all__ = ["call_unary"]


async def call_unary(
    method: Any, request: Any, *, timeout_s: float, metadata: tuple[tuple[str, str], ...]
) -> Any:
    """Call `method` and return its reply; raises `grpc.RpcError`.

    `timeout_s` is gRPC's own deadline, so the server gives up with us. When cancelled, the call
    may still have taken effect.
    """
    task = trio.lowlevel.current_task()
    token = trio.lowlevel.current_trio_token()
    await trio.lowlevel.checkpoint_if_cancelled()
    future = method.future(request, timeout=timeout_s, metadata=metadata)
    is_waiting = True

    def wake() -> None:
        nonlocal is_waiting
        # The callback may have been queued before the task was cancelled.
        if is_waiting:
            is_waiting = False
            trio.lowlevel.reschedule(task)

    def on_done(_: Any) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(wake)

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
