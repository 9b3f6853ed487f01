"""asyncio through trio-asyncio, on simulated hosts: streams, libraries, the order of tasks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
import trio
import trio_asyncio

from tests.sim.net.talk import swallow
from trinamo.sim import (
    Choices,
    Network,
    ReplayChoices,
    SeedChoices,
    StepLimit,
    UnsupportedTrio,
    World,
    search,
)
from trinamo.sim.explore.hints import hints_of

PORT = 7000


def aio(main: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
    """A host's main function that runs `main` on an asyncio loop of its own."""

    async def run() -> None:
        async with trio_asyncio.open_loop():
            await trio_asyncio.aio_as_trio(main)()

    return run


def play(
    server: Callable[[], Awaitable[object]],
    client: Callable[[], Awaitable[object]],
    choices: Choices,
) -> World:
    world = World(choices, virtual_s_max=600)
    Network(world)

    async def main() -> None:
        world.boot("server", server)
        await trio.sleep(0.1)
        await world.boot("client", client).ended.wait()

    world.run(main)
    return world


async def echo_lines() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line.upper())
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(answer, port=PORT)
    await server.serve_forever()


def talk_over_streams(seed: int) -> str:
    said = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("server", PORT)
        for number in range(5):
            writer.write(b"line %d\n" % number)
            said.append(await reader.readline())
        writer.close()
        await writer.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("server", PORT + 1)
        loop = asyncio.get_running_loop()
        assert (await loop.getaddrinfo("server", "http"))[0][4] == ("10.0.0.1", 80)
        assert await loop.getnameinfo(("10.0.0.1", 80)) == ("server", "80")

    world = play(aio(echo_lines), aio(client), SeedChoices(seed))
    assert said == [b"LINE %d\n" % number for number in range(5)]
    assert all("7001" in hint for hint in hints_of(world, None))
    return world.trace.digest


def test_streams_run_on_simulated_sockets_and_replay() -> None:
    assert talk_over_streams(1) == talk_over_streams(1) != talk_over_streams(2)


# --- order ------------------------------------------------------------------------------------------


def farewells(choices: Choices) -> str:
    """Twelve tasks of a group, which lie in a set, say goodbye on one connection when it is cancelled."""

    async def client() -> None:
        _, writer = await asyncio.open_connection("server", PORT)

        async def live(number: int) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                writer.write(b"goodbye of %d\n" % number)

        async def live_together() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(live(number))
                await asyncio.sleep(0.1)
                raise ValueError

        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await live_together()
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def serve() -> None:
        await trio.serve_tcp(swallow, PORT)

    return play(serve, aio(client), choices).trace.digest


def test_cancelled_tasks_end_in_one_order_whatever_their_addresses_are() -> None:
    junk = []
    digests = set()
    for turn in range(4):
        junk.append([bytes(size) for size in range(100, 400 + turn, 8) for _ in range(turn * 31)])
        digests.add(farewells(SeedChoices(3)))
    assert len(digests) == 1


def farewells_at_the_end() -> list[int]:
    """Of many tasks some live when their loop ends; the order in which they are cancelled."""
    said = []

    async def client() -> None:
        async def live(number: int) -> None:
            try:
                await asyncio.sleep(0 if number % 16 else 100)
            except asyncio.CancelledError:
                said.append(number)

        tasks = [asyncio.create_task(live(number)) for number in range(160)]
        await asyncio.sleep(0.1)
        assert sum(not task.done() for task in tasks) == 10

    play(aio(echo_lines), aio(client), SeedChoices(3))
    return said


def test_tasks_cancelled_with_their_loop_end_in_one_order_whatever_ran_before() -> None:
    loop = asyncio.new_event_loop()
    orders, tasks = set(), []
    for more in (0, 3, 50):
        tasks += [loop.create_task(asyncio.sleep(0)) for _ in range(more)]
        orders.add(tuple(farewells_at_the_end()))
    loop.run_until_complete(asyncio.gather(*tasks))
    loop.close()
    assert len(orders) == 1
    assert sorted(*orders) == [*range(0, 160, 16)]


HERE = Path(__file__).resolve().parents[3]


