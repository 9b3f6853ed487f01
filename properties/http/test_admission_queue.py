"""The admission queue on a virtual clock: whatever clients, workers and operators do meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import attrs
import trio
import trio.testing
from hypothesis import example, given, strategies as st

from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import DeadlineError, OverloadedError, UnavailableError
from trinamo.runtime.events.load import BusyLimits
from trinamo.runtime.http.admission.admission import (
    LOOK_INTERVAL_S,
    Admission,
    Ticket,
    WaitingRequest,
)
from trinamo.runtime.http.exchanges import ClientGoneError
from trinamo.runtime.http.models.models import RoutedEngine
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.sinks import Sink

ENGINES = 2
WATCH_S = 1 / 16
ticks = st.integers(0, 40).map(lambda tick: tick / 8)


class FakeEngine(RoutedEngine):
    """An engine whose workers are busy as long as it is told so."""

    def __init__(self) -> None:
        self.is_told_busy = False
        self.places = 0

    def takes(self) -> bool:
        self.places -= 1
        if self.places < 0:
            self.places += 1
            return False
        return True

    async def forward(
        self,
        request: GenerateRequest,
        context: Context,
        sink: Sink[Delta],
        worker: str | None = None,
        took: Callable[[str, int | None], None] | None = None,
        accepted: Callable[[], None] | None = None,
    ) -> None:
        raise AssertionError("nobody asks")

    @property
    def has_instance(self) -> bool:
        return True

    @property
    def is_there(self) -> bool:
        return True

    def is_busy(self, limits: BusyLimits) -> bool:
        return self.is_told_busy


class FakeExchange:
    """As much of an exchange as the queue has to do with."""

    def __init__(self) -> None:
        self.leave: Callable[[], None] = lambda: None

    def on_gone(self, listener: Callable[[], None]) -> None:
        self.leave = listener

    async def leave_after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.leave()


@attrs.frozen
class Plan:
    """One request."""

    comes_s: float
    engine: int
    party: int
    takes_s: float
    leaves_s: float
    """The client goes so long after it came, if it still waits then."""
    deadline_s: float
    cancelled_s: float
    """The request's task is cancelled so long after it came."""
    is_unwanted: bool = False
    """No worker takes it, whatever room there is."""


@attrs.define(eq=False)
class Story:
    """What came of one request."""

    plan: Plan
    came: int = -1
    """Which one it was of those that asked for a place."""
    entered_s: float = math.inf
    ends: list[str] = attrs.Factory(list)


times = st.one_of(st.just(math.inf), ticks)
plans = st.lists(
    st.builds(
        Plan,
        ticks,
        st.integers(0, ENGINES - 1),
        st.integers(0, 2),
        ticks,
        times,
        times,
        times,
    ),
    min_size=1,
    max_size=20,
)
busy_times = st.lists(st.tuples(ticks, st.integers(0, ENGINES - 1), st.booleans()), max_size=8)


