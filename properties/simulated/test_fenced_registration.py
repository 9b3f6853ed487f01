"""No two living processes own one key, whatever happens to their links, leases and replies."""

from __future__ import annotations

import random
from collections.abc import Sequence

import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import FencedError
from trinamo.runtime.planes import Delete, Entry, Put
from trinamo.runtime.worker.registration import Registrar
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane

KEY = "instances/ns/backend/generate/1"
TTL_S = 4.0
ACTIONS = ("cut", "mend", "lose_reply", "delay", "register", "withdraw", "revoke")
Step = tuple[float, int, str]
steps = st.lists(
    st.tuples(st.floats(0.01, 6.0), st.integers(0, 1), st.sampled_from(ACTIONS)), max_size=14
)


class SeededEnv(RealEnv):
    """The dice always fall alike."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(7)


class Claimant:
    """One process that wants `KEY`, over a link of its own."""

    def __init__(self, name: str, store: MemoryControlPlane) -> None:
        self.faults = ControlFaults()
        self.name = name
        self.registrar = Registrar(
            MemoryControlPlane(store.store, faults=self.faults), SeededEnv(), ttl_s=TTL_S
        )
        self._store = store
        self._writes = 0

    async def register(self) -> None:
        self._writes += 1
        value = f"{self.name}.{self._writes}".encode()
        with trio.move_on_after(1.0):
            try:
                await self.registrar.register(KEY, lambda _: value)
            except FencedError:
                return

    async def withdraw(self) -> None:
        with trio.move_on_after(1.0):
            await self.registrar.withdraw(KEY)

    async def act(self, action: str) -> None:
        match action:
            case "cut":
                self.faults.cut_link()
            case "mend":
                self.faults.mend_link()
                self.faults.delay_s = 0.0
            case "lose_reply":
                self.faults.lose_replies(1)
            case "delay":
                self.faults.delay_s = 0.3
            case "register":
                await self.register()
            case "withdraw":
                await self.withdraw()
            case "revoke" if self.registrar.state.lease_id:
                # An operator, or the store's own clock: the process is not asked.
                await self._store.revoke_lease(self.registrar.state.lease_id)
            case _:
                pass


async def play(plan: Sequence[Step]) -> list[Put | Delete]:
    store = MemoryControlPlane()
    history: list[Put | Delete] = []
    claimants = [Claimant("a", store), Claimant("b", store)]
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def watch() -> None:
            async with store.watch(KEY) as events:
                async for event in events:
                    if isinstance(event, (Put, Delete)):
                        history.append(event)  # noqa: PERF401 -- a watch never ends

        for claimant in claimants:
            await nursery.start(claimant.registrar.run)
        await trio.testing.wait_all_tasks_blocked()
        for wait_s, who, action in plan:
            await trio.sleep(wait_s)
            await claimants[who].act(action)
        for claimant in claimants:
            await claimant.act("mend")
        await trio.sleep(4 * TTL_S)
        nursery.cancel_scope.cancel()
    return history


@settings(deadline=None, max_examples=50)
@given(plan=steps)
def test_a_key_never_changes_hands_while_its_holder_lives(plan: list[Step]) -> None:
    """Between writes under two leases the key was gone: its lease had ended or it was given up."""
    history = trio.run(play, plan, clock=trio.testing.MockClock(autojump_threshold=0))
    held: Entry | None = None
    for event in history:
        if isinstance(event, Delete):
            held = None
            continue
        if held is not None:
            assert event.entry.lease_id == held.lease_id
        held = event.entry


@settings(deadline=None, max_examples=50)
@given(plan=steps)
def test_who_still_wants_a_key_that_is_free_gets_it(plan: list[Step]) -> None:
    """Once all links are whole, the last to have had the key and not withdrawn it has it."""
    last = [(0.5, 0, "mend"), (0.5, 1, "mend"), (0.5, 1, "withdraw"), (0.5, 0, "register")]
    history = trio.run(play, [*plan, *last], clock=trio.testing.MockClock(autojump_threshold=0))
    final = history[-1]
    assert isinstance(final, Put)
    assert final.entry.value.startswith(b"a.")
