"""A backend and a peer's process for faults to strike, and what comes of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import attrs

from tests.transports.memory_owner import open_backend
from tests.transports.owner_process import (
    Mover,
    Owner,
    connect,
    running_owner,
)
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.description import (
    Direction,
)

READ, WRITE = Direction.READ, Direction.WRITE
DEADLINE_S: Final = 1.0
"""Of a transfer whose peer is stopped."""
PATIENCE_S: Final = 120.0
"""Of every other one, so that a machine that is busy changes no outcome."""
GONE: Final = frozenset({"DisconnectedError", "ConnectError", "TransferError"})
DONE: Final = frozenset({"done"})
NOT_HERE: Final = "-"
"""What a row says that has no meaning on a backend."""


@attrs.frozen
class Outcome:
    """What came of one row."""

    kind: str
    """`done`, or the class of the error."""
    duration_s: float
    """From the fault (or the start, where there is no later moment) to the outcome."""
    wrong_count: int = 0
    """Blocks that were called complete and hold other bytes than were sent."""
    text: str = ""
    is_settled: bool = True


@attrs.frozen
class Scene:
    """One backend, open, and its peers."""

    name: str
    plane: TransferPlane
    standing: tuple[Mover, Owner]
    """A peer for the rows that do it no harm."""


@asynccontextmanager
async def open_scene(name: str) -> AsyncIterator[Scene]:
    """Open the backend and start the peer that stands by."""
    async with open_backend(name) as plane, peer_of(name, plane) as standing:
        yield Scene(name, plane, standing)


@asynccontextmanager
async def peer_of(
    name: str, plane: TransferPlane, *, has_locked_memory: bool = True
) -> AsyncIterator[tuple[Mover, Owner]]:
    """A new owner and our connection to it; our memory is given back in the end."""
    with running_owner(name, has_locked_memory=has_locked_memory) as owner:
        mover = await connect(plane, owner)
        yield mover, owner
    await plane.forget(mover.remote.description.incarnation)
    await plane.deregister(mover.region)


async def outcome(wait: Callable[[], Awaitable[object]]) -> Outcome:
    """`done`, or the error of the tree that `wait` raised; others are bugs and go on."""
    kind, text = "done", ""
    began_at = time.perf_counter()
    try:
        await wait()
    except TrinamoError as error:
        kind, text = type(error).__name__, error.message
    return Outcome(kind, time.perf_counter() - began_at, text=text)


@attrs.frozen
class Fault:
    """One row."""

    name: str
    run: Callable[[Scene], Awaitable[Outcome]]
    allowed: frozenset[str]
    """What may come of it on every backend but those of `exceptions`."""
    exceptions: dict[str, frozenset[str]] = attrs.field(factory=dict)
    """By backend."""

    def allows(self, backend: str) -> frozenset[str]:
        """The kinds of outcome that this row may have."""
        return self.exceptions.get(backend, self.allowed)
