"""Several children at once: ready together, ended together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from trinamo.runtime.nurseries import open_nursery

from .child import Child

END_MARGIN_S: Final = 3.0
"""What a child gets beyond the deadlines of its own shutdown before it is killed."""


async def wait_all_ready(children: Sequence[Child]) -> None:
    """Return once all serve; raises what kept the first of them from it."""
    # One after the other, but the first that fails must not wait for a slower one before it.
    failed: list[Exception] = []
    async with open_nursery() as nursery:

        async def wait(child: Child) -> None:
            try:
                await child.wait_ready()
            except Exception as error:  # noqa: BLE001 -- raised below, without its group
                failed.append(error)
                nursery.cancel_scope.cancel()

        for child in children:
            nursery.start_soon(wait, child)
    if failed:
        raise failed[0]


async def end_all(children: Sequence[Child], grace_s: float, say: Callable[[str], None]) -> None:
    """Ask all to go, each of which needs at most `grace_s`; say how each of them went."""

    async def end(child: Child) -> None:
        started_at = trio.current_time()
        if await child.end(grace_s=grace_s + END_MARGIN_S):
            took_s = trio.current_time() - started_at
            say(f"{child.name} has ended ({took_s:.1f} s)")
        else:
            say(f"{child.name} did not end in time and was killed")

    async with open_nursery() as nursery:
        for child in children:
            nursery.start_soon(end, child)
