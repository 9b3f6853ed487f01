"""A tally tells what prometheus-client's own metrics would, and in its own words."""

from __future__ import annotations

from hypothesis import given, strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from trinamo.runtime.metrics.tallies import Registry

BOUNDS_S = (0.0005, 0.01, 0.25, 1, 2.5)
times = st.lists(st.floats(min_value=0, max_value=10) | st.sampled_from(BOUNDS_S), max_size=20)
labels = st.sampled_from(["a", 'b"\n', "c\\n", "ü"])


@given(models=st.dictionaries(labels, times), step=st.sampled_from([1, 3, 0.5, 1e7]))
def test_tallies_read_like_prometheus_own(*, models: dict[str, list[float]], step: float) -> None:
    """The text is the same, bucket bounds included, whatever was counted."""
    names = ("model", "endpoint")
    theirs, ours = CollectorRegistry(), Registry()
    gap = Histogram(
        "trinamo_gap_seconds", "From one to the next", names, buckets=BOUNDS_S, registry=theirs
    )
    tokens = Counter("trinamo_tokens", "Generated", names, registry=theirs)
    under_way = Gauge("trinamo_under_way", "Now", registry=theirs)
    gaps = ours.histograms("gap_seconds", "From one to the next", BOUNDS_S, *names)
    counts, gauge = (
        ours.counts("tokens", "Generated", *names),
        ours.count("under_way", "Now", may_fall=True),
    )
    under_way.set(-step)
    gauge.value -= step
    for model, seconds in models.items():
        assert counts.tally(model, "chat") is counts.tally(model, "chat")
        gaps.tally(model, "chat")
        gap.labels(model, "chat")
        tokens.labels(model, "chat")
        for each in seconds:
            gaps.tally(model, "chat").observe(each)
            counts.tally(model, "chat").value += step
            gap.labels(model, "chat").observe(each)
            tokens.labels(model, "chat").inc(step)
    told = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert ours.page().splitlines() == told


def test_what_is_removed_is_shown_no_more_and_begins_anew() -> None:
    registry = Registry()
    counts = registry.counts("requests", "Ended", "model", "outcome")
    for model in ("a", "b"):
        for outcome in ("success", "cancelled"):
            counts.tally(model, outcome).value += 1
    counts.remove("model", "a")
    counts.tally("a", "success").value += 1
    lines = [line for line in registry.page().decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'trinamo_requests_total{model="b",outcome="success"} 1.0',
        'trinamo_requests_total{model="b",outcome="cancelled"} 1.0',
        'trinamo_requests_total{model="a",outcome="success"} 1.0',
    ]


def test_other_metrics_stand_on_the_same_page_without_their_times_of_creation() -> None:
    registry = Registry()
    Counter("others", "Of others", registry=registry).inc(2)
    registry.counts("ours", "Of ours")
    assert registry.page().decode().splitlines() == [
        "# HELP others_total Of others",
        "# TYPE others_total counter",
        "others_total 2.0",
        "# HELP trinamo_ours_total Of ours",
        "# TYPE trinamo_ours_total counter",
    ]
