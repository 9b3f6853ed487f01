"""What a process says of its cluster without asking anybody."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
import pytest
import trio

from tests.runtime.one_process import OneProcess, open_process
from trinamo.runtime.context import Context
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.planes import ControlStatistics, EventStatistics
from trinamo.runtime.process.settings import REQUESTS_MAX, write_setting
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.view import overview as module
from trinamo.runtime.view.overview import (
    FrontendView,
    InstanceView,
    Overview,
    describe_planes,
    for_clients,
    overview,
)
from trinamo.transports.memory.control import MemoryControlPlane

WAIT = EndpointName("test", "backend", "wait")


async def wait(request: int, context: Context) -> AsyncGenerator[int, None]:
    yield request
    await context.wait_stopped()


async def test_it_names_the_instances_their_state_and_our_requests() -> None:
    transports = OneProcess()
    async with open_process(transports) as caller:
        client = await caller.client(WAIT)
        async with open_process(transports, serving=True) as server:
            instance = await server.serve(
                WAIT, wait, request_type=int, metadata={"model": "m" * 1000, "engine": "e"}
            )
            await client.router.wait_instances()
            async with client.stream(1, int) as stream:
                await anext(aiter(stream))
                busy = overview(caller)
            client.router.fail(instance, DisconnectedError("gone"), Context("r"))
            (inhibited,) = overview(caller).instances

    [told] = busy.instances
    assert list(told.transports) == ["tcp"]
    assert told.metadata == {"model": told.model, "engine": "e"}
    view = FrontendView(status="ready", in_flight=0, models=[], cluster=busy)
    # Whoever may ask for an answer may see the rest.
    assert for_clients(view).cluster.instances == [  # type: ignore[union-attr]
        InstanceView(
            endpoint=str(WAIT),
            id=instance.id,
            state="live",
            in_flight=1,
            incarnation=1,
            model="m" * module.TEXT_CHARACTERS_MAX,
            engine="e",
        )
    ]
    assert (inhibited.state, inhibited.in_flight) == ("inhibited", 0)
    assert msgspec.json.decode(msgspec.json.encode(busy), type=Overview) == busy


async def test_it_is_bounded_and_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "INSTANCES_MAX", 1)
    transports = OneProcess()
    async with (
        open_process(transports) as caller,
        open_process(transports, serving=True) as one,
        open_process(transports, serving=True) as other,
    ):
        client = await caller.client(WAIT)
        for server in (one, other):
            await server.serve(WAIT, wait, request_type=int)
        await client.router.wait_instances(2)
        seen = overview(caller)

    assert (len(seen.instances), seen.instances_left_out) == (1, 1)


class Counting(MemoryControlPlane):
    """A plane that has lost its store."""

    def statistics(self) -> ControlStatistics:
        return ControlStatistics(is_connected=False, watches=1, stream_losses=2, resyncs=0)


async def test_planes_that_count_are_told_and_others_are_left_out() -> None:
    transports = OneProcess()
    async with open_process(transports) as process:
        silent = overview(process), describe_planes(process)
        process.control = Counting(transports.store)
        seen = overview(process), describe_planes(process)

    assert (silent[0].control, silent[0].events, silent[1]) == (None, None, {})
    assert seen[0].control == ControlStatistics(
        is_connected=False, watches=1, stream_losses=2, resyncs=0
    )
    assert seen[1] == {"control_connected": False}
    told = Overview(control=seen[0].control, events=EventStatistics(True, 1, 0, 0, 0), instances=[])
    assert msgspec.json.decode(msgspec.json.encode(told), type=Overview) == told


async def test_every_process_follows_the_settings() -> None:
    transports = OneProcess()
    name = REQUESTS_MAX.name
    async with (
        open_process(transports) as caller,
        open_process(transports, serving=True) as server,
    ):
        await write_setting(caller.control, name, "9")
        for process in (caller, server):
            with trio.fail_after(120):
                value = await process.settings.wait_change(REQUESTS_MAX, REQUESTS_MAX.default)
            assert value == 9
            assert process.metrics.value("setting_value", setting=name) == 9
