"""Programs on asyncio alone, the same for every simulator; each returns what it has seen."""

from __future__ import annotations

import asyncio
from contextlib import suppress

UPDATES = 11
PIECES, PIECE_BYTES = 30, 10
CHUNK_BYTES, SENT_BYTES_MAX = 64 << 10, 20 << 20
STALLED_S = 60.0


async def lost_update() -> int:
    """Two tasks count in one variable, and yield between reading and writing it: how many counts are lost."""
    count = 0

    async def add() -> None:
        nonlocal count
        for _ in range(UPDATES):
            seen = count
            await asyncio.sleep(0)
            count = seen + 1
            await asyncio.sleep(0)

    await asyncio.gather(add(), add())
    return 2 * UPDATES - count


async def careful_update() -> int:
    """One of the two reads and writes at one go but once; how many counts are lost."""
    count = 0

    async def add(careless_at: int) -> None:
        nonlocal count
        for number in range(UPDATES):
            seen = count
            if number == careless_at:
                await asyncio.sleep(0)
            count = seen + 1
            await asyncio.sleep(0)

    await asyncio.gather(add(UPDATES // 2), add(-1))
    return 2 * UPDATES - count


async def pieces(host: str) -> int:
    """A client writes 30 times 10 bytes; in how many pieces the server reads them."""
    reads: list[int] = []
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            reads.append(len(data))
        writer.close()
        is_over.set()

    server = await asyncio.start_server(serve, host, 7001)
    _, writer = await asyncio.open_connection(host, 7001)
    for _ in range(PIECES):
        writer.write(b"x" * PIECE_BYTES)
        await writer.drain()
        await asyncio.sleep(0.05)
    writer.close()
    await is_over.wait()
    server.close()
    return len(reads)


async def never_read(host: str) -> int:
    """A client writes up to 20 MB to a server that never reads: bytes that `drain` let pass in a minute."""

    is_over = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await is_over.wait()
        writer.close()

    server = await asyncio.start_server(serve, host, 7002)
    _, writer = await asyncio.open_connection(host, 7002)
    sent = 0
    with suppress(asyncio.TimeoutError):
        while sent < SENT_BYTES_MAX:
            writer.write(bytes(CHUNK_BYTES))
            await asyncio.wait_for(writer.drain(), STALLED_S)
            sent += CHUNK_BYTES
    is_over.set()
    writer.transport.abort()
    await asyncio.sleep(1)
    server.close()
    return sent
