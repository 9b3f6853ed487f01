"""Many runs of one scenario: search for failures, make them small, replay them, explain them.

Read in this order: `run.py` (one run and what came of it), `swarm.py` (many seeds, and what
none of them has shown), `bounded.py` (every run near the default run), `failure.py` (a failure on
file, and its replay), `shrink.py`, `pin.py`, `determinism.py`. Scenario files come from
`sim/scenario/play.py`, functions in anybody's file from `sim/own/`. All are plain functions that
report progress to a callback; the command line is elsewhere.
"""

from .bounded import Search, explore_bounded
from .determinism import Determinism, check_determinism
from .failure import BadFailureFile, Failure, Replay, load_failure, replay, save_failure
from .pin import Pin, PinPoint, pin
from .run import BadScenario, Finding, Play, Played, Run, Scenario, page_of, played, quietly, run
from .shrink import Shrunk, shrink
from .swarm import Coverage, Failures, Progress, swarm

__all__ = [
    "BadFailureFile",
    "BadScenario",
    "Coverage",
    "Determinism",
    "Failure",
    "Failures",
    "Finding",
    "Pin",
    "PinPoint",
    "Play",
    "Played",
    "Progress",
    "Replay",
    "Run",
    "Scenario",
    "Search",
    "Shrunk",
    "check_determinism",
    "explore_bounded",
    "load_failure",
    "page_of",
    "pin",
    "played",
    "quietly",
    "replay",
    "run",
    "save_failure",
    "shrink",
    "swarm",
]
