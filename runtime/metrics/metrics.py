"""What every process counts, and where its parts declare what they count.

Each object is a registry of its own, so that runtimes in one process share no numbers. The series
of a part stand with it: a frontend's in `http/metrics.py`, a worker's in `worker/metrics.py`.
"""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

import trio
from prometheus_client.process_collector import ProcessCollector

from ..env import Env
from ..nurseries import open_nursery
from .tallies import Counts, Registry

LiveCounts = Callable[[], tuple[int, Mapping[str, int]]]
"""How many instances accept requests, and how many are in each state that occurs."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SUCCESS: Final = "success"
"""The outcome of a request that ended with its whole answer; others are codes of `errors.py`."""
CANCELLED: Final = "cancelled"
"""The outcome of a request whose task was cancelled from outside, before it could say more."""

_RENDER_INTERVAL_S: Final = 1.0
DURATION_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LAG_INTERVAL_S: Final = 0.1
_LAG_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_LIVE_SETS: Final = {
    "live_instances": "Instances that accept requests, as far as is known",
    "inhibited_instances": "Instances that the router avoids for now",
    "stale_instances": "Instances that discovery has deleted, and that answer",
}
_STATES: Final = {"instances": "Instances by the state in which the router sees them"}


def _live_sets(shown: Mapping[str, LiveCounts]) -> Iterator[tuple[Any, dict[str, float]]]:
    for endpoint, counts in shown.items():
        live, states = counts()
        counted = (live, states.get("inhibited", 0), states.get("stale", 0))
        yield (endpoint,), dict(zip(_LIVE_SETS, counted, strict=True))


def _states(shown: Mapping[str, LiveCounts]) -> Iterator[tuple[Any, dict[str, float]]]:
    for endpoint, counts in shown.items():
        for state, count in counts()[1].items():
            yield (endpoint, state), {"instances": count}


class Metrics(Registry):
    """A registry, its exposition, and the live sets; all else its parts declare.

    It is a registry of prometheus-client, too: others may register their collectors in it.
    """

    def __init__(self, env: Env) -> None:
        super().__init__()
        self.clock, self.now = env.clock, env.clock.now
        self._rendered = b""
        self._rendered_at: float | None = None
        self._live_sets = self.readings("", ("endpoint",), _live_sets, gauges=_LIVE_SETS).shown
        self._states = self.readings("", ("endpoint", "state"), _states, gauges=_STATES).shown

    def live_set(self, endpoint: str, counts: LiveCounts) -> None:
        """Ask `counts`, whenever `/metrics` is read, for the instances of `endpoint`."""
        self._live_sets[endpoint] = self._states[endpoint] = counts

    def endpoint_gone(self, endpoint: str, counts: LiveCounts) -> None:
        """Nobody asks `counts` any more: the series end, unless they are another's by now."""
        if self._live_sets.get(endpoint) == counts:
            del self._live_sets[endpoint], self._states[endpoint]

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


def entries_refused(metrics: Metrics) -> Counts:
    """What was found in discovery and does not decode, or contradicts its key, by kind of entry."""
    return metrics.counts(
        "discovery_entries_refused", "Entries of discovery that make no sense", "kind"
    )


def show_process(metrics: Metrics, role: str) -> None:
    """Show memory, processor time, descriptors and build; once per process, and not in a simulation.

    The `process_*` series are those that every Prometheus client library shows, read from `/proc`
    when they are asked for. Of several frontends on one port each has its own page, so each shows
    its own.
    """
    ProcessCollector(registry=metrics)
    build = metrics.counts(
        "build_info", "1; what runs here", "version", "python", "role", may_fall=True
    )
    build.tally(version("trinamo"), platform.python_version(), role).value = 1


@asynccontextmanager
async def lag_measured(metrics: Metrics) -> AsyncIterator[None]:
    """Count the event loop's lag in `metrics` while inside, ten times a second.

    That is how long whatever is ready to run waits for what runs.

    For processes whose time is real: a simulated loop is never late.
    """
    lags = metrics.histograms(
        "event_loop_lag_seconds", "How late a timer's task runs", _LAG_BUCKETS_S
    )
    lag = lags.tally()

    async def measure() -> None:
        due = trio.current_time() + LAG_INTERVAL_S
        while True:
            await trio.sleep_until(due)
            now = trio.current_time()
            lag.observe(now - due)
            # From now on, not from when it was due: one long lag is one observation.
            due = now + LAG_INTERVAL_S

    async with open_nursery() as nursery:
        nursery.start_soon(measure)
        yield
        nursery.cancel_scope.cancel()
