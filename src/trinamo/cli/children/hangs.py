"""Children that run but do not answer: stopped, stuck, or starved.

The kernel tells of a process that has ended; of one that hangs nobody tells, so each is asked. What
hangs is told, and ended after `worker.hang_timeout_s`, so that another one takes its place: the
router passes over it meanwhile. Whoever debugs a process for longer says so by that setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.nurseries import open_nursery
from trinamo.transports.openai.client import fetch

from .child import Child, ChildState
from .shared_port import status_url_of

INTERVAL_S: Final = 2.0
ASK_TIMEOUT_S: Final = 3.0
GRACE_S: Final = 5.0
"""Between asking one that hangs to go and killing it: it may only have been stopped."""
FAILURES: Final = 2
"""In a row, before it is said: one may be the load of a moment."""


async def watch_for_hangs(
    children: Sequence[Child], say: Callable[[str], None], *, bound_s: float | None
) -> None:
    """Ask each child that is ready every few seconds, and say when it stops and begins to answer.

    One that has not answered for `bound_s` is ended; None ends nobody.
    """
    async with open_nursery() as nursery:
        for child in children:
            nursery.start_soon(_watch, child, say, math.inf if bound_s is None else bound_s)


async def _watch(child: Child, say: Callable[[str], None], bound_s: float) -> None:
    failures = 0
    silent_since = 0.0
    while True:
        await trio.sleep(INTERVAL_S)
        pid, asked_at = child.pid, trio.current_time()
        url = status_url_of(child)
        if child.state is not ChildState.READY or not pid or not url:
            failures, child.is_silent = 0, False
            continue
        try:
            await fetch(f"{url}/live", timeout_s=ASK_TIMEOUT_S)
        except TrinamoError:
            silent_since = silent_since if failures else asked_at
            failures += child.pid == pid
            if failures == FAILURES:
                child.is_silent = True
                say(f"{child.name} (pid {pid}) runs, but does not answer: it is stopped or stuck")
            silent_s = trio.current_time() - silent_since
            if child.is_silent and silent_s >= bound_s:
                say(f"{child.name} (pid {pid}) has not answered for {silent_s:.0f} s: ending it")
                await child.replace(grace_s=GRACE_S)
                failures, child.is_silent = 0, False
            continue
        if child.is_silent:
            took_s = trio.current_time() - silent_since
            say(f"{child.name} answers again, after {took_s:.0f} s")
        failures, child.is_silent = 0, False
