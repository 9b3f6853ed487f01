"""Whatever answers at an address, or does not: the sign of it is the right one."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.leftovers import open_descriptors
from tests.transports.tcp.ends import dialled, welcomed
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.transfer.settlement import InquiryResult
from trinamo.runtime.protocol.transfer.stream import (
    Inquiry,
    InquiryAnswer,
    Ping,
    decode_message,
    encode_message,
)
from trinamo.transports.tcp import TcpOptions, TransferOptions, open_transfer_plane

LIFE = "0123456789abcdef"
Serve = Callable[[trio.SocketStream], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield "127.0.0.1:{1}".format(*listeners[0].socket.getsockname())
        nursery.cancel_scope.cancel()


async def sign_of(address: str, timeout_s: float = 60.0) -> InquiryResult:
    async with open_transfer_plane() as plane:
        with trio.fail_after(120):
            return (await plane.mover.inquire(address, LIFE, 7, timeout_s=timeout_s)).result


def saying(data: bytes, *, greets: bool = True) -> Serve:
    async def serve(accepted: trio.SocketStream) -> None:
        stream: Any = accepted
        if greets:
            stream = await welcomed(stream, Purpose.TRANSFERS, LIFE)
        async with stream:
            await stream.receive_some()
            # Whoever asks hangs up as soon as it has read enough, at times before all is sent.
            with suppress(trio.BrokenResourceError):
                await stream.send_all(data)
                await stream.send_eof()
                async for _ in stream:
                    pass

    return serve


async def hang_up(stream: trio.SocketStream) -> None:
    await stream.aclose()


async def reset(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()


def cut_off() -> bytes:
    return encode_message(InquiryAnswer(True, True))[:-1]


@pytest.mark.parametrize(
    ("serve", "sign"),
    [
        (saying(encode_message(InquiryAnswer(True, True))), InquiryResult.SAYS_SETTLED),
        (saying(encode_message(InquiryAnswer(True, False))), InquiryResult.SAYS_MOVING),
        (saying(encode_message(InquiryAnswer(False, True))), InquiryResult.REPLACED),
        (saying(encode_message(Ping(1))), InquiryResult.NONSENSE),
        (saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), InquiryResult.NONSENSE),
        (saying(b"HTTP/1.1 400 Bad Request\r\n\r\n", greets=False), InquiryResult.NONSENSE),
        (saying(b"", greets=False), InquiryResult.BROKEN),
        (saying(encode_message(InquiryAnswer(True, True), 9)), InquiryResult.NONSENSE),
        (saying(b""), InquiryResult.BROKEN),
        (saying(cut_off()), InquiryResult.BROKEN),
        (hang_up, InquiryResult.BROKEN),
        (reset, InquiryResult.BROKEN),
    ],
)
async def test_what_is_answered_is_read_as_the_table_says(
    serve: Serve, sign: InquiryResult
) -> None:
    async with serving(serve) as address:
        assert await sign_of(address) is sign


async def test_a_listener_that_takes_nobody_is_silent_and_not_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "127.0.0.1:{1}".format(*server.getsockname())
        assert await sign_of(address, 3) is InquiryResult.SILENT


async def test_a_full_queue_of_connections_is_no_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        where = server.getsockname()
        filling = [socket.socket() for _ in range(4)]
        for each in filling:
            each.setblocking(False)
            each.connect_ex(where)
        await trio.sleep(0.05)
        assert await sign_of("127.0.0.1:{1}".format(*where), 3) is InquiryResult.UNREACHED
        for each in filling:
            each.close()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:0", "no.such.name.invalid:1", "\x00:1"])
async def test_an_address_that_is_none_is_not_reached(address: str) -> None:
    assert await sign_of(address) is InquiryResult.UNREACHED


async def test_nobody_there_is_a_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "127.0.0.1:{1}".format(*server.getsockname())
    assert await sign_of(address) is InquiryResult.REFUSED


def listening_process() -> subprocess.Popen[bytes]:
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


async def test_a_process_that_is_stopped_is_silent_and_one_that_is_killed_refuses() -> None:
    with listening_process() as process:
        assert process.stdout is not None
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        os.kill(process.pid, signal.SIGSTOP)
        assert await sign_of(address, 3) is InquiryResult.SILENT
        process.kill()
        process.wait()
        assert await sign_of(address) is InquiryResult.REFUSED


@pytest.mark.parametrize(
    "first",
    [
        encode_message(Inquiry(2, LIFE, 7)),
        encode_message(Inquiry(1, LIFE, 7), 1) + b"x",
        encode_message(InquiryAnswer(True, True)),
    ],
)
async def test_an_inquiry_that_makes_no_sense_ends_its_stream_and_no_more(first: bytes) -> None:
    async with open_transfer_plane() as plane:
        stream = await dialled(plane.mover.address, Purpose.TRANSFERS)
        async with stream:
            await stream.send_all(first)
            with trio.fail_after(120):
                assert await stream.receive_some() == b""
        assert plane.mover.malformed_count == 1
        assert await sign_of(plane.mover.address) is InquiryResult.REPLACED


async def test_the_answer_is_one_small_frame() -> None:
    async with open_transfer_plane() as plane, trio.open_nursery() as nursery:
        stream = await dialled(plane.mover.address, Purpose.TRANSFERS)
        async with stream:
            await stream.send_all(encode_message(Inquiry(1, plane.incarnation, 7)))
            said = b"".join([part async for part in stream])
        assert len(said) < 64
        assert decode_message(said[8:]) == InquiryAnswer(True, False)
        nursery.cancel_scope.cancel()


async def test_questions_leave_no_descriptor_and_no_task() -> None:
    async with open_transfer_plane() as plane, open_transfer_plane() as peer:

        async def ask(times: int) -> tuple[frozenset[tuple[int, str]], int]:
            for _ in range(times):
                await plane.mover.inquire(peer.mover.address, peer.incarnation, 7, timeout_s=60)
                with trio.move_on_after(0):
                    await plane.mover.inquire(peer.mover.address, peer.incarnation, 7, timeout_s=60)
            await trio.testing.wait_all_tasks_blocked(0.01)
            return open_descriptors(), trio.lowlevel.current_statistics().tasks_living

        descriptors_before, tasks_before = await ask(5)
        descriptors, tasks = await ask(100)
        assert descriptors <= descriptors_before
        assert tasks == tasks_before


async def test_a_port_that_outlives_its_plane_is_silent_and_never_refused() -> None:
    async with open_transfer_plane() as plane:
        address = plane.mover.address
        plane.mover.outlives_us = True
    port = int(address.rpartition(":")[2])
    assert await sign_of(address, 3) is InquiryResult.SILENT
    for descriptor in _listening_at(port):
        os.close(descriptor)
    assert await sign_of(address) is InquiryResult.REFUSED


def _listening_at(port: int) -> list[int]:
    """Descriptors of ours that listen there."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(each.name))) as copy:
                if copy.family == socket.AF_INET and copy.getsockname()[1] == port:
                    found.append(int(each.name))
        except OSError:
            continue
    return found


async def test_a_plane_that_is_closed_in_order_leaves_its_port() -> None:
    async with open_transfer_plane() as plane:
        port = int(plane.mover.address.rpartition(":")[2])
    async with open_transfer_plane(TransferOptions(tcp=TcpOptions(port=port))) as again:
        assert again.mover.address == plane.mover.address
