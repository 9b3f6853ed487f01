"""What the transfer-plane suite runs on: makers of pairs of planes that can reach each other.

A new transport is tested by adding a backend to `BACKENDS`; the suite never names one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs

from tests.needs import MOONCAKE, NIXL
from trinamo.runtime.planes import TransferPlane
from trinamo.transports.memory.transfer import TransferFabric, open_memory_transfer_plane
from trinamo.transports.mooncake.engine import Engine, MooncakeOptions, make_engine
from trinamo.transports.mooncake.plane import open_mooncake_plane
from trinamo.transports.nixl.options import NixlOptions
from trinamo.transports.nixl.plane import open_nixl_plane
from trinamo.transports.tcp import TcpOptions
from trinamo.transports.tcp.transfer.plane import TransferOptions, open_transfer_plane

BLOCK_BYTES = 4096
BLOCKS = 64

Planes = tuple[TransferPlane, TransferPlane]


@attrs.frozen(kw_only=True)
class TransferBackend:
    """One implementation under test, or one way to set it up."""

    name: str
    open_planes: Callable[[], AbstractAsyncContextManager[Planes]]
    settles_at_once: bool = True
    """Whether an aborted transfer touches nothing any more when `abort` returns."""
    is_verified: bool = True
    """Whether it compares checksums."""


@asynccontextmanager
async def open_in_memory() -> AsyncIterator[Planes]:
    fabric = TransferFabric()
    async with (
        open_memory_transfer_plane(fabric) as ours,
        open_memory_transfer_plane(fabric) as theirs,
    ):
        yield ours, theirs


def over_tcp(options: TransferOptions) -> Callable[[], AbstractAsyncContextManager[Planes]]:
    @asynccontextmanager
    async def open_over_tcp() -> AsyncIterator[Planes]:
        async with open_transfer_plane(options) as ours, open_transfer_plane(options) as theirs:
            yield ours, theirs

    return open_over_tcp


def over_nixl(options: NixlOptions) -> Callable[[], AbstractAsyncContextManager[Planes]]:
    @asynccontextmanager
    async def open_over_nixl() -> AsyncIterator[Planes]:
        NIXL.imported()
        async with open_nixl_plane(options) as ours, open_nixl_plane(options) as theirs:
            yield ours, theirs

    return open_over_nixl


@functools.cache
def mooncake_engines() -> tuple[Engine, Engine]:
    """Two for all tests: to destroy one takes a second."""
    return make_engine(MooncakeOptions()), make_engine(MooncakeOptions())


@asynccontextmanager
async def open_over_mooncake() -> AsyncIterator[Planes]:
    MOONCAKE.imported()
    one, other = mooncake_engines()
    async with (
        open_mooncake_plane(engine=one) as ours,
        open_mooncake_plane(engine=other) as theirs,
    ):
        yield ours, theirs


BACKENDS = [
    TransferBackend(name="memory", open_planes=open_in_memory),
    TransferBackend(name="tcp", open_planes=over_tcp(TransferOptions())),
    TransferBackend(
        name="tcp-sealed",
        open_planes=over_tcp(TransferOptions(tcp=TcpOptions(secret=bytes(range(32))))),
    ),
    TransferBackend(
        name="tcp-crc32",
        open_planes=over_tcp(TransferOptions(checksum="crc32", slice_bytes=3 * BLOCK_BYTES)),
    ),
    TransferBackend(
        name="tcp-plain",
        open_planes=over_tcp(TransferOptions(checksum="none")),
        is_verified=False,
    ),
    TransferBackend(
        name="nixl-cma",
        open_planes=over_nixl(NixlOptions()),
        settles_at_once=False,
        is_verified=False,
    ),
    TransferBackend(
        name="nixl-tcp",
        open_planes=over_nixl(NixlOptions(same_host=False, chunk_bytes=5 * BLOCK_BYTES)),
        settles_at_once=False,
        is_verified=False,
    ),
    TransferBackend(
        name="mooncake-tcp",
        open_planes=open_over_mooncake,
        settles_at_once=False,
        is_verified=False,
    ),
]


class Pages:
    """Memory full of numbers that no two blocks share, and what it should hold."""

    def __init__(self, seed: int, blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.memory = bytearray(random.Random(seed).randbytes(blocks * block_bytes))
        self.expected = bytearray(self.memory)

    def block(self, number: int) -> bytes:
        return bytes(self.memory[number * self.block_bytes : (number + 1) * self.block_bytes])

    def expect(self, number: int, data: bytes) -> None:
        self.expected[number * self.block_bytes : (number + 1) * self.block_bytes] = data
