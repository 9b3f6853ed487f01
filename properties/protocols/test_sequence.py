"""Replaying with gaps, copies and turns comes to the publisher's own state."""

from __future__ import annotations

from hypothesis import given, strategies as st

from trinamo.runtime.protocol.events.sequence import (
    SequencedEvent,
    SequencedView,
    SequenceStep,
    WholeSnapshot,
)

FATES = st.sampled_from(["arrive", "lose", "repeat", "hold"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), FATES),
        st.tuples(st.just("beat"), FATES),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("release"), st.none()),
        st.tuples(st.just("ask"), st.none()),
        st.tuples(st.just("answer"), st.none()),
    ),
    max_size=60,
)


class Follower:
    """The sum of a publisher's events, as far as this one knows."""

    def __init__(self) -> None:
        self.view = SequencedView(buffered_max=4)
        self.state: list[int] = []

    def apply(self, step: SequenceStep) -> None:
        if step.snapshot is not None:
            self.state = list(b"".join(step.snapshot))
        self.state += [body[0] for body in step.events]


class Publisher:
    def __init__(self) -> None:
        self.incarnation = 1
        self.sequence = 0
        self.state: list[int] = []

    def event(self) -> SequencedEvent:
        self.sequence += 1
        self.state.append(self.sequence % 256)
        return SequencedEvent("p", self.incarnation, self.sequence, bytes([self.state[-1]]))

    def beat(self) -> SequencedEvent:
        return SequencedEvent("p", self.incarnation, self.sequence, None)

    def snapshot(self) -> WholeSnapshot:
        return WholeSnapshot("p", self.incarnation, self.sequence, (bytes(self.state),))


@given(STEPS)
def test_a_follower_ends_where_the_publisher_is(steps: list[tuple[str, str | None]]) -> None:
    """Whatever was lost, repeated or late: a last event and a snapshot if asked for make it whole.

    And at every moment at which it needs none, its state is what the publisher once had.
    """
    publisher, follower = Publisher(), Follower()
    held: list[SequencedEvent] = []
    asked: list[WholeSnapshot] = []
    history: set[tuple[int, ...]] = {()}
    for kind, fate in steps:
        arriving: list[SequencedEvent] = []
        if kind in ("publish", "beat"):
            event = publisher.event() if kind == "publish" else publisher.beat()
            history.add(tuple(publisher.state))
            if fate == "hold":
                held.append(event)
            elif fate != "lose":
                arriving = [event] * (2 if fate == "repeat" else 1)
        elif kind == "release":
            arriving, held = held, []
        elif kind == "restart":
            publisher.incarnation += 1
            publisher.sequence, publisher.state = 0, []
        elif kind == "ask" and follower.view.needs_snapshot:
            asked.append(publisher.snapshot())
        elif kind == "answer" and asked:
            follower.apply(follower.view.take_snapshot(asked.pop(0)))
        for event in arriving:
            follower.apply(follower.view.receive(event))
        if not follower.view.needs_snapshot:
            assert tuple(follower.state) in history

    follower.apply(follower.view.receive(publisher.beat()))
    if follower.view.needs_snapshot:
        follower.apply(follower.view.take_snapshot(publisher.snapshot()))
    assert not follower.view.needs_snapshot
    assert follower.state == publisher.state


@given(st.lists(st.integers(1, 400), max_size=400))
def test_what_waits_for_a_snapshot_is_bounded(numbers: list[int]) -> None:
    """However many events come while a snapshot is awaited, no more than the bound are kept."""
    view = SequencedView(buffered_max=8)
    view.receive(SequencedEvent("p", 1, 5000, b"x"))
    for number in numbers:
        view.receive(SequencedEvent("p", 1, number, b"x"))
        assert len(view._buffered) <= 8
