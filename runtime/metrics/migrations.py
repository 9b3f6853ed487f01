"""What a frontend counts of answers that went on at another worker than the one that began them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .tallies import Counts, Histograms, Registry

_GAP_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class MigrationSeries:
    """The series of one process; without a `registry` nobody is shown them.

    `kind` is `new` for an answer that the client had nothing of, `ongoing` for one that had begun.
    """

    def __init__(self, now: Callable[[], float], registry: Registry | None = None) -> None:
        self.now = now
        """Seconds, of the clock that durations are measured with."""
        self._migrations = Counts(
            "trinamo_migrations",
            "Answers that lost their worker and were replayed at another, by how that went",
            ("kind", "outcome"),
        )
        self._durations = Histograms(
            "trinamo_migration_duration_seconds",
            "From the loss of the worker to the next token, or to the end of the request",
            _GAP_BUCKETS_S,
            ("outcome",),
        )
        self._refused = Counts(
            "trinamo_migrations_refused",
            "Answers that lost their worker and could not be replayed, by why",
            ("reason",),
        )
        if registry is not None:
            for family in (self._migrations, self._durations, self._refused):
                registry.register(family)

    def ended(self, *, is_new: bool, outcome: str, since: float) -> None:
        """A migration that began at `since` has ended: `migrated`, `failed` or `cancelled`."""
        self._migrations.tally("new" if is_new else "ongoing", outcome).value += 1
        self._durations.tally(outcome).observe(self.now() - since)

    def refused(self, reason: str) -> None:
        """An answer ends with its worker, for `reason`: the name of a `Verdict`."""
        self._refused.tally(reason).value += 1
