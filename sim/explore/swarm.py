"""Many seeds of one scenario, over some processes: the failures, each kind once.

Processes are started outside any world. One seed in `RECHECK_ONE_IN` is played twice, and two
digests of one seed are a failure too. Seeds are taken lazily, so a caller may give an endless
supply and stop it when its time is up.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from ..core.choices import SeedChoices
from .hints import nothing_varies
from .run import ENDLESS_STEP, Finding, Run, Scenario, run, shape_of

if TYPE_CHECKING:
    from concurrent.futures import Future

RECHECK_ONE_IN = 20
BATCH = 8
"""How many seeds go to a process at a time."""
FORKED_AFTER_S = 0.3
SPAWNED_AFTER_S = 2.0
"""How long a swarm plays in one process before others are worth it: a fresh one takes a second to start."""
JOBS_MAX = 16
NONDETERMINISM = "determinism"


class Coverage:
    """What none of many runs has shown of what their scenario is about.

    A run says what it did not show (`World.untested`): a fault whose note never came, an expected note
    that is missing. Chance may keep that from one run; if it is so in all, the scenario tests less
    than it says.
    """

    def __init__(self) -> None:
        self._lacking: dict[str, str] | None = None

    def add(self, untested: Iterable[str]) -> None:
        """One more run, and what it did not show."""
        lacking = {shape_of(text): text for text in untested}
        before = lacking if self._lacking is None else self._lacking
        self._lacking = {shape: text for shape, text in before.items() if shape in lacking}

    @property
    def untested(self) -> list[str]:
        """Expectations that no run has met, as sentences; empty before the first run."""
        return list((self._lacking or {}).values())


@attrs.define
class Failures:
    """One kind of failure: the first run that showed it (by seed), and how many did."""

    first: Run
    count: int = 0


@attrs.define
class Progress:
    """How far a swarm has come; given to its callback after each batch, and returned at its end."""

    runs: int = 0
    failed_runs: int = 0
    steps: int = 0
    events: int = 0
    virtual_s: float = 0.0
    failures: dict[str, Failures] = attrs.field(factory=dict)
    """By `Finding.key`."""
    coverage: Coverage = attrs.field(factory=Coverage)
    """What none of the runs that held has shown of what the scenario is about."""
    advice: Coverage = attrs.field(factory=Coverage)
    """The hints that hold for all of those runs."""
    varying: set[str] = attrs.field(factory=set)
    """What could go wrong in any run; see `Run.varying`."""
    is_watched: bool = False
    """Whether a checker held any of those that held to a rule."""
    followed: set[str] = attrs.field(factory=set)
    broke_off: set[str] = attrs.field(factory=set)
    """See `Run`; of those that held."""

    @property
    def hints(self) -> list[str]:
        """What looks like a mistake of the scenario, in sentences; nothing for a healthy one."""
        few = nothing_varies(self.varying) if self.runs else ""
        return [*self.advice.untested, *([few] if few else [])]

    def add(self, result: Run) -> None:
        """Count one run."""
        self.runs += 1
        self.steps += result.steps
        self.events += result.events
        self.virtual_s += result.virtual_s
        self.varying.update(result.varying)
        if result.finding is None:
            self.coverage.add(result.untested)
            self.advice.add(result.hints)
            self.is_watched |= result.is_watched
            self.followed.update(result.followed)
            self.broke_off.update(result.broke_off)
            return
        self.failed_runs += 1
        kind = self.failures.setdefault(result.finding.key, Failures(result))
        kind.count += 1
        if result.seed < kind.first.seed:
            kind.first = result


def swarm(
    scenario: Scenario,
    seeds: Iterable[int],
    *,
    jobs: int | None = 1,
    may_spawn: bool = True,
    on_progress: Callable[[Progress], object] = lambda _progress: None,
) -> Progress:
    """Play every seed; `jobs` processes, or this one if that is 1.

    With None this process plays alone at first, and then one process for each core, up to `JOBS_MAX`. They
    are forked where that is safe, and else spawned; unless `may_spawn`, since those know
    nothing of what was changed here, this process goes on alone. `on_progress` is called after each batch,
    in the order of the seeds, so what comes of a swarm does not depend on `jobs`; what it raises ends the swarm.
    """
    progress = Progress()
    supply = iter(seeds)
    batches = iter(lambda: list(islice(supply, BATCH)), [])
    count = jobs or min(_cores(), JOBS_MAX)
    method = None if count == 1 or jobs is None else _start_method()
    began_s = time.process_time()
    while method is None:
        if (batch := next(batches, None)) is None:
            return progress
        _add(play_seeds(scenario, batch), progress, on_progress)
        if count > 1:
            method = _start_method(time.process_time() - began_s, may_spawn=may_spawn)
    # They take longer to import than a short search takes.
    import multiprocessing  # noqa: PLC0415
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415

    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        running: deque[Future[list[Run]]] = deque()
        try:
            for batch in batches:
                running.append(pool.submit(play_seeds, scenario, batch))
                if len(running) >= 2 * count:
                    _add(running.popleft().result(), progress, on_progress)
            while running:
                _add(running.popleft().result(), progress, on_progress)
        finally:
            pool.shutdown(cancel_futures=True)
    return progress


def _cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _start_method(alone_s: float = math.inf, *, may_spawn: bool = True) -> str | None:
    """How other processes are started, if they are worth it after so long alone.

    A forked one would inherit the locks that other threads hold; native ones count, such as numpy's.
    """
    if sys.platform == "linux" and len([*Path("/proc/self/task").iterdir()]) == 1:
        return "fork" if alone_s >= FORKED_AFTER_S else None
    return "spawn" if may_spawn and alone_s >= SPAWNED_AFTER_S else None


def _add(results: list[Run], progress: Progress, on_progress: Callable[[Progress], object]) -> None:
    for result in results:
        progress.add(result)
    on_progress(progress)


def play_seeds(scenario: Scenario, seeds: list[int]) -> list[Run]:
    """The runs of these seeds. Those that passed come back without their decisions."""
    results: list[Run] = []
    for seed in seeds:
        is_checked = seed % RECHECK_ONE_IN == 0
        choices = SeedChoices(seed)
        # A fifth of a run's time goes into rows about steps, which are read where something was found.
        choices.traces_steps = is_checked
        result = run(scenario, choices)
        if result.finding is not None and result.finding.invariant == ENDLESS_STEP:
            # Each takes seconds, and what such a step did until it was ended differs from run to run.
            return [*results, result]
        if result.finding is not None and not is_checked:
            again = run(scenario, seed)
            # What shows once only is told as it was.
            result = result if again.finding is None else again
        if is_checked and (again := run(scenario, seed)).digest != result.digest:
            text = f"two runs of one seed differ: {result.digest} and {again.digest}"
            result = attrs.evolve(result, finding=Finding(NONDETERMINISM, 0.0, text))
        # The seed says all about a run that passed, and there are many.
        results.append(result if result.finding else attrs.evolve(result, values=[]))
        # A run leaves some MB in cycles. When the collector was turned on again they were still held,
        # so it takes them for older than they are.
        del choices
        gc.collect(1)
    return results
