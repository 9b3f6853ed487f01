"""What the processes count, in the field's words: one class per role, methods named after events.

Each object owns its registry, so that runtimes in one process share no numbers. What is counted for
every request is tallied (`tallies.py`); a worker's is in `worker.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import attrs
from prometheus_client import Counter, Gauge

from ..env import Env
from .tallies import Count, Counts, Histogram, Histograms, Registry

__all__ = [
    "CANCELLED",
    "CONTENT_TYPE",
    "DURATION_BUCKETS_S",
    "SUCCESS",
    "UNKNOWN_MODEL",
    "FrontendMetrics",
    "LeaseState",
    "Metrics",
    "RequestRecord",
]

LiveCounts = Callable[[], tuple[int, int, int]]
"""How many instances are live, how many of them inhibited, and how many stale."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SUCCESS: Final = "success"
"""The outcome of a request that ended with its whole answer; others are codes of `errors.py`."""
CANCELLED: Final = "cancelled"
"""The outcome of a request whose task was cancelled from outside, before it could say more."""
UNKNOWN_MODEL: Final = "unknown"
"""The model label before a model is found: a client's text must never make a new time series."""

_MODELS_GONE_MAX: Final = 16
"""Models that are served no more and whose series stay: how their last requests ended is asked for
when a model has just gone, and whoever scrapes comes some seconds later."""
_RENDER_INTERVAL_S: Final = 1.0
DURATION_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1, 2.5),
)
_FIRST_TOKEN_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60),
)


class LeaseState(enum.StrEnum):
    """What a process knows of its lease."""

    NONE = "none"
    """Never granted, or given back."""
    GRANTED = "granted"
    LOST = "lost"
    """The store forgot it; a new one is being asked for."""


class Metrics:
    """What every process has: a registry, its exposition, lease, live set, connections."""

    def __init__(self, env: Env) -> None:
        self.clock = env.clock
        self.registry = Registry()
        self._rendered = b""
        self._rendered_at: float | None = None
        self._lease = self._gauge("lease_state", "1 at the lease's state, else 0", "state")
        self._live_sets: dict[str, LiveCounts] = {}
        self._of_live_sets = tuple(
            self._gauge(f"{name}_instances", text, "endpoint")
            for name, text in (
                ("live", "Instances in the live set"),
                ("inhibited", "Live instances that the router avoids for now"),
                ("stale", "Live instances that discovery has deleted"),
            )
        )
        self._connections = self._gauge("connections", "Open connections", "kind")
        self._connections_taken = self._counter(
            "connections_taken", "HTTP connections closed for new ones, at the bound"
        )
        self._entries_refused = self._counter(
            "discovery_entries_refused", "Entries of discovery that make no sense", "kind"
        )
        self._silent = self._counter(
            "silent_requests", "Requests given up as silent, by why", "endpoint", "reason"
        )
        self._fenced = self._counter(
            "registrations_fenced", "Writes of our keys refused: another process holds them"
        )
        self._restored = self._counter(
            "registrations_restored", "Keys of ours put back: others had removed or changed them"
        )
        self._settings_refused = self._counter(
            "settings_refused", "Values in the control plane that were refused", "setting"
        )
        self._settings = self._gauge(
            "setting_value", "The value in force, of settings that are numbers", "setting"
        )
        self.lease_state(LeaseState.NONE)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"trinamo_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"trinamo_{name}", text, labels, registry=self.registry)

    def _counts(self, name: str, text: str, *labels: str, may_fall: bool = False) -> Counts:
        found = Counts(f"trinamo_{name}", text, labels, may_fall=may_fall)
        self.registry.register(found)
        return found

    def _histograms(
        self, name: str, text: str, bounds_s: Sequence[float], *labels: str
    ) -> Histograms:
        found = Histograms(f"trinamo_{name}", text, bounds_s, labels)
        self.registry.register(found)
        return found

    def now(self) -> float:
        """The clock the records measure with."""
        return self.clock.now()

    def lease_state(self, state: LeaseState) -> None:
        """The lease is now in `state`."""
        for known in LeaseState:
            self._lease.labels(known.value).set(known is state)

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

    def entry_refused(self, kind: str) -> None:
        """An entry of `kind` (`instance`, `model`) does not decode, or contradicts its key."""
        self._entries_refused.labels(kind).inc()

    def silent_request(self, endpoint: str, reason: str) -> None:
        """A request was given up: it was silent, and its worker `left`, `unanswered` or `replaced`."""
        self._silent.labels(endpoint, reason).inc()

    def registration_fenced(self) -> None:
        """A key of ours was found in another process's hands."""
        self._fenced.inc()

    def registration_restored(self) -> None:
        """A key of ours that somebody had deleted or overwritten is there again."""
        self._restored.inc()

    def setting_refused(self, setting: str) -> None:
        """A stored value of `setting` (`unknown` for a key that is none) was refused."""
        self._settings_refused.labels(setting).inc()

    def setting_value(self, setting: str, value: float | None) -> None:
        """`value` is in force for `setting` now; None: one that is no number."""
        self._settings.remove_by_labels({"setting": setting})
        if value is not None:
            self._settings.labels(setting).set(value)

    def connection_opened(self, kind: str) -> None:
        """A connection of `kind` (`http`, `request`, `response`) is open."""
        self._connections.labels(kind).inc()

    def connection_closed(self, kind: str) -> None:
        """A connection of `kind` is closed."""
        self._connections.labels(kind).dec()

    def connection_taken(self) -> None:
        """An HTTP connection that waited for a request was closed, to let another one in."""
        self._connections_taken.inc()

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


