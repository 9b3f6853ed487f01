"""What every process counts, and where its parts declare what they count.

Each object owns its registry, so that runtimes in one process share no numbers. What is counted for
every request is tallied (`tallies.py`); a frontend's is in `frontend.py`, a worker's in `worker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

from prometheus_client import Counter, Gauge
from prometheus_client.registry import Collector

from ..env import Env
from .tallies import Counts, Histograms, Registry

LiveCounts = Callable[[], tuple[int, int, int]]
"""How many instances are live, how many of them inhibited, and how many stale."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SUCCESS: Final = "success"
"""The outcome of a request that ended with its whole answer; others are codes of `errors.py`."""
CANCELLED: Final = "cancelled"
"""The outcome of a request whose task was cancelled from outside, before it could say more."""

_RENDER_INTERVAL_S: Final = 1.0
DURATION_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
C = TypeVar("C", bound=Collector)


class Metrics:
    """A registry, its exposition, and the live sets.

    All else is declared by the part of the process that counts it, with `counter`, `gauge`, `counts`
    or `histograms`. Names get the prefix `trinamo_`. What is declared already is the same once more:
    a process may have several of a part.
    """

    def __init__(self, env: Env) -> None:
        self.clock = env.clock
        self.registry = Registry()
        self._rendered = b""
        self._rendered_at: float | None = None
        self._declared: dict[str, Collector] = {}
        self._live_sets: dict[str, LiveCounts] = {}
        self._of_live_sets = tuple(
            self.gauge(f"{name}_instances", text, "endpoint")
            for name, text in (
                ("live", "Instances in the live set"),
                ("inhibited", "Live instances that the router avoids for now"),
                ("stale", "Live instances that discovery has deleted"),
            )
        )

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A number that rises and falls."""
        return self._declare(name, lambda full: Gauge(full, text, labels, registry=None))

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A number that rises; in the exposition its name ends with `_total`."""
        return self._declare(name, lambda full: Counter(full, text, labels, registry=None))

    def counts(self, name: str, text: str, *labels: str, may_fall: bool = False) -> Counts:
        """Numbers that change with each request or token."""
        return self._declare(name, lambda full: Counts(full, text, labels, may_fall=may_fall))

    def histograms(
        self, name: str, text: str, bounds_s: Sequence[float], *labels: str
    ) -> Histograms:
        """Histograms of seconds."""
        return self._declare(name, lambda full: Histograms(full, text, bounds_s, labels))

    def _declare(self, name: str, make: Callable[[str], C]) -> C:
        found = self._declared.get(name)
        if found is None:
            found = self._declared[name] = make(f"trinamo_{name}")
            self.registry.register(found)
        return cast("C", found)

    def now(self) -> float:
        """The clock the records measure with."""
        return self.clock.now()

    def live_set(self, endpoint: str, counts: LiveCounts) -> None:
        """Ask `counts`, whenever `/metrics` is read, for the instances of `endpoint`."""
        self._live_sets[endpoint] = counts
        for place, gauge in enumerate(self._of_live_sets):
            gauge.labels(endpoint).set_function(_item(counts, place))

    def endpoint_gone(self, endpoint: str, counts: LiveCounts) -> None:
        """Nobody asks `counts` any more: the series end, unless they are another's by now."""
        if self._live_sets.get(endpoint) == counts:
            del self._live_sets[endpoint]
            for gauge in self._of_live_sets:
                gauge.remove_by_labels({"endpoint": endpoint})

    def render(self) -> bytes:
        """The exposition in Prometheus' text format, at most a second old."""
        now = self.clock.now()
        if self._rendered_at is None or now - self._rendered_at >= _RENDER_INTERVAL_S:
            self._rendered_at = now
            self._rendered = self.registry.page()
        return self._rendered

    def value(self, name: str, **labels: str) -> float:
        """The sample `trinamo_<name>` with exactly these labels, as of now; 0 if there is none."""
        return self.registry.get_sample_value(f"trinamo_{name}", labels) or 0.0


def _item(counts: LiveCounts, place: int) -> Callable[[], float]:
    return lambda: counts()[place]


def entries_refused(metrics: Metrics) -> Counter:
    """What was found in discovery and does not decode, or contradicts its key, by kind of entry."""
    return metrics.counter(
        "discovery_entries_refused", "Entries of discovery that make no sense", "kind"
    )
