"""What every hypothesis test has in common: nothing is judged by how long it takes.

The machine may be busy. `load` keeps all else of the profile that is in force, such as
hypothesis's own one for CI.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

__all__ = ["load"]


def load() -> None:
    """For all test modules imported from now on."""
    timeless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("timeless", timeless)
    settings.load_profile("timeless")
