"""What a process counts about model files: lent to peers, taken from them."""

from __future__ import annotations

from ..metrics.tallies import Registry


class WeightsMetrics:
    """One per process; methods are named after events."""

    def __init__(self, registry: Registry) -> None:
        self._bytes = registry.counts(
            "weights_bytes", "Bytes of model files, lent to peers or taken from them", "direction"
        )
        self._failures = registry.counts(
            "weights_failures",
            "Breaks while a file was taken, each gone on elsewhere or later",
            "reason",
        )
        self._lending = registry.count(
            "weights_peers", "Peers that take a file from here", may_fall=True
        )
        self._duration = registry.count(
            "weights_fetch_seconds",
            "How long it took to take our own model's file, breaks included",
            may_fall=True,
        )

    def lent(self, byte_count: int) -> None:
        """A chunk was staged for a peer."""
        self._bytes.tally("lent").value += byte_count

    def taken(self, byte_count: int) -> None:
        """A chunk arrived, was right, and is on the disk."""
        self._bytes.tally("taken").value += byte_count

    def failed(self, reason: str) -> None:
        """Taking from one peer broke off; `reason` is the code of the error."""
        self._failures.tally(reason).value += 1

    def lending(self, count: int) -> None:
        """So many peers take a file from here now."""
        self._lending.value = count

    def fetched(self, duration_s: float) -> None:
        """A file is here, whole."""
        self._duration.value = duration_s
