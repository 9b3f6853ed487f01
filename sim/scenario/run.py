"""How a scenario is played: a fresh world, a driver in it, and the judges afterwards.

Only what the choices say can differ between two runs of one scenario: same choices, same trace.
Read next: `driver.py`, `faults.py` (what can be done to a cluster), `checks/`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import attrs

from ..checks import judge
from ..cluster.cluster import Cluster
from ..cluster.outcome import Outcome
from ..cluster.plans import QueuePlan, Scenario
from ..core.choices import Choices
from ..core.world import World
from ..errors import Deadlock, Livelock, SimulationError, StepLimit, TimeLimit, Violation
from ..mutants import planted
from ..net.network import Network
from ..programs import leased_queue, queue_consumers
from .driver import ClusterDriver


def run_scenario(scenario: Scenario, choices: Choices, *, bug: str = "") -> Outcome:
    """Play it in a fresh world and judge it; `bug` names a mistake to put back.

    A run that fails on its own account (deadlock, limits, a process that crashed) is a
    violation too. Raises `Escape` if something reached for the real world.
    """
    if scenario.queue is not None:
        return _run_queue(scenario, scenario.queue, choices, bug)
    world = World(
        choices,
        policy=scenario.policy or "batch",
        steps_max=scenario.limits.steps,
        virtual_s_max=scenario.limits.virtual_s,
        ambient="raise",
    )
    network = Network(world, **attrs.asdict(scenario.network))
    cluster = Cluster(world, network, scenario.cluster)
    outcome = Outcome(scenario, world, network, cluster)
    driver = ClusterDriver(scenario, outcome)
    with planted(bug) if bug else nullcontext():
        try:
            world.run(driver.run)
        except (Deadlock, Livelock, StepLimit, TimeLimit) as error:
            outcome.violate("I15", f"{type(error).__name__}: {error}")
        except SimulationError:
            raise
        except Violation as error:
            outcome.violate(error.invariant, error.text)
        except Exception as error:  # noqa: BLE001 -- a process that ends by it is a finding
            outcome.violate("crash", f"{type(error).__name__}: {error}")
    outcome.digest = world.trace.digest
    judge(outcome)
    world.missed += driver.nemesis.missed()
    return outcome


def _run_queue(scenario: Scenario, queue: QueuePlan, choices: Choices, bug: str) -> Outcome:
    broken: Violation | None = None
    try:
        plan: dict[str, Any] = {
            "workers": queue.workers,
            "jobs": queue.jobs,
            "losses": queue.losses,
        }
        if scenario.policy is not None:
            plan["policy"] = scenario.policy
        with planted(bug) if bug else nullcontext():
            if queue.real:
                queue_consumers.run(choices, stranger=queue.stranger, late=queue.late, **plan)
            else:
                leased_queue.run(choices, fenced=bug != "stale_ack", **plan)
    except Violation as error:
        broken = error
    world = choices.world
    assert isinstance(world, World)
    network = Network(world)
    outcome = Outcome(scenario, world, network, Cluster(world, network, scenario.cluster))
    outcome.digest = world.trace.digest
    if broken is not None:
        outcome.violate(broken.invariant, broken.text)
    return outcome