def test_the_digest_is_the_same_in_processes_with_other_hash_seeds() -> None:
    ask = (
        "from tests.sim.net.test_asyncio import *\n"
        "print(farewells(SeedChoices(5)), talk_over_streams(5), ask_nats(5))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ask],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=HERE,
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def count_up(choices: Choices) -> int:
    """Two tasks of one loop add to a number, each after it has waited once in between."""
    total = 0

    async def client() -> None:
        async def add(naps: int) -> None:
            nonlocal total
            for _ in range(naps):
                await asyncio.sleep(0)
            seen = total
            await asyncio.sleep(0)
            total = seen + 1

        async with asyncio.TaskGroup() as group:
            group.create_task(add(0))
            group.create_task(add(2))

    play(aio(echo_lines), aio(client), choices)
    return total


def test_tasks_of_one_loop_run_in_an_order_of_the_seed_and_dull_is_first_in_first_out() -> None:
    assert count_up(ReplayChoices([])) == 2
    choices = SeedChoices(0)
    count_up(choices)
    assert "asyncio" in {choice.label for choice in choices.record}
    totals = [count_up(SeedChoices(seed)) for seed in range(30)]
    assert {1, 2} == set(totals), "an update is lost where asyncio's own order never loses one"


def test_callbacks_keep_their_order() -> None:
    called: list[int] = []

    async def client() -> None:
        loop = asyncio.get_running_loop()
        for number in range(20):
            loop.call_soon(called.append, number)
        await asyncio.sleep(1)

    for seed in range(10):
        called.clear()
        play(aio(echo_lines), aio(client), SeedChoices(seed))
        assert called == [*range(20)]


# --- failures --------------------------------------------------------------------------------------


def test_a_cancelled_error_that_nobody_asked_for_is_a_finding() -> None:
    async def ask(world: World) -> None:
        async def client() -> None:
            lost = asyncio.get_running_loop().create_future()
            lost.cancel("the connection is lost")
            await lost

        await world.boot("client", aio(client)).ended.wait()

    found = search(ask, seeds=range(1))
    assert found is not None
    assert found.rule == "error CancelledError"
    assert "the connection is lost" in str(found)


def test_a_host_on_asyncio_is_stopped_and_killed_without_a_finding() -> None:
    async def server() -> None:
        await asyncio.sleep(100)

    for end in (World.stop, World.kill):
        world = World(SeedChoices(1))
        Network(world)

        async def main(world: World = world, end: Callable[[World, str], object] = end) -> None:
            host = world.boot("server", aio(server))
            await trio.sleep(1)
            end(world, "server")
            await host.ended.wait()

        world.run(main)


# --- limits -----------------------------------------------------------------------------------------


def test_a_task_that_does_not_end_when_cancelled_is_a_step_limit_and_spoils_no_later_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trinamo.sim.core.world.UNWINDING_STEPS_MAX", 3000)

    async def deaf() -> None:
        while True:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue

    world = World(SeedChoices(0))
    Network(world)

    async def main() -> None:
        world.boot("a", aio(deaf))
        await trio.sleep(5)

    with pytest.raises(StepLimit, match="cancelled tasks do not end"):
        world.run(main)
    assert talk_over_streams(1) == talk_over_streams(1)


def test_a_trio_asyncio_whose_parts_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio_asyncio, "TrioEventLoop", object)
    with pytest.raises(UnsupportedTrio, match=r"trio-asyncio 0\..*_main_loop_init is gone"):
        play(trio.sleep_forever, trio.lowlevel.checkpoint, SeedChoices(1))


def test_asyncio_may_be_loaded_in_the_middle_of_a_run() -> None:
    ask = (
        "import sys, trio\n"
        "from trinamo.sim import Network, SeedChoices, World\n"
        "assert 'asyncio' not in sys.modules\n"
        "world = World(SeedChoices(1))\n"
        "Network(world)\n"
        "async def main():\n"
        "    import asyncio, trio_asyncio\n"
        "    async def inner():\n"
        "        return hash(asyncio.current_task())\n"
        "    async with trio_asyncio.open_loop():\n"
        "        assert await trio_asyncio.aio_as_trio(inner)() < 10\n"
        "world.run(main)\n"
        "import asyncio\n"
        "assert asyncio.tasks.Task is asyncio.Task\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", ask], cwd=HERE, check=True)


# --- nats-py ----------------------------------------------------------------------------------------


class Broker:
    """As much of a NATS server as core messages need."""

    def __init__(self) -> None:
        self.interest: list[tuple[str, str, trio.SocketStream]] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        await stream.send_all(
            b"INFO %s\r\n" % json.dumps({"max_payload": 9999, "headers": True}).encode()
        )
        held = bytearray()
        with trio.CancelScope():
            while await self._next(stream, held):
                pass

    async def _next(self, stream: trio.SocketStream, held: bytearray) -> bool:
        while b"\r\n" not in held:
            if not (data := await stream.receive_some()):
                return False
            held += data
        line, _, rest = bytes(held).partition(b"\r\n")
        verb, *words = line.decode().split()
        size = int(words[-1]) + 2 if verb == "PUB" else 0
        while len(rest) < size:
            rest += await stream.receive_some()
        held[:] = rest[size:]
        if verb == "PING":
            await stream.send_all(b"PONG\r\n")
        elif verb == "SUB":
            self.interest.append((words[0], words[-1], stream))
        elif verb == "PUB":
            subject, reply = words[0], words[1] if len(words) == 3 else ""
            for pattern, number, other in self.interest:
                if pattern in (subject, f"{subject.rpartition('.')[0]}.*"):
                    head = " ".join(filter(None, ("MSG", subject, number, reply, words[-1])))
                    await other.send_all(head.encode() + b"\r\n" + rest[:size])
        return True


def ask_nats(seed: int) -> str:
    answers: list[bytes] = []

    async def serve() -> None:
        await trio.serve_tcp(Broker().serve, 4222)

    async def client() -> None:
        one, other = [await nats.connect("nats://server:4222") for _ in range(2)]

        async def shout(message: Any) -> None:
            await message.respond(message.data.upper())

        await one.subscribe("ask", cb=shout)
        await one.flush()
        while len(answers) < 5:
            answer = await other.request("ask", b"n%d" % len(answers), timeout=2)
            answers.append(answer.data)
        await one.close()
        await other.close()

    world = play(serve, aio(client), SeedChoices(seed))
    assert answers == [b"N%d" % number for number in range(5)]
    assert hints_of(world, None) == []
    return world.trace.digest


def test_nats_py_asks_and_answers_as_it_was_published_and_replays() -> None:
    assert ask_nats(1) == ask_nats(1) != ask_nats(2)