class House:
    """An admission, and all that happens to it."""

    def __init__(
        self, requests_max: int, queue_max: int, timeout_s: float, places: int = 100
    ) -> None:
        self.admission = Admission(Metrics(RealEnv()), requests_max=requests_max)
        self.admission.busy = BusyLimits(blocks=0.5)
        self.admission.queue.length_max = queue_max
        self.admission.queue.timeout_s = timeout_s
        self.engines = [FakeEngine() for _ in range(ENGINES)]
        for engine in self.engines:
            engine.places = places
        self.waiting: list[FakeEngine] = []
        self.entered: list[Story] = []
        self.came = 0

    async def play(
        self, stories: list[Story], busy: list[tuple[float, int, bool]], drains_s: float
    ) -> None:
        async with trio.open_nursery() as others:
            others.start_soon(self.admission.queue.look)
            others.start_soon(self.watch)
            for change in busy:
                others.start_soon(self.tell_busy, *change)
            async with trio.open_nursery() as nursery:
                for story in stories:
                    nursery.start_soon(self.tell, story, others)
                if drains_s < math.inf:
                    await trio.sleep(drains_s)
                    self.admission.drain()
                    assert self.admission.queue.length == 0
            others.cancel_scope.cancel()

    async def tell(self, story: Story, nursery: trio.Nursery) -> None:
        await trio.sleep(story.plan.comes_s)
        try:
            with trio.move_on_after(story.plan.cancelled_s) as scope:
                await self.ask(story, nursery)
        except (OverloadedError, DeadlineError, UnavailableError, ClientGoneError) as error:
            story.ends.append(type(error).__name__)
        else:
            story.ends.append("cancelled" if scope.cancelled_caught else "answered")

    async def ask(self, story: Story, nursery: trio.Nursery) -> None:
        plan, admission = story.plan, self.admission
        engine = self.engines[plan.engine]
        wanted = WaitingRequest(str(plan.engine), lambda: engine)
        deadline = trio.current_time() + plan.deadline_s
        with admission.arriving("a", str(plan.party)) as ticket:
            admission.check_load(self.engines, ticket.party)
            story.came, self.came = self.came, self.came + 1
            while story.entered_s == math.inf:
                context = admission.enter(ticket, wanted)
                if context is None:
                    context = await self.wait(ticket, wanted, engine, deadline, plan, nursery)
                assert admission.in_flight <= admission.requests_max
                is_taken = not plan.is_unwanted and engine.takes()
                try:
                    if not is_taken:
                        admission.queue.refused(ticket, wanted, OverloadedError("full"))
                        continue
                    admission.queue.took(ticket)
                    story.entered_s = trio.current_time()
                    self.entered.append(story)
                    await trio.sleep(plan.takes_s)
                finally:
                    engine.places += is_taken
                    admission.leave(context, ticket)

    async def wait(
        self,
        ticket: Ticket,
        wanted: WaitingRequest,
        engine: FakeEngine,
        deadline: float,
        plan: Plan,
        nursery: trio.Nursery,
    ) -> Context:
        exchange: Any = FakeExchange()
        nursery.start_soon(exchange.leave_after, plan.leaves_s)
        self.waiting.append(engine)
        try:
            return await self.admission.queue.wait(ticket, wanted, exchange, deadline)
        finally:
            self.waiting.remove(engine)

    async def tell_busy(self, at_s: float, engine: int, is_busy: bool) -> None:
        await trio.sleep(at_s)
        self.engines[engine].is_told_busy = is_busy

    async def watch(self) -> None:
        """Nobody waits for a place that is free for longer than a look takes."""
        free_s = 0.0
        while True:
            await trio.sleep(WATCH_S)
            queue = self.admission.queue
            assert 0 <= queue.length <= queue.length_max + self.admission.requests_max
            is_free = self.admission.has_room and any(
                each.places and not each.is_told_busy for each in self.waiting
            )
            free_s = free_s + WATCH_S if is_free else 0.0
            assert free_s <= LOOK_INTERVAL_S + 2 * WATCH_S


def plan(comes_s: float, takes_s: float = 1 / 8) -> Plan:
    """A request of one party for one engine, whose client has patience."""
    return Plan(comes_s, 0, 0, takes_s, math.inf, math.inf, math.inf)


REFUSED: dict[str, Any] = {
    "busy": [],
    "drains_s": math.inf,
    "requests_max": 3,
    "queue_max": 6,
    "timeout_s": 5.0,
    "places": 1,
}
"""The only worker takes one, and those that wait are tried, refused, and stand where they stood."""


@given(
    wanted=plans,
    busy=busy_times,
    drains_s=times,
    requests_max=st.integers(1, 4),
    queue_max=st.integers(1, 6),
    timeout_s=ticks.map(lambda s: s + 1 / 8),
    places=st.integers(1, 4),
)
@example(**REFUSED, wanted=[plan(0, 1), plan(1 / 8), plan(1 / 4)])
@example(**REFUSED, wanted=[plan(0, 5 / 4), plan(1 / 8), plan(1 / 4)])
def test_every_request_ends_once_in_order_and_leaves_nothing(
    wanted: list[Plan],
    busy: list[tuple[float, int, bool]],
    drains_s: float,
    requests_max: int,
    queue_max: int,
    timeout_s: float,
    places: int,
) -> None:
    """Each request has one end; a party's places at one engine go in the order of arrival, also if
    workers, who have `places`, refuse some that were let in; the bounds hold.

    No place is lost and no waiter leaks, whether the client leaves, its time is up, its task is
    cancelled, workers become busy, or a drain begins while it waits.
    """
    house = House(requests_max, queue_max, timeout_s, places)
    stories = [Story(plan) for plan in wanted]
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(house.play, stories, busy, drains_s, clock=clock)
    assert house.admission.in_flight == house.admission.queue.length == 0
    assert not house.admission.queue._parties
    assert not house.admission._here
    assert all(engine.places == places for engine in house.engines)
    for story in stories:
        assert len(story.ends) == 1
    for engine, party in product(range(ENGINES), range(3)):
        whose = (engine, party)
        came = [s.came for s in house.entered if (s.plan.engine, s.plan.party) == whose]
        assert came == sorted(came)


