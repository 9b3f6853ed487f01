"""The tokens of answers and the gaps between them, counted in plain numbers.

prometheus-client takes a lock per number and walks a histogram's buckets: nothing for a request,
but the dearest thing done for a token. So tokens are tallied here, and only who asks pays for the
form. For one thread, as all of the runtime. What else is counted is in `metrics.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import attrs
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["TokenMetrics", "TokenTally"]

GAP_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1, 2.5),
)
BUCKET_NAMES: Final = tuple(map(floatToGoString, (*GAP_BUCKETS_S, float("inf"))))


@attrs.define
class TokenTally:
    """The tokens of one model and endpoint."""

    tokens: int = 0
    gaps_s: float = 0.0
    _gaps: list[int] = attrs.field(init=False, factory=lambda: [0] * len(BUCKET_NAMES))

    def gap(self, seconds: float) -> None:
        """So long passed from one token to the next."""
        self._gaps[bisect_left(GAP_BUCKETS_S, seconds)] += 1
        self.gaps_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """How many gaps were at most so long, by each bucket's name."""
        return list(zip(BUCKET_NAMES, accumulate(map(float, self._gaps)), strict=True))


class TokenMetrics(Collector):
    """The tallies of every model and endpoint; register it like any other metric."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], TokenTally] = {}

    def tally(self, model: str, endpoint: str) -> TokenTally:
        """The one tally of `model` and `endpoint`."""
        return self._tallies.setdefault((model, endpoint), TokenTally())

    def remove(self, model: str, endpoint: str) -> None:
        """Forget a tally; whoever holds it counts for nobody."""
        self._tallies.pop((model, endpoint), None)

    def collect(self) -> Iterator[Metric]:
        labels = ("model", "endpoint")
        gaps = HistogramMetricFamily(
            "trinamo_inter_token_latency_seconds",
            "From one step's tokens to the next, divided by the tokens of the step",
            labels=labels,
        )
        tokens = CounterMetricFamily("trinamo_output_tokens", "Generated tokens", labels=labels)
        for key, tally in self._tallies.items():
            gaps.add_metric(key, tally.buckets(), tally.gaps_s)
            tokens.add_metric(key, tally.tokens)
        yield gaps
        yield tokens
