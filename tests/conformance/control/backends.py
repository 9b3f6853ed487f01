"""What the control-plane suite runs on: makers of planes over one store.

A backend is the *maker* that the suite takes, in the way of trio's stream checks: the suite never
names a transport, and a new transport is tested by adding a backend here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs
import trio
import trio.testing

from trinamo.conformance.control import fresh_prefix
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import ControlPlane
from trinamo.runtime.protocol.discovery.instances import INSTANCE_PREFIX
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.security.signed import signed_control

SECRET = b"the secret of a cluster under test"


class Link(Protocol):
    """The way between one plane and its store."""

    async def cut(self) -> None:
        """Break it: connections are reset and none can be made."""
        ...

    async def mend(self) -> None: ...


class Server(Protocol):
    """A store of the test's own, which it may hurt."""

    def open_plane(self) -> AbstractAsyncContextManager[ControlPlane]: ...

    async def kill(self) -> None:
        """Stop it as a power cut would."""
        ...

    async def restart(self) -> None:
        """Start it again on its data; returns once it answers."""
        ...

    async def freeze(self) -> None:
        """It takes connections and answers nothing."""
        ...

    async def thaw(self) -> None: ...


class Backend(Protocol):
    """One implementation under test."""

    def open_plane(self) -> AbstractAsyncContextManager[ControlPlane]:
        """One more plane over the backend's shared store."""
        ...

    def open_linked_plane(self) -> AbstractAsyncContextManager[tuple[ControlPlane, Link]]:
        """As `open_plane`, with a link that can be cut."""
        ...

    def open_server(self, data_dir: Path) -> AbstractAsyncContextManager[Server]: ...

    def open_unreachable(self) -> AbstractAsyncContextManager[ControlPlane]:
        """A plane whose store does not exist."""
        ...

    async def compact(self) -> None:
        """Make the shared store forget its history."""
        ...


def run_on_virtual_clock(
    function: Callable[[], Any], *, clock: trio.abc.Clock | None, instruments: list[Any]
) -> Any:
    """`trio.run` for pytest-trio where nothing but the test's own tasks is waited for."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(function, clock=clock, instruments=instruments)


async def eventually(operation: Callable[[], Any], *, timeout_s: float = 120) -> Any:
    """Repeat an operation over an outage until it works."""
    with trio.fail_after(timeout_s):
        while True:
            try:
                return await operation()
            except TrinamoError:
                await trio.sleep(0.05)


# --- memory ----------------------------------------------------------------------------------


@attrs.define
class MemoryLink:
    faults: ControlFaults

    async def cut(self) -> None:
        self.faults.cut_link()

    async def mend(self) -> None:
        self.faults.mend_link()


class MemoryServer:
    """A store that is halted and restarted in place."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.faults = ControlFaults()

    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[ControlPlane]:
        yield MemoryControlPlane(self.store, faults=self.faults)

    async def kill(self) -> None:
        self.store.halt()

    async def restart(self) -> None:
        self.store.restart(now=trio.current_time())

    async def freeze(self) -> None:
        self.faults.delay_s = float("inf")

    async def thaw(self) -> None:
        self.faults.delay_s = 0.0


class MemoryBackend:
    """Planes over one `MemoryStore`."""

    def __init__(self) -> None:
        self.store = MemoryStore()

    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[ControlPlane]:
        yield MemoryControlPlane(self.store)

    @asynccontextmanager
    async def open_linked_plane(self) -> AsyncIterator[tuple[ControlPlane, Link]]:
        faults = ControlFaults()
        yield MemoryControlPlane(self.store, faults=faults), MemoryLink(faults)

    @asynccontextmanager
    async def open_server(self, data_dir: Path) -> AsyncIterator[Server]:
        yield MemoryServer()

    @asynccontextmanager
    async def open_unreachable(self) -> AsyncIterator[ControlPlane]:
        faults = ControlFaults()
        faults.cut_link()
        yield MemoryControlPlane(faults=faults)

    async def compact(self) -> None:
        self.store.compact()


class SignedBackend(MemoryBackend):
    """The same for members of a cluster that has a secret: what they write is signed."""

    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[ControlPlane]:
        async with super().open_plane() as plane:
            yield signed_control(plane, RealEnv(), [SECRET])

    @asynccontextmanager
    async def open_linked_plane(self) -> AsyncIterator[tuple[ControlPlane, Link]]:
        async with super().open_linked_plane() as (plane, link):
            yield signed_control(plane, RealEnv(), [SECRET]), link


def prefix_on(backend: Backend) -> str:
    """Prefix of one test's keys: below what is signed, where the backend signs."""
    return f"{INSTANCE_PREFIX if isinstance(backend, SignedBackend) else ''}{fresh_prefix()}"
