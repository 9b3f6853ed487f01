"""What a process counts about model files: lent to peers, taken from them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class WeightsMetrics:
    """One per process; methods are named after events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._bytes = Counter(
            "trinamo_weights_bytes",
            "Bytes of model files, lent to peers or taken from them",
            ("direction",),
            registry=registry,
        )
        self._failures = Counter(
            "trinamo_weights_failures",
            "Breaks while a file was taken, each gone on elsewhere or later",
            ("reason",),
            registry=registry,
        )
        self._lending = Gauge(
            "trinamo_weights_peers", "Peers that take a file from here", registry=registry
        )
        self._duration = Gauge(
            "trinamo_weights_fetch_seconds",
            "How long it took to take our own model's file, breaks included",
            registry=registry,
        )

    def lent(self, byte_count: int) -> None:
        """A chunk was staged for a peer."""
        self._bytes.labels("lent").inc(byte_count)

    def taken(self, byte_count: int) -> None:
        """A chunk arrived, was right, and is on the disk."""
        self._bytes.labels("taken").inc(byte_count)

    def failed(self, reason: str) -> None:
        """Taking from one peer broke off; `reason` is the code of the error."""
        self._failures.labels(reason).inc()

    def lending(self, count: int) -> None:
        """So many peers take a file from here now."""
        self._lending.set(count)

    def fetched(self, duration_s: float) -> None:
        """A file is here, whole."""
        self._duration.set(duration_s)
