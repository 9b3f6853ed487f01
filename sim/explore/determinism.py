"""Whether a scenario is a function of its seed: two runs in each of some fresh processes agree.

Each process has another PYTHONHASHSEED, and may be another Python. Run as a module it is the child:
it reads what to play as JSON from standard input and writes the digests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from .run import Scenario, run

HASH_SEEDS = ("0", "1", "42")
TIMEOUT_S = 600.0


@attrs.frozen
class Determinism:
    """What was compared. `differences` says which seed had which digests where; empty is good."""

    digests: dict[int, str]
    """By seed, as the first process had them."""
    runs: int
    differences: list[str]


def check_determinism(
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    pythons: Sequence[str] = (sys.executable,),
) -> Determinism:
    """Play every seed twice in every process, one process at a time.

    Raises `subprocess.SubprocessError` if one of them fails or takes longer than `TIMEOUT_S`.
    """
    question = json.dumps({"scenario": attrs.asdict(scenario), "seeds": list(seeds)})
    seen: dict[int, dict[str, str]] = {seed: {} for seed in seeds}
    for python in pythons:
        for hash_seed in HASH_SEEDS:
            environment = {
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(_paths_for(python)),
            }
            child = subprocess.run(  # noqa: S603 -- an interpreter, no shell
                [python, "-m", "trinamo.sim.explore.determinism"],
                env=environment,
                input=question,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=TIMEOUT_S,
            )
            for name, digests in json.loads(child.stdout).items():
                for seed, digest in zip(seeds, digests, strict=True):
                    seen[seed][f"{python} PYTHONHASHSEED={hash_seed} {name}"] = digest
    differences = [
        f"seed {seed}: " + ", ".join(f"{digest} in {where}" for where, digest in digests.items())
        for seed, digests in seen.items()
        if len({*digests.values()}) > 1
    ]
    return Determinism(
        {seed: next(iter(digests.values())) for seed, digests in seen.items()},
        sum(len(digests) for digests in seen.values()),
        differences,
    )


def digests_of(question: Any) -> dict[str, list[str]]:
    """Every seed twice: first all of them, then all of them again."""
    scenario = Scenario(**question["scenario"])
    return {
        name: [run(scenario, seed).digest for seed in question["seeds"]]
        for name in ("first", "again")
    }


def _paths_for(python: str) -> list[str]:
    """Where another interpreter finds our packages: not in this one's own library."""
    paths = [path for path in sys.path if path]
    if python == sys.executable:
        return paths
    own = (sys.prefix, sys.base_prefix)
    return [path for path in paths if not path.startswith(own)]


if __name__ == "__main__":
    json.dump(digests_of(json.load(sys.stdin)), sys.stdout)
