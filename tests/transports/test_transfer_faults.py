"""Every fault of `transfer_faults.py` and `routed_faults.py`, on every backend, two processes each."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from tests.needs import needs_library_of
from tests.transports.memory_owner import BACKENDS
from tests.transports.owner_process import COUNT
from tests.transports.routed_faults import ROUTED_FAULTS, open_routed_scene
from tests.transports.transfer_faults import FAULTS
from tests.transports.transfer_scenes import NOT_HERE, PATIENCE_S, Fault, Scene, open_scene
from trinamo.runtime.protocol.transfer.description import Direction

ONE_SIDED = [name for name in BACKENDS if not name.startswith("tcp")]


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    """No row waits for ever."""
    with trio.fail_after(120):
        yield


async def hold(scene: Scene, faults: list[Fault]) -> None:
    """Run rows one after the other in one process: what one leaves behind would spoil the next."""
    for fault in faults:
        found = await fault.run(scene)
        where = f"{fault.name} on {scene.name}: {found}"
        assert found.kind in fault.allows(scene.name), where
        assert found.wrong_count == 0, where
        if found.kind == "DeadlineError":
            # What a one-sided backend has under way may land when the peer goes on.
            assert found.is_settled is scene.name.startswith("tcp"), where
    mover, owner = scene.standing
    mover.prepare(Direction.READ, owner)
    transfer = mover.start(Direction.READ, deadline_s=PATIENCE_S)
    assert (await transfer.wait()).block_count == COUNT
    assert mover.wrong_count(transfer, Direction.READ, owner) == 0


def named(words: str) -> list[Fault]:
    return [fault for fault in FAULTS if words in fault.name]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_peer_that_is_killed_ends_every_transfer_with_a_typed_error(backend: str) -> None:
    needs_library_of(backend)
    async with open_scene(backend) as scene:
        await hold(scene, named("killed"))


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_peer_that_is_stopped_costs_no_more_than_the_deadline(backend: str) -> None:
    needs_library_of(backend)
    async with open_scene(backend) as scene:
        await hold(scene, named("stopped"))


@pytest.mark.parametrize("backend", BACKENDS)
async def test_nonsense_damage_and_want_end_as_the_table_says(backend: str) -> None:
    needs_library_of(backend)
    async with open_scene(backend) as scene:
        signals = named("killed") + named("stopped")
        await hold(scene, [fault for fault in FAULTS if fault not in signals])


@pytest.mark.parametrize("backend", ONE_SIDED)
async def test_a_router_carries_on_over_tcp_where_the_peer_can_be_reached(backend: str) -> None:
    needs_library_of(backend)
    async with open_routed_scene(backend) as scene:
        for fault in ROUTED_FAULTS:
            found = await fault.run(scene)
            where = f"{fault.name} on {backend}: {found}"
            assert found.kind in fault.allows(backend), where
            assert found.wrong_count == 0, where
            if fault.carried_on:
                assert found.text == fault.carried_on, where


async def test_every_fault_has_a_row_for_every_backend() -> None:
    for backend in BACKENDS:
        rows = [fault for fault in FAULTS if NOT_HERE not in fault.allows(backend)]
        assert len(rows) >= len(FAULTS) - 2
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.name for fault in ROUTED_FAULTS} <= {fault.name for fault in FAULTS}
