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

    bytes_per_token: int = 4
    """Of what is sent, about."""
    block_tokens: int = 16

    def is_busy(self, report: LoadReport, sent: int = 0, uncomputed: int = 0) -> bool:
        """Whether either bound is reached.

        `sent` are the bytes of the requests that the worker got since it reported, `uncomputed` of
        those whose answers have not begun.
        """
        blocks = report.blocks_used + sent // (self.bytes_per_token * self.block_tokens)
        tokens = report.waiting_tokens + uncomputed // self.bytes_per_token
        return (
            self.blocks is not None
            and report.blocks_total > 0
            and blocks >= self.blocks * report.blocks_total
        ) or (self.waiting_tokens is not None and tokens >= self.waiting_tokens)
