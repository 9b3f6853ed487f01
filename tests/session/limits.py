"""A test that hangs fails by its name, and says where each of trio's tasks waits.

Without it the tests behind it wait as well, until whoever runs them gives up and learns nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Final

import pytest
import trio

from tests.session.hypothesis_profile import IS_SWARM
from tests.sources import ROOT

LIMIT_S: Final = 600
"""For each of set-up, call and tear-down. The longest test takes a third of it on a busy machine."""


class HungError(BaseException):
    """No `Exception`: whoever hangs may be waiting inside a `try` that expects errors."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    def give_up(_number: int, frame: FrameType | None) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
        waiting = "\n".join(tasks())
        raise HungError(f"{item.nodeid} runs for {LIMIT_S} s; it is at {where}\n{waiting}")

    # A swarm plays for as long as it is told, and a person in a debugger takes time.
    limit_s = 0 if IS_SWARM or item.config.getoption("usepdb") else LIMIT_S
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit_s)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call


def tasks() -> Iterator[str]:
    """Those of trio in this thread, each with its frames from the outermost on; none outside trio."""
    try:
        root = trio.lowlevel.current_root_task()
    except RuntimeError:
        return
    left = [(0, root)] if root is not None else []
    while left:
        depth, task = left.pop()
        frames = " > ".join(
            f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{line}"
            for frame, line in task.iter_await_frames()
        )
        yield f"{'  ' * depth}{task.name}: {frames}"
        left += [
            (depth + 1, child) for nursery in task.child_nurseries for child in nursery.child_tasks
        ]
