"""What every process counts, and where its parts declare what they count.

Each object is a registry of its own, so that runtimes in one process share no numbers. The series of
a part stand with it: a frontend's in `http/metrics.py`, a worker's in `worker/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from ..env import Env
from .tallies import Counts, Registry, Row

LiveCounts = Callable[[], tuple[int, int, int]]
"""How many instances are live, how many of them inhibited, and how many stale."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SUCCESS: Final = "success"
"""The outcome of a request that ended with its whole answer; others are codes of `errors.py`."""
CANCELLED: Final = "cancelled"
"""The outcome of a request whose task was cancelled from outside, before it could say more."""

_RENDER_INTERVAL_S: Final = 1.0
DURATION_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LIVE_SETS: Final = {
    "live_instances": "Instances in the live set",
    "inhibited_instances": "Live instances that the router avoids for now",
    "stale_instances": "Live instances that discovery has deleted",
}


class Metrics(Registry):
    """A registry, its exposition, and the live sets; all else its parts declare."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self.clock = env.clock
        self._rendered = b""
        self._rendered_at: float | None = None
        self._live_sets = self.readings("", ("endpoint",), _live_rows, gauges=_LIVE_SETS).shown

    @property
    def registry(self) -> Registry:
        """Itself, as a registry of prometheus-client: others may register their collectors there."""
        return self

    def now(self) -> float:
        """The clock the records measure with."""
        return self.clock.now()

    def live_set(self, endpoint: str, counts: LiveCounts) -> None:
        """Ask `counts`, whenever `/metrics` is read, for the instances of `endpoint`."""
        self._live_sets[endpoint] = counts

    def endpoint_gone(self, endpoint: str, counts: LiveCounts) -> None:
        """Nobody asks `counts` any more: the series end, unless they are another's by now."""
        if self._live_sets.get(endpoint) == counts:
            del self._live_sets[endpoint]

    def render(self) -> bytes:
        """The exposition in Prometheus' text format, at most a second old."""
        now = self.clock.now()
        if self._rendered_at is None or now - self._rendered_at >= _RENDER_INTERVAL_S:
            self._rendered_at = now
            self._rendered = self.page()
        return self._rendered

    def value(self, name: str, **labels: str) -> float:
        """The sample `trinamo_<name>` with exactly these labels, as of now; 0 if there is none."""
        return self.get_sample_value(f"trinamo_{name}", labels) or 0.0


def _live_rows(shown: Mapping[str, LiveCounts]) -> Iterator[Row]:
    for endpoint, counts in shown.items():
        yield (endpoint,), dict(zip(_LIVE_SETS, counts(), strict=True))


def entries_refused(metrics: Metrics) -> Counts:
    """What was found in discovery and does not decode, or contradicts its key, by kind of entry."""
    return metrics.counts(
        "discovery_entries_refused", "Entries of discovery that make no sense", "kind"
    )
