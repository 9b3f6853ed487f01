"""What every hypothesis test has in common: nothing is judged by how long it takes.

The machine may be busy. `load` keeps all else of the profile that is in force, such as
hypothesis's own one for CI. Under `make swarm` (`HYPOTHESIS_PROFILE=swarm`) examples are drawn anew
each time, and what fails is kept, also where the suite always plays the same.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

IS_SWARM = os.environ.get("HYPOTHESIS_PROFILE") == "swarm"
KEPT = Path(os.environ.get("HYPOTHESIS_STORAGE_DIRECTORY", ".hypothesis")) / "examples"


def load() -> None:
    """For all test modules imported from now on."""
    timeless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("timeless", timeless)
    settings.register_profile(
        "swarm",
        timeless,
        derandomize=False,
        database=DirectoryBasedExampleDatabase(KEPT),
    )
    settings.load_profile("swarm" if IS_SWARM else "timeless")
