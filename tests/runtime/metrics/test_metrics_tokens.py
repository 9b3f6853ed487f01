"""The tally of tokens tells what prometheus-client's own histogram and counter would."""

from __future__ import annotations

from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from trinamo.runtime.metrics.tokens import GAP_BUCKETS_S, TokenMetrics

gaps = st.lists(st.floats(min_value=0, max_value=10) | st.sampled_from(GAP_BUCKETS_S), max_size=20)


@given(models=st.dictionaries(st.sampled_from(["a", 'b"\n']), gaps))
def test_a_tally_reads_like_prometheus_own(*, models: dict[str, list[float]]) -> None:
    """The text is the same, bucket bounds included, whatever was counted."""
    labels = ("model", "endpoint")
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    gap = Histogram(
        "trinamo_inter_token_latency_seconds",
        "From one step's tokens to the next, divided by the tokens of the step",
        labels,
        buckets=GAP_BUCKETS_S,
        registry=theirs,
    )
    tokens = Counter("trinamo_output_tokens", "Generated tokens", labels, registry=theirs)
    metrics = TokenMetrics()
    ours.register(metrics)
    for model, seconds in models.items():
        tally = metrics.tally(model, "chat")
        assert metrics.tally(model, "chat") is tally
        gap.labels(model, "chat")
        tokens.labels(model, "chat")
        for each in seconds:
            tally.gap(each)
            tally.tokens += 3
            gap.labels(model, "chat").observe(each)
            tokens.labels(model, "chat").inc(3)
    told = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == told
