"""The runtime as a whole: what it owns, and the order in which it ends."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
import trio

from tests.runtime.one_process import OneProcess, open_process, task_count, until_tasks
from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.env import Env
from trinamo.runtime.errors import (
    EngineError,
    OverloadedError,
    UnavailableError,
)
from trinamo.runtime.planes import ControlPlane, Delete, EventPlane, Put, WatchEvent
from trinamo.runtime.process import opening
from trinamo.runtime.process.settings import (
    REQUESTS_MAX,
    SETTINGS_PREFIX,
    reset_setting,
    write_setting,
)
from trinamo.runtime.protocol.discovery.instances import EndpointName, decode_instance
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.transports.memory.control import MemoryControlPlane

COUNT = EndpointName("test", "backend", "count")
HANG = EndpointName("test", "backend", "hang")


async def count(request: int, context: Context) -> AsyncGenerator[int, None]:
    for number in range(request):
        if context.is_stopped:
            return
        yield number
        await trio.sleep(0.001)


async def test_an_endpoint_is_found_called_and_gone_again() -> None:
    transports = OneProcess()
    async with open_process(transports) as caller:
        client = await caller.client(COUNT)
        async with open_process(transports, serving=True) as server:
            instance = await server.serve(COUNT, count, request_type=int)
            await client.router.wait_instances()
            async with client.stream(5, int) as stream:
                items = [item async for item in stream]
                assert stream.instance == instance
        with trio.fail_after(120):
            while client.router.instances:
                await trio.sleep(0.005)
        with pytest.raises(UnavailableError):
            async with client.stream(5, int):
                pass

    assert items == [0, 1, 2, 3, 4]
    assert transports.open_streams == 0
    assert not transports.store.range("", now=trio.current_time()).entries


async def test_shutdown_lets_a_stream_finish_and_takes_nothing_new() -> None:
    """The instance stays visible as draining until its work is done, so nobody's wait is cut."""
    transports = OneProcess()
    async with open_process(transports) as caller:
        client = await caller.client(COUNT)
        async with open_process(transports, serving=True) as server:
            instance = await server.serve(COUNT, count, request_type=int)
            await client.router.wait_instances()
            async with client.stream(200, int) as stream:
                await anext(stream)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(server.shutdown)
                    await trio.testing.wait_all_tasks_blocked()
                    entry = transports.store.get(instance.key, now=trio.current_time())
                    assert entry is not None
                    assert decode_instance(entry.key, entry.value).draining
                    with pytest.raises(UnavailableError):
                        async with client.stream(1, int):
                            pass
                    rest = [item async for item in stream]

    assert rest == list(range(1, 200))


async def test_a_worker_says_that_it_leaves_before_it_takes_its_models_away() -> None:
    """Otherwise a frontend could not tell it from one that lost its lease."""
    transports = OneProcess()
    seen: list[tuple[str, bool]] = []

    async def follow(*, task_status: trio.TaskStatus[None]) -> None:
        async with MemoryControlPlane(transports.store).watch("") as events:
            await anext(events)
            task_status.started()
            async for event in events:
                match event:
                    case Put(entry) if entry.key == instance.key:
                        is_draining = decode_instance(entry.key, entry.value).draining
                        seen.append(("instance put", is_draining))
                    case Delete("models/m/1", _):
                        seen.append(("card deleted", True))
                    case _:
                        pass

    async with trio.open_nursery() as nursery:
        async with open_process(transports, serving=True) as server:
            instance = await server.serve(COUNT, count, request_type=int)
            await server.publish("models/m/1", b"{}")
            await nursery.start(follow)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert seen == [("instance put", True), ("card deleted", True)]


