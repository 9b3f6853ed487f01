"""What prefill and decode workers count of prompts that are computed apart from their answers.

Each request of a decode worker is counted once in `trinamo_prefills_total`: where its prompt was
computed, and why (`protocol/disaggregation/decision.py`). What moves the blocks counts for itself
(`kv/transfer/metrics.py`).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs

from ..env import Clock
from ..errors import TrinamoError
from ..metrics.metrics import DURATION_BUCKETS_S
from ..metrics.tallies import Registry
from ..protocol.disaggregation.decision import PrefillReason

_log = logging.getLogger("trinamo.disaggregation")
_REMOTE: Final = "remote"
_LOCAL: Final = "local"


class DecodeMetrics:
    def __init__(self, registry: Registry, clock: Clock, mode: str) -> None:
        self.clock, self._mode = clock, mode
        self._prefills = registry.counts(
            "prefills",
            "Requests, by where their prompt was computed and why",
            *("mode", "where", "reason"),
        )
        self.duration = registry.histograms(
            "remote_prefill_duration_seconds",
            "Decision to the last block, of prompts that a prefill worker computed",
            DURATION_BUCKETS_S,
            "mode",
        ).tally(mode)
        self.blocks = registry.counts(
            "remote_prefill_blocks", "Blocks that came from prefill workers", "mode"
        ).tally(mode)
        self.in_hand = registry.counts(
            "remote_prefills_under_way",
            "Prompts that prefill workers have, or are to have",
            "mode",
            may_fall=True,
        ).tally(mode)
        self.counts: dict[PrefillReason, int] = {}
        """How often each reason decided."""

    @contextmanager
    def under_way(self) -> Iterator[RemotePrefill]:
        """Count one prompt that is to be computed elsewhere, until it `came` or this is left."""
        remote = RemotePrefill(self, self.clock.now())
        self.in_hand.value += 1
        try:
            yield remote
        finally:
            self.in_hand.value -= not remote.has_come

    def decided(self, reason: PrefillReason) -> None:
        """It is settled where the prompt of a request is computed. Once a request."""
        where = _REMOTE if reason.is_remote else _LOCAL
        self._prefills.tally(self._mode, where, reason.value).value += 1
        self.counts[reason] = self.counts.get(reason, 0) + 1


@attrs.define(eq=False)
class RemotePrefill:
    _metrics: DecodeMetrics
    _began_at: float
    has_come: bool = False

    def came(self, block_count: int) -> None:
        """Its blocks are here. Once."""
        self.has_come = True
        metrics = self._metrics
        metrics.in_hand.value -= 1
        metrics.duration.observe(metrics.clock.now() - self._began_at)
        metrics.blocks.value += block_count


class PrefillOutcome(enum.StrEnum):
    """What became of a prompt that a prefill worker was asked for."""

    DONE = "done"
    """Its blocks are where they are wanted."""
    NOT_WANTED = "not_wanted"
    """The decode worker did not want it, or not any more."""
    FAILED = "failed"
    """The engine, a transfer or the connection failed."""
    CANCELLED = "cancelled"
    """This worker leaves, or the decode worker went away."""


@attrs.define(eq=False)
class PrefillRecord:
    outcome: PrefillOutcome = PrefillOutcome.CANCELLED

    def failed(self, request_id: str, error: TrinamoError) -> None:
        """It ends with `error`; the decode worker computes it."""
        self.outcome = PrefillOutcome.FAILED
        _log.warning("the prefill of request %s failed: %s", request_id, error)


class PrefillMetrics:
    def __init__(self, registry: Registry) -> None:
        self._jobs = registry.counts(
            "prefill_jobs",
            "Prompts that decode workers asked for, by what became of them",
            *("mode", "outcome"),
        )
        self._working = registry.counts(
            "prefill_jobs_in_hand", "Prompts being computed or handed over", "mode", may_fall=True
        )
        self.counts: dict[PrefillOutcome, int] = {}
        """How often each outcome was."""

    @contextmanager
    def working(self, mode: str) -> Iterator[PrefillRecord]:
        """Count one prompt, in hand while inside; set the record's `outcome`."""
        record = PrefillRecord()
        in_hand = self._working.tally(mode)
        in_hand.value += 1
        try:
            yield record
        finally:
            in_hand.value -= 1
            self._jobs.tally(mode, record.outcome.value).value += 1
            self.counts[record.outcome] = self.counts.get(record.outcome, 0) + 1
