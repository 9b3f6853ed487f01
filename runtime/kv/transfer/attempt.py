"""One attempt of a move over one backend: how long it is waited for, and whose fault it is.

A backend that stands still is given up for the next one, and left alone for a while by everybody. A
caller's own time that is up says nothing about the backend. `router.py` makes attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import trio

from ...errors import DeadlineError, StalledError
from ...planes import RemoteMemory, Transfer, TransferReport
from ...protocol.transfer.description import Direction
from .routes import Route

_LOOKS: Final = 8
"""How often a transfer is looked at before it counts as hanging."""


@attrs.define
class Job:
    """What is left of one move."""

    direction: Direction
    here: Sequence[int]
    there: Sequence[int]
    notify: bytes | None
    ticket: int
    ends_at: float
    """When the caller's time is up."""
    has_other: bool = False
    """Whether there is a backend to fall back to that works."""
    done: int = 0
    """Leading blocks that are confirmed."""
    is_stuck: bool = False
    """Whether a failed attempt still touches the blocks, so that no other one may."""


async def reached(route: Route, job: Job, stall_s: float) -> RemoteMemory:
    """The peer's memory over one backend, waited for as `progressing` waits for blocks."""
    began_at = trio.current_time()
    with trio.move_on_at(min(job.ends_at, began_at + stall_s) if job.has_other else job.ends_at):
        return await route.connected()
    now = trio.current_time()
    has_stalled = now < job.ends_at or now - began_at >= stall_s
    kind = StalledError if has_stalled else DeadlineError
    raise kind(f"{route.backend} did not connect within {now - began_at:g} s")


async def progressing(transfer: Transfer, backend: str, job: Job, stall_s: float) -> TransferReport:
    """The report; `StalledError` if no block was newly confirmed for about `stall_s` seconds.

    What still moves must not be given up for its size: a fallback is for backends that hang. Where
    there is none, one that hangs is given up only when the caller's time is up.
    """
    confirmed, since = transfer.confirmed_count, trio.current_time()
    while (now := trio.current_time()) < job.ends_at:
        if job.has_other and now - since >= stall_s:
            break
        with trio.move_on_at(min(job.ends_at, now + stall_s / _LOOKS)):
            try:
                return await transfer.wait()
            except DeadlineError:
                break  # The plane's own timer, at the same time as ours.
        if transfer.confirmed_count > confirmed:
            confirmed, since = transfer.confirmed_count, trio.current_time()
    left = len(job.here) - job.done - transfer.confirmed_count
    if trio.current_time() - since >= stall_s:
        raise StalledError(f"{backend} confirmed no block for {stall_s:g} s; {left} are left")
    raise DeadlineError(f"{left} blocks were not moved in time")