# --- frontend --------------------------------------------------------------------------------


@attrs.frozen
class _ModelSeries:
    """What is counted of one model and endpoint."""

    in_flight: Count
    duration: Histogram
    first_token: Histogram
    gaps: Histogram
    tokens_in: Count
    tokens_out: Count
    disconnects: Count


def _item(counts: LiveCounts, place: int) -> Callable[[], float]:
    return lambda: counts()[place]


class FrontendMetrics(Metrics):
    """What a frontend counts about its clients' requests.

    `endpoint` is `chat` or `completions`. A request is counted once, by its outcome, when it ends.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._series: dict[tuple[str, str], _ModelSeries] = {}
        self._gone: dict[str, None] = {}
        by_model = ("model", "endpoint")
        self.requests_ended = self._counts(
            "requests", "Requests that ended", "model", "endpoint", "outcome"
        )
        self._in_flight = self._counts(
            "requests_in_flight", "Requests not ended yet", *by_model, may_fall=True
        )
        self._duration = self._histograms(
            "request_duration_seconds", "Arrival to end", DURATION_BUCKETS_S, *by_model
        )
        self._first_token = self._histograms(
            "time_to_first_token_seconds",
            "Arrival to the first token",
            _FIRST_TOKEN_BUCKETS_S,
            *by_model,
        )
        self._gaps = self._histograms(
            "inter_token_latency_seconds",
            "From one step's tokens to the next, divided by the tokens of the step",
            _GAP_BUCKETS_S,
            *by_model,
        )
        self._tokens_in = self._counts("input_tokens", "Prompt tokens", *by_model)
        self.tokens_out = self._counts("output_tokens", "Generated tokens", *by_model)
        self._disconnects = self._counts(
            "client_disconnects", "Clients that left before their answer's end", *by_model
        )
        self._cancellations = self._counts(
            "cancellations", "Requests stopped or killed", "model", "reason"
        )

    def request(self, model: str, endpoint: str) -> RequestRecord:
        """Count one request while inside; set `outcome` before leaving."""
        return RequestRecord(self, model, endpoint, self.clock.now())

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""
        record.series.duration.observe(self.clock.now() - record.started_at)
        if self.counts(record):
            self.requests_ended.tally(record.model, record.endpoint, record.outcome).value += 1

    def refused(self, endpoint: str, outcome: str) -> None:
        """A request ended before its model was known."""
        self.requests_ended.tally(UNKNOWN_MODEL, endpoint, outcome).value += 1

    def series(self, model: str, endpoint: str) -> _ModelSeries:
        """What is counted for these labels, looked up once."""
        key = (model, endpoint)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _ModelSeries(
                in_flight=self._in_flight.tally(*key),
                duration=self._duration.tally(*key),
                first_token=self._first_token.tally(*key),
                gaps=self._gaps.tally(*key),
                tokens_in=self._tokens_in.tally(*key),
                tokens_out=self.tokens_out.tally(*key),
                disconnects=self._disconnects.tally(*key),
            )
        return series

    def cancelled(self, record: RequestRecord, reason: str) -> None:
        """A request was stopped or killed, for `reason`."""
        if self.counts(record):
            self._cancellations.tally(record.model, reason).value += 1

    def counts(self, record: RequestRecord) -> bool:
        """Whether the series of a request's model are still there.

        One that outlives them must not make new ones, which nobody would remove.
        """
        return self._series.get((record.model, record.endpoint)) is record.series

    def model_came(self, model: str) -> None:
        """A model is served, perhaps again: its series stay."""
        self._gone.pop(model, None)

    def model_gone(self, model: str) -> None:
        """A model is served no more: its series end, once `_MODELS_GONE_MAX` others have gone."""
        self._gone[model] = None
        if len(self._gone) <= _MODELS_GONE_MAX:
            return
        oldest = next(iter(self._gone))
        del self._gone[oldest]
        for labels in [each for each in self._series if each[0] == oldest]:
            del self._series[labels]
        for counts in (
            self.requests_ended,
            self._in_flight,
            self._tokens_in,
            self.tokens_out,
            self._disconnects,
            self._cancellations,
        ):
            counts.remove("model", oldest)
        for histograms in (self._duration, self._first_token, self._gaps):
            histograms.remove("model", oldest)


class RequestRecord:
    """One request of a frontend, from arrival to end, which is when it is left."""

    __slots__ = (
        "_last_token_at",
        "_metrics",
        "detail",
        "endpoint",
        "fault",
        "first_token_at",
        "model",
        "outcome",
        "output_tokens",
        "prompt_tokens",
        "series",
        "started_at",
    )

    def __init__(
        self, metrics: FrontendMetrics, model: str, endpoint: str, started_at: float
    ) -> None:
        self._metrics, self.started_at = metrics, started_at
        self._last_token_at: float | None = None
        self.first_token_at: float | None = None
        self.model, self.endpoint = model, endpoint
        self.outcome = CANCELLED
        self.detail = ""
        """What went wrong, for the log."""
        self.fault: BaseException | None = None
        """What of it is ours to mend."""
        self.prompt_tokens = self.output_tokens = 0
        self.series = metrics.series(model, endpoint)

    def __enter__(self) -> Self:
        self.series.in_flight.value += 1
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.series.in_flight.value -= 1
        self._metrics.ended(self)

    def prompt(self, tokens: int) -> None:
        """The prompt has `tokens` tokens."""
        self.prompt_tokens += tokens
        self.series.tokens_in.value += tokens

    def token(self, tokens: int) -> None:
        """One step brought `tokens` tokens; none is no step."""
        if tokens <= 0:
            return
        now = self._metrics.now()
        if self._last_token_at is None:
            self.first_token_at = now
            self.series.first_token.observe(now - self.started_at)
        else:
            self.series.gaps.observe((now - self._last_token_at) / tokens)
        self._last_token_at = now
        self.series.tokens_out.value += tokens
        self.output_tokens += tokens

    def disconnected(self) -> None:
        """The client left before the answer's end."""
        self.series.disconnects.value += 1

    def cancelled(self, reason: str) -> None:
        """The request was stopped or killed, for `reason`."""
        self._metrics.cancelled(self, reason)