async def test_shutdown_stops_then_kills_what_does_not_finish() -> None:
    transports = OneProcess()
    ended: list[Reason | None] = []

    async def hang(request: int, context: Context) -> AsyncGenerator[int, None]:
        try:
            yield request
            await trio.sleep_forever()
        finally:
            ended.append(context.reason)

    async with open_process(transports) as caller:
        client = await caller.client(HANG)
        async with open_process(
            transports,
            serving=True,
            shutdown__drain_timeout_s=0.05,
            shutdown__stop_timeout_s=0.05,
        ) as server:
            await server.serve(HANG, hang, request_type=int)
            await client.router.wait_instances()
            async with client.stream(7, int) as stream:
                first = await anext(stream)
                await server.shutdown()
                with pytest.raises(UnavailableError, match="shut down"):
                    await anext(stream)

    assert first == 7
    assert ended == [Reason.WORKER_SHUTDOWN]


async def test_a_handler_that_raises_is_a_typed_error_and_the_worker_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transports = OneProcess()

    async def fails(request: int, context: Context) -> AsyncGenerator[int, None]:
        for number in range(request):
            yield number
        raise ValueError("the model is on fire")

    async with open_process(transports) as caller:
        client = await caller.client(COUNT)
        async with open_process(transports, serving=True) as server:
            await server.serve(COUNT, fails, request_type=int)
            await client.router.wait_instances()
            with pytest.raises(EngineError, match="on fire"):
                async with client.stream(0, int):
                    pass
            async with client.stream(2, int) as stream:
                items = [await anext(stream), await anext(stream)]
                with pytest.raises(EngineError, match="on fire"):
                    await anext(stream)
            assert server.worker is not None
            await server.worker.wait_idle()

    assert items == [0, 1]
    assert sum("the handler raised" in record.message for record in caplog.records) == 2


@pytest.mark.check
async def test_clients_that_leave_leave_no_task_stream_or_block() -> None:
    """128 answers at 64 at once over two workers, a third of them abandoned after an item."""
    transports = OneProcess()
    dice = random.Random(11)
    outcomes: list[str] = []
    generate = EndpointName("test", "backend", "generate")
    async with open_process(transports) as caller:
        client = await caller.client(generate)
        async with (
            open_exact_engine() as one,
            open_exact_engine() as two,
            open_process(transports, serving=True) as server_one,
            open_process(transports, serving=True) as server_two,
        ):
            await server_one.serve(generate, one.generate, request_type=GenerateRequest)
            await server_two.serve(generate, two.generate, request_type=GenerateRequest)
            await client.router.wait_instances(2)
            limiter = trio.CapacityLimiter(64)
            # Both workers have their link to the caller then.
            for _ in range(2):
                async with client.stream(ask("warm up"), Delta) as stream:
                    async for _ in stream:
                        pass
            await until_quiet(transports)
            before = task_count()

            async def one_request(number: int, leaves: bool) -> None:
                async with limiter, client.stream(ask(f"prompt {number}"), Delta) as deltas:
                    async for delta in deltas:
                        if leaves:
                            outcomes.append("left")
                            return
                        if delta.finish_reason is not None:
                            outcomes.append(delta.finish_reason)

            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    for number in range(128):
                        nursery.start_soon(one_request, number, dice.random() < 1 / 3)
            await until_quiet(transports)
            await until_tasks(before)
            used = [engine.statistics().blocks_used for engine in (one, two)]
            running = [engine.statistics().running for engine in (one, two)]
            in_flight = client.router.in_flight

    assert len(outcomes) == 128
    assert set(outcomes) == {"left", "length"}
    assert used == [0, 0]
    assert running == [0, 0]
    assert in_flight == 0


def ask(text: str) -> GenerateRequest:
    return GenerateRequest(model="exact", prompt=text, max_tokens=16, temperature=0)


async def until_quiet(transports: OneProcess) -> None:
    with trio.fail_after(120):
        while transports.open_streams:
            await trio.sleep(0.005)


