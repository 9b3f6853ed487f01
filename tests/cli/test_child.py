"""One child of `trinamo up`, as it is supervised."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trinamo.cli.children.child import Child


async def test_a_child_that_cannot_be_started_again_now_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The machine may have no memory for it now; the other children must not end for that."""
    program = "echo '{\"ready\": {}}' >&{0}"
    told: list[str] = []
    refusals: Iterator[bool] = iter([False, True, False])
    start = subprocess.Popen[bytes]

    def popen(command: list[str], **given: Any) -> subprocess.Popen[bytes]:
        if next(refusals, False):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        fd = command[command.index("--ready-fd") + 1]
        return start(["/bin/bash", "-c", program.replace("{0}", fd)], **given)

    monkeypatch.setattr(subprocess, "Popen", popen)
    supervised = Child("worker-1", ["worker"], {}, on_line=None, on_event=told.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervised.run)
        while supervised.restarts < 3:
            await trio.sleep(1)
        await supervised.end(grace_s=1)
    assert "worker-1 cannot be started (Cannot allocate memory); starting it again in 0.4 s" in told
    assert told[-1].startswith("worker-1 exited with status 0")