@given(wanted=plans, requests_max=st.integers(1, 4))
def test_without_limits_of_time_everybody_is_answered(
    wanted: list[Plan], requests_max: int
) -> None:
    """If nobody leaves and there is room to wait, nobody is refused, and of one party the only place
    goes to who came first, whichever engine he wants.
    """
    patient = [
        attrs.evolve(plan, leaves_s=math.inf, deadline_s=math.inf, cancelled_s=math.inf)
        for plan in wanted
    ]
    house = House(requests_max, len(wanted), 3600)
    stories = [Story(plan) for plan in patient]
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(house.play, stories, [], math.inf, clock=clock)
    assert [story.ends for story in stories] == [["answered"]] * len(stories)
    for party in range(3 if requests_max == 1 else 0):
        came = [story.came for story in house.entered if story.plan.party == party]
        assert came == sorted(came)


@given(places=st.integers(1, 3), behind=st.lists(ticks, min_size=1, max_size=8))
def test_who_is_refused_wherever_there_is_room_keeps_nobody_out(
    places: int, behind: list[float]
) -> None:
    """He stands first until his time is over; meanwhile one of the others is let in at each look."""
    unwanted = attrs.evolve(plan(0), is_unwanted=True)
    stories = [Story(each) for each in (unwanted, *(plan(1 / 8 + at_s) for at_s in behind))]
    house = House(requests_max=4, queue_max=9, timeout_s=60, places=places)

    async def main() -> None:
        async with trio.open_nursery() as others:
            others.start_soon(house.admission.queue.look)
            async with trio.open_nursery() as nursery:
                for story in stories:
                    nursery.start_soon(house.tell, story, others)
            others.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    ends = [story.ends for story in stories]
    assert ends == [["OverloadedError"], *[["answered"]] * len(behind)]
    for story in stories[1:]:
        waited_s = story.entered_s - story.plan.comes_s
        assert waited_s <= (len(behind) + 1) * LOOK_INTERVAL_S


crowds = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1 / 8, 1]), st.integers(1, 20)), min_size=1, max_size=5
)
"""When how many come at once: far more than there are places, and most in one moment."""


@given(
    crowds=crowds,
    light=st.lists(st.integers(1, 16).map(lambda tick: tick / 8), min_size=1, max_size=5),
    requests_max=st.integers(1, 3),
    queue_max=st.integers(2, 6),
)
def test_a_greedy_party_takes_no_more_than_its_turn(
    crowds: list[tuple[float, int]], light: list[float], requests_max: int, queue_max: int
) -> None:
    """Whoever asks for one thing at a time is never refused, whatever a crowd of another party does,
    and while he waits one of the crowd goes before him, beside those that had their places already.
    """
    greedy = [
        Story(Plan(at_s, 0, 0, 1 / 2, math.inf, math.inf, math.inf))
        for at_s, count in crowds
        for _ in range(count)
    ]
    modest = [Story(Plan(gap_s, 0, 1, 1 / 8, math.inf, math.inf, math.inf)) for gap_s in light]
    house = House(requests_max, queue_max, 3600)
    passed: list[int] = []

    async def ask_one_by_one(nursery: trio.Nursery) -> None:
        for story in modest:
            await trio.sleep(story.plan.comes_s)
            before = len(house.entered)
            await house.ask(story, nursery)
            passed.append(house.entered.index(story) - before)

    async def main() -> None:
        async with trio.open_nursery() as others:
            others.start_soon(house.admission.queue.look)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_one_by_one, others)
                for story in greedy:
                    nursery.start_soon(house.tell, story, others)
            others.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(passed) == len(modest)
    assert max(passed) <= 1 + requests_max
    assert {end for story in greedy for end in story.ends} <= {"answered", "OverloadedError"}
