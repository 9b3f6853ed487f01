"""The admission queue on a virtual clock: whatever clients, workers and operators do meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import trio
import trio.testing
from hypothesis import given, strategies as st

from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import DeadlineError, OverloadedError, UnavailableError
from trinamo.runtime.events.busy import BusyLimits
from trinamo.runtime.http.admission.admission import Admission
from trinamo.runtime.http.admission.queue import LOOK_INTERVAL_S
from trinamo.runtime.http.exchanges import ClientGoneError
from trinamo.runtime.http.models.models import RemoteEngine
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.sinks import Sink

ENGINES = 2
WATCH_S = 1 / 16
ticks = st.integers(0, 40).map(lambda tick: tick / 8)


class FakeEngine(RemoteEngine):
    """An engine whose workers are busy as long as it is told so."""

    def __init__(self) -> None:
        self.is_told_busy = False

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        raise AssertionError("nobody asks")

    @property
    def has_instance(self) -> bool:
        return True

    @property
    def refused_cards(self) -> int:
        return 0

    def is_busy(self, limits: BusyLimits) -> bool:
        return self.is_told_busy

    def directed(
        self, instance_id: str | None, tell: Callable[[str, int | None], None]
    ) -> RemoteEngine:
        raise AssertionError("nobody asks")


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
    takes_s: float
    leaves_s: float
    """The client goes so long after it came, if it still waits then."""
    deadline_s: float
    cancelled_s: float
    """The request's task is cancelled so long after it came."""


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
    st.builds(Plan, ticks, st.integers(0, ENGINES - 1), ticks, times, times, times),
    min_size=1,
    max_size=20,
)
busy_times = st.lists(st.tuples(ticks, st.integers(0, ENGINES - 1), st.booleans()), max_size=8)


class House:
    """An admission, and all that happens to it."""

    def __init__(self, requests_max: int, queue_max: int, timeout_s: float) -> None:
        self.admission = Admission(Metrics(RealEnv()), requests_max=requests_max)
        self.admission.busy = BusyLimits(blocks=0.5)
        self.admission.queue.length_max = queue_max
        self.admission.queue.timeout_s = timeout_s
        self.engines = [FakeEngine() for _ in range(ENGINES)]
        self.waiting: list[FakeEngine] = []
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
        with admission.arriving():
            admission.check_load(self.engines)
        story.came, self.came = self.came, self.came + 1
        context = admission.enter("a", engine)
        if context is None:
            exchange: Any = FakeExchange()
            nursery.start_soon(exchange.leave_after, plan.leaves_s)
            deadline = trio.current_time() + plan.deadline_s
            self.waiting.append(engine)
            try:
                context = await admission.queue.wait("a", engine, exchange, deadline)
            finally:
                self.waiting.remove(engine)
        story.entered_s = trio.current_time()
        assert admission.in_flight <= admission.requests_max
        try:
            await trio.sleep(plan.takes_s)
        finally:
            admission.leave(context)

    async def tell_busy(self, at_s: float, engine: int, is_busy: bool) -> None:
        await trio.sleep(at_s)
        self.engines[engine].is_told_busy = is_busy

    async def watch(self) -> None:
        """Nobody waits for a place that is free for longer than a look takes."""
        free_s = 0.0
        while True:
            await trio.sleep(WATCH_S)
            assert 0 <= self.admission.queue.length <= self.admission.queue.length_max
            is_free = self.admission.has_room and not all(e.is_told_busy for e in self.waiting)
            free_s = free_s + WATCH_S if is_free else 0.0
            assert free_s <= LOOK_INTERVAL_S + 2 * WATCH_S


@given(
    wanted=plans,
    busy=busy_times,
    drains_s=times,
    requests_max=st.integers(1, 4),
    queue_max=st.integers(1, 6),
    timeout_s=ticks.map(lambda s: s + 1 / 8),
)
def test_every_request_ends_once_in_order_and_leaves_nothing(
    wanted: list[Plan],
    busy: list[tuple[float, int, bool]],
    drains_s: float,
    requests_max: int,
    queue_max: int,
    timeout_s: float,
) -> None:
    """Each request has one end; places go in the order of arrival for each engine; the bounds hold.

    No place is lost and no waiter leaks, whether the client leaves, its time is up, its task is
    cancelled, workers become busy, or a drain begins while it waits.
    """
    house = House(requests_max, queue_max, timeout_s)
    stories = [Story(plan) for plan in wanted]
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(house.play, stories, busy, drains_s, clock=clock)
    assert house.admission.in_flight == house.admission.queue.length == 0
    assert not house.admission.queue._lines
    for story in stories:
        assert len(story.ends) == 1
    for engine in range(ENGINES):
        entered = [s for s in stories if s.plan.engine == engine and s.entered_s < math.inf]
        entered.sort(key=lambda story: story.came)
        assert [s.entered_s for s in entered] == sorted(s.entered_s for s in entered)


@given(wanted=plans, requests_max=st.integers(1, 4))
def test_without_limits_of_time_everybody_is_answered(
    wanted: list[Plan], requests_max: int
) -> None:
    """If nobody leaves and there is room to wait, nobody is refused."""
    patient = [
        attrs.evolve(plan, leaves_s=math.inf, deadline_s=math.inf, cancelled_s=math.inf)
        for plan in wanted
    ]
    house = House(requests_max, len(wanted), 3600)
    stories = [Story(plan) for plan in patient]
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(house.play, stories, [], math.inf, clock=clock)
    assert [story.ends for story in stories] == [["answered"]] * len(stories)
