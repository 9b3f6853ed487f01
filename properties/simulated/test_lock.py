"""One at a time has the lock, whatever happens to the links, replies and leases of those who want it."""

from __future__ import annotations

import random

import hypothesis
import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.process import lock
from trinamo.runtime.process.lock import open_lock
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane
from trinamo.transports.memory.store import MemoryStore

TTL_S = 2.0
CONTENDERS = 3
Step = tuple[float, int, str]
steps = st.lists(
    st.tuples(
        st.floats(0.05, 4.0),
        st.integers(0, CONTENDERS - 1),
        st.sampled_from(("cut", "mend", "lose_reply", "delay", "leave")),
    ),
    max_size=14,
)


class History:
    """Who has the lock, and what must never have been."""

    def __init__(self) -> None:
        self.inside: list[int] = []
        self.revisions: list[int] = []
        self.faults: list[str] = []
        self.served = [0] * CONTENDERS

    def enter(self, who: int, revision: int) -> None:
        if self.inside:
            self.faults.append(f"{who} has it, and so have {self.inside}")
        if self.revisions and revision <= self.revisions[-1]:
            self.faults.append(f"revision {revision} after {self.revisions[-1]}")
        self.inside.append(who)
        self.revisions.append(revision)
        self.served[who] += 1


class Contender:
    """One process that takes the lock again and again, over a link of its own."""

    def __init__(self, who: int, store: MemoryStore, history: History) -> None:
        self.faults = ControlFaults()
        self._who, self._history = who, history
        self._control = MemoryControlPlane(store, faults=self.faults)
        self._dice = random.Random(who)
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        while True:
            with trio.CancelScope() as self._scope:
                try:
                    async with open_lock(self._control, "one", ttl_s=TTL_S) as held:
                        self._history.enter(self._who, held.revision)
                        try:
                            await trio.sleep(self._dice.uniform(0.1, 5.0))
                        finally:
                            self._history.inside.remove(self._who)
                except TrinamoError:
                    await trio.sleep(0.2)

    def act(self, action: str) -> None:
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
            case _:
                self._scope.cancel()


async def play(plan: list[Step]) -> History:
    store, history = MemoryStore(), History()
    contenders = [Contender(who, store, history) for who in range(CONTENDERS)]
    async with trio.open_nursery() as nursery:
        for contender in contenders:
            nursery.start_soon(contender.run)
        for wait_s, who, action in plan:
            await trio.sleep(wait_s)
            contenders[who].act(action)
        for contender in contenders:
            contender.act("mend")
        history.served = [0] * CONTENDERS
        await trio.sleep(CONTENDERS * (5 + 2 * TTL_S) + 5)
        nursery.cancel_scope.cancel()
    if store.range(lock.LOCKS_KEY, now=0).entries:
        history.faults.append("a key was left behind")
    return history


def played(plan: list[Step]) -> History:
    return trio.run(play, plan, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(deadline=None, max_examples=50)
@given(plan=steps)
def test_one_at_a_time_has_it_and_each_gets_it_once_all_links_are_whole(plan: list[Step]) -> None:
    """With ever higher revisions; and who is cancelled leaves no key."""
    history = played(plan)

    assert history.faults == []
    assert min(history.served) >= 1


def test_a_holder_that_counts_on_more_than_its_lease_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mistake is planted, and the drawn plans find it: the property can fail."""
    monkeypatch.setattr(lock, "SAFE_SHARE", 1.5)
    hypothesis.find(
        steps,
        lambda plan: any("and so have" in each for each in played(plan).faults),
        settings=settings(deadline=None, max_examples=2000, phases=[hypothesis.Phase.generate]),
        random=random.Random(1),
    )
