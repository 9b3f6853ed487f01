"""Many streams at once, a third of their clients leaving: nothing stays behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import trio

from trinamo.runtime.context import Context
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest


async def ten_tokens(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    for i in range(10):
        await trio.sleep(0.005)
        yield Delta(f" {i}", [i])
    yield Delta("", [], FinishReason.STOP)


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_200_streams_with_a_third_leaving_leave_nothing_behind(serve: Any) -> None:
    running = await serve(ten_tokens)
    tasks_before = trio.lowlevel.current_statistics().tasks_living
    files_before = count_open_files()
    whole = 0

    async def ask(index: int) -> None:
        nonlocal whole
        stream = await running.connect()
        async with stream:
            await stream.send_all(running.post(stream=index % 2 == 0))
            if index % 3 == 0:
                await trio.sleep(0.003 * (index % 11))
                return
            received = b""
            while not received.endswith((b"[DONE]\n\n\r\n0\r\n\r\n", b'"cached_tokens":0}}}')):
                data = await stream.receive_some()
                assert data, received[-200:]
                received += data
            whole += 1

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for index in range(200):
                nursery.start_soon(ask, index)
    await running.wait_quiet()
    assert whole == 133
    outcomes = {
        outcome: running.value("requests_total", model="local", endpoint="chat", outcome=outcome)
        for outcome in ("success", "client_disconnect", "cancelled")
    }
    # A client that left before its request was read was never a request of this model.
    assert outcomes["success"] >= 133
    assert outcomes["cancelled"] == 0
    # trio closes each socket once more after the connection is no longer counted.
    await running.wait_for(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks_before)
    assert count_open_files() <= files_before
