"""What prefill and decode workers count of prompts that are computed apart from their answers.

Each request of a decode worker is counted once in `trinamo_prefills_total`: where its prompt was
computed, and why (`protocol/disaggregation/decision.py`). What moves the blocks counts for itself
(`metrics/transfers.py`).
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
from ..protocol.disaggregation.decision import PrefillReason
from .metrics import DURATION_BUCKETS_S
from .tallies import Counts, Histograms, Registry

_log = logging.getLogger("trinamo.disaggregation")
_REMOTE: Final = "remote"
_LOCAL: Final = "local"


class DecodeMetrics:
    """Of a decode worker."""

    def __init__(self, registry: Registry, clock: Clock, mode: str) -> None:
        self._clock, self._mode = clock, mode
        self._prefills = Counts(
            "trinamo_prefills",
            "Requests, by where their prompt was computed and why",
            ("mode", "where", "reason"),
        )
        self._duration = Histograms(
            "trinamo_remote_prefill_duration_seconds",
            "Decision to the last block, of prompts that a prefill worker computed",
            DURATION_BUCKETS_S,
            ("mode",),
        )
        self._blocks = Counts(
            "trinamo_remote_prefill_blocks",
            "Blocks that came from prefill workers",
            ("mode",),
        )
        self._under_way = Counts(
            "trinamo_remote_prefills_under_way",
            "Prompts that prefill workers have, or are to have",
            ("mode",),
            may_fall=True,
        )
        for each in (self._prefills, self._duration, self._blocks, self._under_way):
            registry.register(each)
        self.counts: dict[PrefillReason, int] = {}
        """How often each reason decided."""

    @contextmanager
    def under_way(self) -> Iterator[RemotePrefill]:
        """Count one prompt that is to be computed elsewhere, until it `came` or this is left."""
        remote = RemotePrefill(self, self._clock.now())
        under_way = self._under_way.tally(self._mode)
        under_way.value += 1
        try:
            yield remote
        finally:
            under_way.value -= not remote.has_come

    def came(self, began_at: float, block_count: int) -> None:
        """A prompt that was under way has come, in so many blocks."""
        self._under_way.tally(self._mode).value -= 1
        self._duration.tally(self._mode).observe(self._clock.now() - began_at)
        self._blocks.tally(self._mode).value += block_count

    def decided(self, reason: PrefillReason) -> None:
        """It is settled where the prompt of a request is computed. Once a request."""
        where = _REMOTE if reason.is_remote else _LOCAL
        self._prefills.tally(self._mode, where, reason.value).value += 1
        self.counts[reason] = self.counts.get(reason, 0) + 1


@attrs.define(eq=False)
class RemotePrefill:
    """One prompt that a prefill worker is to compute."""

    _metrics: DecodeMetrics
    _began_at: float
    has_come: bool = False

    def came(self, block_count: int) -> None:
        """Its blocks are here. Once."""
        self.has_come = True
        self._metrics.came(self._began_at, block_count)


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
    """One prompt of a prefill worker."""

    outcome: PrefillOutcome = PrefillOutcome.CANCELLED

    def failed(self, request_id: str, error: TrinamoError) -> None:
        """It ends with `error`; the decode worker computes it."""
        self.outcome = PrefillOutcome.FAILED
        _log.warning("the prefill of request %s failed: %s", request_id, error)


class PrefillMetrics:
    """Of a prefill worker."""

    def __init__(self, registry: Registry) -> None:
        self._jobs = Counts(
            "trinamo_prefill_jobs",
            "Prompts that decode workers asked for, by what became of them",
            ("mode", "outcome"),
        )
        self._working = Counts(
            "trinamo_prefill_jobs_in_hand",
            "Prompts being computed or handed over",
            ("mode",),
            may_fall=True,
        )
        registry.register(self._jobs)
        registry.register(self._working)
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
