"""What a watch says, in the words of the tests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.conformance.control.backends import run_on_fitting_clock
from trinamo.runtime.planes import ControlPlane, Delete, Put, Resync, Snapshot, WatchEvent

on_fitting_clock = pytest.mark.trio(run=run_on_fitting_clock)


EVERY_BYTE = bytes(range(256))


_numbers = itertools.count(1)


def key_of(event: Put | Delete) -> str:
    return event.entry.key if isinstance(event, Put) else event.key


async def take(events: AsyncIterator[WatchEvent], count: int = 1) -> list[WatchEvent]:
    """The next `count` events; fails if they do not come."""
    found: list[WatchEvent] = []
    with trio.fail_after(15):
        while len(found) < count:
            found.append(await anext(events))
    return found


async def take_one(events: AsyncIterator[WatchEvent]) -> WatchEvent:
    return (await take(events))[0]


def values(snapshot: Snapshot | Resync) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in snapshot.entries}


async def _put_all(plane: ControlPlane, names: Any) -> None:
    for name in names:
        await plane.put(name, b"x")
