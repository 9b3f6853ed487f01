"""What becomes an event, and when an outage is over."""

from __future__ import annotations

from trinamo.runtime.view.facts import MINUTES_MAX, FrontendFacts, FrontendTotals
from trinamo.runtime.view.timeline import EVENTS_MAX, Minutes, Seen, Timeline

WELL = Seen("worker-1", "", "worker")
LOST = Seen("worker-1", "connection lost", "worker")


def told(timeline: Timeline) -> list[tuple[str, str, float, float | None]]:
    return [(each.kind, each.text, each.at, each.until) for each in timeline.events]


def test_what_is_there_at_the_first_look_has_not_joined() -> None:
    timeline = Timeline()
    timeline.observe("instances", 1.0, {"a": WELL})
    timeline.observe("instances", 2.0, {"a": WELL, "b": WELL})
    timeline.observe("instances", 3.0, {"b": WELL})

    assert told(timeline) == [("joined", "joined", 2.0, None), ("left", "left", 3.0, None)]


def test_an_outage_lasts_until_the_subject_is_well() -> None:
    timeline = Timeline()
    timeline.observe("instances", 1.0, {"a": LOST})
    timeline.observe("instances", 2.0, {"a": LOST})
    assert told(timeline) == [("outage", "connection lost", 1.0, None)]
    timeline.observe("instances", 3.0, {"a": WELL})
    timeline.observe("instances", 4.0, {"a": WELL})

    assert told(timeline) == [("outage", "connection lost", 1.0, 3.0)]


def test_an_outage_is_over_when_the_subject_has_gone() -> None:
    timeline = Timeline()
    timeline.observe("instances", 1.0, {"a": LOST})
    timeline.observe("instances", 5.0, {})

    assert told(timeline) == [
        ("outage", "connection lost", 1.0, 5.0),
        ("left", "left", 5.0, None),
    ]


def test_another_trouble_is_another_outage() -> None:
    timeline = Timeline()
    timeline.observe("instances", 1.0, {"a": LOST})
    timeline.observe("instances", 2.0, {"a": Seen("worker-1", "no longer in etcd", "worker")})

    assert told(timeline) == [
        ("outage", "connection lost", 1.0, 2.0),
        ("outage", "no longer in etcd", 2.0, None),
    ]


def test_an_interruption_too_short_to_be_seen_is_told_by_its_count() -> None:
    timeline = Timeline()
    timeline.observe("servers", 1.0, {"etcd": Seen("etcd", "", count=3)})
    timeline.observe("servers", 2.0, {"etcd": Seen("etcd", "", count=4)})
    timeline.observe("servers", 3.0, {"etcd": Seen("etcd", "", count=4)})

    assert [(kind, at) for kind, _, at, _ in told(timeline)] == [("interruption", 2.0)]


def test_sources_do_not_make_each_other_s_subjects_leave() -> None:
    timeline = Timeline()
    timeline.observe("answering", 1.0, {"a": WELL})
    timeline.observe("others", 1.0, {"b": WELL})
    timeline.observe("answering", 2.0, {"a": WELL})

    assert told(timeline) == []


def test_the_oldest_events_make_room() -> None:
    timeline = Timeline()
    timeline.observe("instances", 0.0, {})
    for number in range(EVENTS_MAX):
        timeline.observe("instances", number, {"a": Seen("x" * 10_000, "")})
        timeline.observe("instances", number, {})

    events = timeline.events
    assert len(events) == EVENTS_MAX
    assert events[-1].number == 2 * EVENTS_MAX
    assert len(events[0].who) < 1000


def test_one_whose_name_is_known_later_has_one_name_in_all_that_was_told() -> None:
    """A worker is seen to join before anybody could ask it who it is."""
    timeline = Timeline()
    timeline.observe("instances", 1.0, {"b": WELL})
    timeline.observe("instances", 2.0, {"a": Seen("4a6d6664", "", "worker"), "b": WELL})
    timeline.observe("instances", 3.0, {"a": Seen("decode-2", "", "decode worker"), "b": WELL})
    timeline.observe("instances", 4.0, {"a": Seen("decode-2", "lost", "decode worker"), "b": WELL})

    assert [(each.who, each.about, each.kind) for each in timeline.events] == [
        ("decode-2", "decode worker", "joined"),
        ("decode-2", "decode worker", "outage"),
    ]


def test_minutes_are_counted_whether_or_not_somebody_looks() -> None:
    """A frontend that counts anew, or a clock that goes on, takes nothing away."""
    minutes = Minutes()

    def note(wall: float, requests: int, tokens: int = 0, in_flight: int = 0) -> None:
        totals = FrontendTotals(requests=requests, tokens=tokens)
        minutes.note(wall, FrontendFacts(in_flight=in_flight, totals=totals))

    for wall, *told in ((60.0, 5, 10, 2), (90.0, 7, 20, 9), (119.0, 7, 20, 1), (200.0, 9, 21, 3)):
        note(wall, *told)
    assert list(minutes.rows) == [(60, 7, 0, 20, 9), (180, 2, 0, 1, 3)]
    for number in range(100):
        note(240.0 + 60 * number, 9)
    assert len(minutes.rows) == MINUTES_MAX
