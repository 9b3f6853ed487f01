"""The work queue's promises, for any order of steps and any passing of time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.protocol.queue.jobs import (
    LeasedJob,
    PutResult,
    QueueLimits,
    Settlement,
)
from trinamo.runtime.protocol.queue.work_queue import WorkQueueModel

JOB_IDS = st.sampled_from([f"job-{number}" for number in range(6)])
LIMITS = st.builds(
    QueueLimits,
    visibility_timeout_s=st.sampled_from([1.0, 5.0]),
    attempts_max=st.integers(1, 3),
    duplicate_window_s=st.sampled_from([2.0, 20.0]),
    depth_max=st.integers(1, 5),
    dead_max=st.integers(1, 2),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), JOB_IDS),
        st.tuples(st.just("requeue"), JOB_IDS),
        st.tuples(st.just("purge"), JOB_IDS),
        st.tuples(st.just("take"), st.none()),
        # Which of all leases ever taken, counted from the last.
        st.tuples(st.sampled_from(["ack", "extend", "nak", "delay"]), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 3.0])),
    ),
    max_size=60,
)


class Run:
    """A queue, the leases its takers hold or think they hold, and the effects they made."""

    def __init__(self, limits: QueueLimits) -> None:
        self.model = WorkQueueModel(limits)
        self.limits = limits
        self.now = 0.0
        self.leases: list[LeasedJob] = []
        self.effects: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        self.deaths = 0

    def step(self, kind: str, argument: object) -> None:
        match kind, argument:
            case "put", str(job_id):
                try:
                    result = self.model.put(job_id, b"", now=self.now)
                except OverloadedError:
                    return
                self.entered[job_id] += result is PutResult.ADDED
            case "requeue", str(job_id):
                entered = self.model.counts.entered
                try:
                    self.model.requeue(job_id, now=self.now)
                except OverloadedError:
                    return
                self.entered[job_id] += self.model.counts.entered - entered
            case "purge", str(job_id):
                self.model.purge_dead(job_id, now=self.now)
            case "take", _:
                job = self.model.take(f"lease-{len(self.leases)}", now=self.now)
                if job is not None:
                    self.leases.append(job)
            case "wait", float(seconds):
                self.now += seconds
            case _, int(back) if back < len(self.leases):
                self.settle(kind, self.leases[-1 - back])

    def settle(self, kind: str, job: LeasedJob) -> None:
        if kind == "ack":
            outcome = self.model.ack(job.token, now=self.now)
            self.effects[job.id] += outcome is Settlement.APPLIED
        elif kind == "extend":
            self.model.extend(job.token, now=self.now)
        else:
            delay_s = 2.0 if kind == "delay" else 0.0
            self.model.nak(job.token, now=self.now, delay_s=delay_s)


@given(LIMITS, STEPS)
def test_no_job_is_lost_none_is_done_twice_and_attempts_are_bounded(
    limits: QueueLimits, steps: list[tuple[str, object]]
) -> None:
    """All that entered is in the queue, acked or dead; an effect per entry at most."""
    run = Run(limits)
    for kind, argument in steps:
        run.step(kind, argument)
        found = run.model.statistics(now=run.now)
        counts = run.model.counts
        assert counts.entered == found.depth + counts.acked + counts.died
        assert counts.entered == sum(run.entered.values())
        assert 0 <= found.leased <= found.depth <= limits.depth_max
        assert found.dead <= limits.dead_max
    assert all(job.attempt <= limits.attempts_max for job in run.leases)
    assert all(run.effects[job_id] <= run.entered[job_id] for job_id in run.effects)
    assert sum(run.effects.values()) == run.model.counts.acked


@given(LIMITS, STEPS)
def test_a_queue_that_is_worked_off_is_empty(
    limits: QueueLimits, steps: list[tuple[str, object]]
) -> None:
    """Whatever happened, takers that ack at once finish all there is, after the last lease."""
    run = Run(limits)
    for kind, argument in steps:
        run.step(kind, argument)
    run.now += limits.visibility_timeout_s + 2.0
    while (job := run.model.take("last", now=run.now)) is not None:
        assert run.model.ack(job.token, now=run.now) is Settlement.APPLIED
    assert run.model.statistics(now=run.now).depth == 0


@given(LIMITS, STEPS, st.integers(0, 5))
def test_a_step_under_an_expired_token_changes_nothing(
    limits: QueueLimits, steps: list[tuple[str, object]], back: int
) -> None:
    """Stale is stale: the queue is the same before and after."""
    run = Run(limits)
    for kind, argument in steps:
        run.step(kind, argument)
    if back >= len(run.leases):
        return
    run.now += limits.visibility_timeout_s
    before = run.model.statistics(now=run.now), run.model.counts.acked, run.model.counts.died
    job = run.leases[back]
    assert run.model.ack(job.token, now=run.now) is Settlement.STALE
    assert run.model.nak(job.token, now=run.now) is Settlement.STALE
    assert run.model.extend(job.token, now=run.now) is Settlement.STALE
    after = run.model.statistics(now=run.now), run.model.counts.acked, run.model.counts.died
    assert before == after
