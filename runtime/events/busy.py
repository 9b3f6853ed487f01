"""From which load on a worker is given no new requests."""

from __future__ import annotations

from typing import Final

import attrs

from .load import LOAD_INTERVAL_S, LoadReport

REPORT_AGE_MAX_S: Final = 5 * LOAD_INTERVAL_S
"""Older reports say nothing: while the broker is away, nobody is busy for ever."""


@attrs.frozen
class BusyLimits:
    """Bounds on what a worker reports; None is none."""

    blocks: float | None = None
    """The used fraction of its KV blocks."""
    waiting_tokens: int | None = None

    def is_busy(self, report: LoadReport) -> bool:
        """Whether either bound is reached."""
        return (
            self.blocks is not None
            and report.blocks_total > 0
            and report.blocks_used >= self.blocks * report.blocks_total
        ) or (self.waiting_tokens is not None and report.waiting_tokens >= self.waiting_tokens)
