"""A process that owns registered memory, for tests and tables of faults; see `owner_process.py`.

`python -m tests.transports.memory_owner SETTINGS`, a JSON object. It prints one description for
each backend as a line of JSON, and then answers commands, a line each, until its input ends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import resource
import socket
import sys
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import attrs
import trio

from trinamo.runtime.planes import TransferPlane

BLOCK_BYTES = 65_536
COUNT = 256
CHUNK_BLOCKS = 8
"""Backends go this far at a time, so that a signal finds them in the middle."""
BACKENDS = ("tcp", "nixl tcp", "nixl cma", "mooncake tcp")
_SOCKET_BYTES = 64 << 10
_CAP_IPC_LOCK = 14


@attrs.frozen
class Settings:
    """What the process is told."""

    backends: list[str]
    memory_fd: int
    """The memory it owns, `COUNT` blocks: its parent sees them too, also after its death."""
    has_locked_memory: bool = True
    """False: no page may be locked, whoever runs it."""


class _SmallBuffers(trio.abc.SocketFactory):
    """Sockets that hold few bytes, so that what was not confirmed has not arrived either."""

    def socket(
        self,
        family: int = socket.AF_INET,
        type: int = socket.SOCK_STREAM,  # noqa: A002 -- trio's name for it
        proto: int = 0,
    ) -> trio.socket.SocketType:
        made = trio.socket.from_stdlib_socket(socket.socket(family, type, proto))
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            made.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        return made


def open_backend(name: str, **more: Any) -> AbstractAsyncContextManager[TransferPlane]:
    """The plane of one of `BACKENDS`, with small steps; `more` are options of its own.

    Called inside trio: all sockets that the run makes from then on are small.
    """
    trio.socket.set_custom_socket_factory(_SmallBuffers())
    small = CHUNK_BLOCKS * BLOCK_BYTES
    given: dict[str, Any] = dict(more)
    if name == "tcp":
        from trinamo.transports.tcp.transfer.plane import TransferOptions, open_transfer_plane

        given.setdefault("slice_bytes", small // 2)
        return open_transfer_plane(TransferOptions(**given))
    given.setdefault("chunk_bytes", small)
    if name.startswith("nixl"):
        from trinamo.transports.nixl.options import NixlOptions
        from trinamo.transports.nixl.plane import open_nixl_plane

        given = {"drain_s": 3.0, "connect_timeout_s": 10.0, **given}
        return open_nixl_plane(NixlOptions(same_host=name == "nixl cma", **given))
    from trinamo.transports.mooncake.engine import MooncakeOptions
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    return open_mooncake_plane(MooncakeOptions(**{"drain_s": 0.5, **given}))


# --- locked memory -------------------------------------------------------------------------------


def forbid_locking() -> None:
    """`RLIMIT_MEMLOCK=0`, and without the right that would let root ignore it."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    library = ctypes.CDLL(None, use_errno=True)
    # Version 3 and this process; then effective, permitted, inheritable, twice 32 bits of each.
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if library.capget(ctypes.byref(header), ctypes.byref(held)):
        raise OSError(ctypes.get_errno(), "capget")
    for place in (0, 1):
        held[place] &= ~(1 << _CAP_IPC_LOCK)
    if library.capset(ctypes.byref(header), ctypes.byref(held)):
        raise OSError(ctypes.get_errno(), "capset")


def can_lock() -> bool:
    """Whether the kernel locks a page for us."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    library = ctypes.CDLL(None)
    return bool(library.mlock(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE)) == 0)


# --- the process ---------------------------------------------------------------------------------


async def _own(settings: Settings) -> None:
    if not settings.has_locked_memory:
        forbid_locking()
    memory = mmap.mmap(settings.memory_fd, COUNT * BLOCK_BYTES)
    async with AsyncExitStack() as held:
        regions = []
        for name in settings.backends:
            plane = await held.enter_async_context(open_backend(name))
            regions.append(await plane.register(memory, block_bytes=BLOCK_BYTES))
        said: dict[str, Any] = {
            "descriptions": [region.describe().hex() for region in regions],
            "can_lock": can_lock(),
        }
        print(json.dumps(said), flush=True)
        async for line in trio.wrap_file(sys.stdin):
            assert json.loads(line)["do"] == "renew"
            said = {"generation": [region.renew() for region in regions]}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    trio.run(_own, Settings(**json.loads(sys.argv[1])))
