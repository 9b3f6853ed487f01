"""Child processes of `processes.py`, started, heard and shot by tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tests.transports.tcp.ends import PATIENCE_S

SCRIPT = Path(__file__).with_name("processes.py")


class Child:
    """A process of `processes.py` and the lines it says."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        assert process.stdout is not None
        self._stream = process.stdout
        self._pending = b""

    async def hear(self, **expected: object) -> dict[str, Any]:
        """The next line that has these fields; what comes before it is skipped."""
        while True:
            line, newline, rest = self._pending.partition(b"\n")
            if not newline:
                data = await self._stream.receive_some()
                assert data, "the process ended"
                self._pending += data
                continue
            self._pending = rest
            said: dict[str, Any] = json.loads(line)
            if expected.items() <= said.items():
                return said

    def shoot(self) -> None:
        """kill -9."""
        self.process.kill()


@asynccontextmanager
async def child(*args: str, within: Sequence[str] = ()) -> AsyncIterator[Child]:
    """A process, started by the command `within`, that is shot when the body is done."""
    command = [*within, sys.executable, str(SCRIPT), *args]
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            start: Callable[..., Any] = trio.run_process
            process: trio.Process = await nursery.start(
                lambda task_status: start(
                    command, stdout=subprocess.PIPE, check=False, task_status=task_status
                )
            )
            assert process.stdout is not None
            async with process.stdout:
                yield Child(process)
            nursery.cancel_scope.cancel()
