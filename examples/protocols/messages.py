"""What the three protocols share: a question and an answer in JSON, and a log of lines on the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

NO_ANSWER = (OSError, trio.BrokenResourceError, ValueError)
"""What `ask` raises if the other side, or the way to it, is gone."""


async def ask(host: str, port: int, **question: Any) -> Any:
    """The answer of whoever serves `port` on `host`."""
    async with await trio.open_tcp_stream(host, port) as stream:
        await stream.send_all(json.dumps(question).encode())
        await stream.send_eof()
        return json.loads(b"".join([chunk async for chunk in stream]))


async def serve(
    port: int,
    answer: Callable[..., Awaitable[Any]],
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer every question on `port` with what `answer(**question)` returns."""

    async def handle(stream: trio.SocketStream) -> None:
        try:
            question = json.loads(b"".join([chunk async for chunk in stream]))
            await stream.send_all(json.dumps(await answer(**question)).encode())
        except NO_ANSWER:
            pass  # The peer went away; that must not end this process.

    await trio.serve_tcp(handle, port, task_status=task_status)


def append(path: Path, line: str, *, is_synced: bool = True) -> None:
    """Write a line at the end of a log; on the platter when this returns, unless not `is_synced`."""
    with path.open("a") as log:
        # A line that a power cut has torn has no dot at its end, and the next begins behind it.
        log.write(f"\n{line}.\n")
        log.flush()
        if is_synced:
            os.fsync(log.fileno())
    if is_synced:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def lines(path: Path) -> list[str]:
    """The whole lines of a log; none if there is no such file."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [line[:-1] for line in text.split("\n") if line.endswith(".")]
