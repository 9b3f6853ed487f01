"""Test bodies that run inside a world of the simulator.

A fixture says on which world (`in_world`); `run_in_world`, given to pytest-trio as a test's runner,
plays the body there. So one body passes on real servers and on simulated ones, whose time is virtual.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import trio

from trinamo.sim import World

T = TypeVar("T")

_worlds: list[World] = []


@contextmanager
def in_world(world: World) -> Iterator[None]:
    """What `run_in_world` runs meanwhile, it runs in `world`."""
    _worlds.append(world)
    try:
        yield
    finally:
        _worlds.remove(world)


def run_in_world(
    function: Callable[[], Awaitable[Any]],
    *,
    clock: trio.abc.Clock | None = None,
    instruments: list[Any] | None = None,
) -> Any:
    """`trio.run` for pytest-trio: in the world of the test's backend, if it has one."""
    if not _worlds:  # pragma: no cover -- a fixture forgot to say which
        return trio.run(function, clock=clock, instruments=instruments or [])
    results = []

    async def main() -> None:
        results.append(await function())

    _worlds[-1].run(main)
    return results[0]


@asynccontextmanager
async def on_host(
    world: World, name: str, opening: Callable[[], AbstractAsyncContextManager[T]]
) -> AsyncIterator[T]:
    """Open something on a host of its own, which ends when the body does."""
    opened, closing = trio.Event(), trio.Event()
    found: list[T] = []

    async def main() -> None:
        async with opening() as thing:
            found.append(thing)
            opened.set()
            await closing.wait()

    host = world.boot(name, main)
    await opened.wait()
    try:
        yield found[0]
    finally:
        closing.set()
        with trio.CancelScope(shield=True):
            await host.ended.wait()
