"""What a process shows of its lease."""

from __future__ import annotations

import trio
import trio.testing

from trinamo.runtime.env import RealEnv
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.planes import Lease
from trinamo.runtime.process.entries import LeaseState, OwnEntries
from trinamo.transports.memory.control import MemoryControlPlane


class Stingy(MemoryControlPlane):
    """Grants one lease, and then none before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.again = trio.Event()
        self.granted = 0

    async def grant_lease(self, ttl_s: float) -> Lease:
        if self.granted:
            await self.again.wait()
        self.granted += 1
        return await super().grant_lease(ttl_s)


async def test_exactly_one_lease_state_is_shown(autojump_clock: trio.testing.MockClock) -> None:
    control, metrics = Stingy(), Metrics(RealEnv())
    entries = OwnEntries(control, RealEnv(), metrics=metrics, lease_ttl_s=10)

    def shown() -> list[LeaseState]:
        return [known for known in LeaseState if metrics.value("lease_state", state=known)]

    async def until(state: LeaseState) -> None:
        with trio.fail_after(100):
            while shown() != [state]:
                await trio.sleep(0.1)

    assert shown() == [LeaseState.NONE]
    async with trio.open_nursery() as nursery:
        await nursery.start(entries.registrar.run)
        assert shown() == [LeaseState.GRANTED]
        await control.revoke_lease(entries.registrar.state.lease_id)
        await until(LeaseState.LOST)
        control.again.set()
        await until(LeaseState.GRANTED)
        entries.begin_leaving()
        await entries.registrar.revoke()
        assert shown() == [LeaseState.NONE]
        nursery.cancel_scope.cancel()
