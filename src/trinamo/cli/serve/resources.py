"""What a serving process asks of the system: descriptors, threads for names, what is garbage, what goes back to the kernel.

Almost all that a request makes goes with its last reference. Python's collector looks for the rest
each time 700 objects more were made than freed, which took an eighth of a frontend's time under
load (64 unary requests at once, `bench/bench_http.py`, seven pairs).
"""

from __future__ import annotations

import ctypes
import gc
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import trio

from trinamo.runtime.nurseries import open_nursery

DESCRIPTORS_MAX: Final = 1 << 20
"""Enough, where the hard limit is none: some libraries visit every number below it."""
OBJECTS_MAX: Final = 20_000
"""So many new objects may be alive before cycles among them are looked for: some megabytes."""
LOOKS_MAX: Final = 2
"""After so many looks more, what was in use at one is looked at again; and after so many of these, all of it."""
MAPPED_BYTES_MIN: Final = 256 << 10
LOOKUPS_MAX: Final = 16
TEND_INTERVAL_S: Final = 60.0
_M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h


def raise_descriptor_limit() -> None:
    """Let this process, and what it starts, open as many files as it may.

    The soft limit, 1,024 on most systems, is below `http.connections_max`; it is there for programs
    that use `select`, and we do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class NameLookups(trio.abc.HostnameResolver):
    """Looks names up in threads of its own, `LOOKUPS_MAX` at once.

    Where a name server is silent each keeps its thread for as long as the resolver tries, though nobody waits any
    more. Of trio's 40 for everything, engines' steps among it, none would be left.
    """

    def __init__(self) -> None:
        limiter = trio.CapacityLimiter(LOOKUPS_MAX)
        self._apart = partial(trio.to_thread.run_sync, limiter=limiter, abandon_on_cancel=True)

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        family: int = 0,
        type: int = 0,  # noqa: A002 -- named so in trio
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        return await self._apart(socket.getaddrinfo, host, port, family, type, proto, flags)

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        return await self._apart(socket.getnameinfo, sockaddr, flags)


def settle_memory(*, maps_bodies: bool) -> None:
    """Call it once the process has started.

    What is alive then always will be: the collector leaves it out, and looks at the rest after
    every `OBJECTS_MAX` objects. A full collection would else walk every class and module, and hold
    all streams up for tens of milliseconds. What only the start needed goes back: 5 MB a worker.

    With `maps_bodies` long bodies leave with their requests: glibc raises the size from which it
    maps memory apart as soon as a long body is freed, and the next ones then stay in its heap. A
    burst of 64 bodies of 4 MB left 200 MB behind, for good. A worker's buffers are used again.
    """
    gc.collect()
    gc.freeze()
    # Once more, for a full look waits until a quarter of what was there at the last one is new.
    gc.collect()
    gc.set_threshold(OBJECTS_MAX, LOOKS_MAX, LOOKS_MAX)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        if maps_bodies:
            libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        libc.malloc_trim(0)


@asynccontextmanager
async def memory_tended() -> AsyncIterator[None]:
    """Inside, what is garbage goes every `TEND_INTERVAL_S`, and the holes of the heap go back to the kernel.

    Cycles come of what fails: connections that end, errors that name their frames. There are some
    hundreds of objects a minute of them while servers and peers die, which `OBJECTS_MAX` lets pile
    up for half an hour: a worker grew by 1.5 MB meanwhile. A look takes 0.3 ms where 10,000 objects
    are alive that the start did not make, 25 ms where it is 300,000.

    What is short and stays, between long buffers that go, keeps glibc from giving back any but the
    top: a frontend grew by 3 % in ten minutes of 5 requests a second that keeps nothing. It takes
    0.4 ms where 40 MB are in use, 9 ms where it is 800 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    async def go_on() -> None:
        while True:
            await trio.sleep(TEND_INTERVAL_S)
            gc.collect()
            if trim is not None:
                trim(0)

    async with open_nursery() as nursery:
        nursery.start_soon(go_on)
        yield
        nursery.cancel_scope.cancel()
