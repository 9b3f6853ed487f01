"""`trio.open_tcp_stream` in a run: at once, and with trio's own words where nobody answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from trinamo.sim import Network, SeedChoices, World


def play(main: Callable[[], Awaitable[None]]) -> World:
    world = World(SeedChoices(1))
    Network(world)

    async def run() -> None:
        async def serve() -> None:
            await trio.serve_tcp(lambda stream: stream.send_all(b"hello"), 7000)

        world.boot("server", serve)
        await trio.sleep(0.1)
        await world.boot("client", main).ended.wait()

    world.run(run)
    return world


def test_a_name_is_dialled_by_the_task_that_asks() -> None:
    async def main() -> None:
        async with await trio.open_tcp_stream("server", 7000) as stream:
            assert b"".join([part async for part in stream]) == b"hello"

    world = play(main)
    # A task for each address would have rows of its own.
    tasks = {row.field("task") for row in world.trace.of_kind("step") if row.host == "client.1"}
    assert len(tasks) == 1


def test_whom_nobody_answers_gets_the_error_that_trio_raises() -> None:
    async def main() -> None:
        with pytest.raises(
            OSError, match=r"all attempts to connect to server:7001 failed"
        ) as caught:
            await trio.open_tcp_stream("server", 7001)
        group = caught.value.__cause__
        assert isinstance(group, ExceptionGroup)
        assert isinstance(group.exceptions[0], ConnectionRefusedError)

    play(main)


def test_what_is_no_address_is_refused_as_by_trio() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="host must be str or bytes"):
            await trio.open_tcp_stream(None, 7000)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="port must be int"):
            await trio.open_tcp_stream("server", "7000")  # type: ignore[arg-type]

    play(main)


def test_one_s_own_address_may_be_named() -> None:
    async def main() -> None:
        mine = str((await trio.socket.getaddrinfo("client", 0))[0][4][0])
        async with await trio.open_tcp_stream("server", 7000, local_address=mine) as stream:
            assert stream.socket.getsockname()[0] == mine

    play(main)
