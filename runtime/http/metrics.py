"""What a frontend counts about its clients' requests."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Self

import attrs

from ..env import Env
from ..metrics.metrics import CANCELLED, DURATION_BUCKETS_S, Metrics
from ..metrics.tallies import Count, Counts, Histogram, Histograms

UNKNOWN_MODEL: Final = "unknown"
"""The model label before a model is found: a client's text must never make a new time series."""
SENT_BACK: Final = "sent_back"
"""The outcome of a request that is not over: it waits again, and has another record then."""

_MODELS_GONE_MAX: Final = 16
"""Models that are served no more and whose series stay: how their last requests ended is asked for
when a model has just gone, and whoever scrapes comes some seconds later."""
_GAP_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1, 2.5),
)
_FIRST_TOKEN_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60),
)


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


class FrontendMetrics(Metrics):
    """What a frontend counts about its clients' requests.

    `endpoint` is `chat`, `completions`, `responses`, … A request is counted once, by its outcome, when it ends.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._series: dict[tuple[str, str], _ModelSeries] = {}
        self._gone: dict[str, None] = {}
        by_model = ("model", "endpoint")
        self.requests_ended = self.counts("requests", "Requests that ended", *by_model, "outcome")
        self.first_token = self.histograms(
            "time_to_first_token_seconds",
            "Arrival to the first token",
            _FIRST_TOKEN_BUCKETS_S,
            *by_model,
        )
        self.gaps = self.histograms(
            "inter_token_latency_seconds",
            "From one step's tokens to the next, divided by the tokens of the step",
            _GAP_BUCKETS_S,
            *by_model,
        )
        self.tokens_out = self.counts("output_tokens", "Generated tokens", *by_model)
        self._of_model: tuple[Counts | Histograms, ...] = (
            self.counts("requests_in_flight", "Requests not ended yet", *by_model, may_fall=True),
            self.histograms(
                "request_duration_seconds", "Arrival to end", DURATION_BUCKETS_S, *by_model
            ),
            self.first_token,
            self.gaps,
            self.counts("input_tokens", "Prompt tokens", *by_model),
            self.tokens_out,
            self.counts(
                "client_disconnects", "Clients that left before their answer's end", *by_model
            ),
        )
        """In the order of `_ModelSeries`."""
        self.cancellations = self.counts(
            "cancellations", "Requests stopped or killed", "model", "reason"
        )

    def request(self, model: str, endpoint: str, came_at: float | None = None) -> RequestRecord:
        """Count one request, which came now or at `came_at`; set `outcome` before leaving."""
        return RequestRecord(self, model, endpoint, self.now() if came_at is None else came_at)

    def refused(self, endpoint: str, outcome: str) -> None:
        """A request ended before its model was known."""
        self.requests_ended.tally(UNKNOWN_MODEL, endpoint, outcome).value += 1

    def series(self, model: str, endpoint: str) -> _ModelSeries:
        key = (model, endpoint)
        series = self._series.get(key)
        if series is None:
            made: Any = [each.tally(*key) for each in self._of_model]
            series = self._series[key] = _ModelSeries(*made)
        return series

    def has_series(self, record: RequestRecord) -> bool:
        """Whether the series of a request's model are still there.

        One that outlives them must not make new ones, which nobody would remove.
        """
        return self._series.get((record.model, record.endpoint)) is record.series

    def model_came(self, model: str) -> None:
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
        for family in (self.requests_ended, self.cancellations, *self._of_model):
            family.remove("model", oldest)


class RequestRecord:
    """One request of a frontend, from arrival to end, which is when it is left."""

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
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.finish_reasons: list[str] = []
        """Of each choice that is whole, in the order in which they ended."""
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
        self.series.tokens_in.value += self.prompt_tokens
        if self.outcome == SENT_BACK:
            return
        metrics = self._metrics
        self.series.duration.observe(metrics.now() - self.started_at)
        if metrics.has_series(self):
            metrics.requests_ended.tally(self.model, self.endpoint, self.outcome).value += 1

    def prompt(self, tokens: int, cached_tokens: int = 0) -> None:
        """The prompt has `tokens` tokens, of which so many were not computed, as is said now.

        Counted at the end: until then it may be said again.
        """
        self.prompt_tokens = tokens
        self.cached_tokens = min(max(self.cached_tokens, cached_tokens), tokens)

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
        self.series.disconnects.value += 1

    def cancelled(self, reason: str) -> None:
        if self._metrics.has_series(self):
            self._metrics.cancellations.tally(self.model, reason).value += 1
