"""Play seeds of scenarios, each twice, in this process: `python -m tests.published.play FIRST NAME=COUNT…`.

It runs in the environment of the published libraries, where there is no pytest, and prints a line of
JSON for each scenario.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, Final

from trinamo.sim import own_scenario
from trinamo.sim.explore.run import quietly, run

SCENARIOS: Final = Path(__file__).with_name("scenarios")


def play(name: str, first: int, count: int) -> dict[str, Any]:
    """Play `count` seeds from `first` of `scenarios/NAME.py`: what failed, and what did not replay."""
    scenario = own_scenario(SCENARIOS / f"{name}.py")
    began_s = time.process_time()
    digests: dict[int, str] = {}
    failed: dict[int, str] = {}
    unequal: list[int] = []
    hints: set[str] = set()
    with quietly():
        for seed in range(first, first + count):
            played, again = run(scenario, seed), run(scenario, seed)
            digests[seed] = played.digest
            hints.update(played.hints)
            if played.digest != again.digest:
                unequal.append(seed)
            if played.finding is not None:
                failed[seed] = played.finding.key
    return {
        "name": name,
        "digests": digests,
        "failed": failed,
        "unequal": unequal,
        "hints": sorted(hints),
        "runs_per_s": round(2 * count / (time.process_time() - began_s), 1),
    }


def main(first: str, *asked: str) -> None:
    """Print one line of JSON for each `NAME=COUNT`."""
    logging.disable(logging.CRITICAL)
    for each in asked:
        name, _, count = each.partition("=")
        print(json.dumps(play(name, int(first), int(count))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