async def test_an_endpoint_called_in_a_generator_that_is_dropped_is_killed() -> None:
    """What the HTTP edge does: an async generator over the stream, closed before its end."""
    transports = OneProcess()
    async with open_process(transports) as caller:
        client = await caller.client(COUNT)
        async with open_process(transports, serving=True) as server:
            await server.serve(COUNT, count, request_type=int)
            await client.router.wait_instances()

            async def relay() -> AsyncGenerator[int, None]:
                async with client.stream(10**9, int) as stream:
                    async for item in stream:
                        yield item

            async with aclosing(relay()) as items:
                first = await anext(items)
            assert server.worker is not None
            with trio.fail_after(120):
                await server.worker.wait_idle()

    assert first == 0
    assert transports.open_streams == 0


class Mute(MemoryControlPlane):
    """A store that never answers who asks for the settings."""

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        if prefix == SETTINGS_PREFIX:
            await trio.sleep_forever()
        async with super().watch(prefix) as events:
            yield events


class MuteStore(OneProcess):
    @asynccontextmanager
    async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
        yield Mute(self.store)


class Clinging(OneProcess):
    @asynccontextmanager
    async def open_events(self, config: Config, env: Env) -> AsyncIterator[EventPlane]:
        async with super().open_events(config, env) as events:
            yield events
            await trio.sleep_forever()


async def test_a_plane_that_does_not_close_is_left_in_its_time(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_process(Clinging(), serving=True):
        left_at = trio.current_time()

    assert trio.current_time() - left_at == 3
    assert "the planes did not close within 3 s" in caplog.text


async def test_a_start_waits_a_bounded_time_for_settings_that_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "_SETTINGS_WAIT_S", 0.01)
    transports = MuteStore()
    async with open_process(transports, serving=True) as server, open_process(transports) as caller:
        await server.serve(COUNT, count, request_type=int)
        client = await caller.client(COUNT)
        await client.router.wait_instances()
        async with client.stream(2, int) as stream:
            items = [item async for item in stream]
        value = server.settings.get(REQUESTS_MAX)

    assert items == [0, 1]
    assert value == REQUESTS_MAX.default


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    """Run a program that opens a runtime, in a process of its own."""
    head = """
        import trio
        from tests.runtime.one_process import OneProcess, open_process
        from trinamo.runtime.errors import ConnectError
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_error_in_the_body_is_printed_short_and_with_its_own_text() -> None:
    ended = run_script(
        """
        async def main():
            async with open_process(OneProcess(), serving=True):
                async with trio.open_nursery() as jobs:
                    jobs.start_soon(trio.sleep_forever)
                    async with open_process(OneProcess()) as runtime:
                        {}["the job's own key"]

        trio.run(main)
        """
    )

    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert 'KeyError: "the job\'s own key"' in ended.stderr
    assert len(lines) < 30, ended.stderr


def test_an_error_in_the_body_is_caught_by_its_own_type() -> None:
    ended = run_script(
        """
        async def main():
            for error in (KeyError("mine"), ConnectError("ours"), KeyboardInterrupt()):
                try:
                    async with open_process(OneProcess(), serving=True):
                        raise error
                except type(error) as caught:
                    print(caught is error, error.__context__)

        trio.run(main)
        """
    )

    assert ended.stdout == "True None\n" * 3, ended.stderr


async def test_the_cluster_s_bound_on_requests_replaces_the_worker_s_own() -> None:
    transports = OneProcess()
    async with open_process(transports, serving=True) as server, open_process(transports) as caller:
        await server.serve(COUNT, count, request_type=int)
        client = await caller.client(COUNT)
        await client.router.wait_instances()
        await write_setting(caller.control, REQUESTS_MAX.name, "1")
        await trio.testing.wait_all_tasks_blocked()
        async with client.stream(10_000, int) as stream:
            await anext(stream)
            with pytest.raises(OverloadedError):
                async with client.stream(1, int) as refused:
                    await anext(refused)
        await reset_setting(caller.control, REQUESTS_MAX.name)
        await trio.testing.wait_all_tasks_blocked()
        async with client.stream(10_000, int) as stream, client.stream(1, int) as beside:
            assert [item async for item in beside] == [0]
