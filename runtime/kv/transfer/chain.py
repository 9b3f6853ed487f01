"""Which transfer backends are tried, in which order, and how patiently.

The backends themselves are made by `transports/assembly`; what is done with them is `router.py`.
"""

from __future__ import annotations

import attrs

from ...config.planes import DataPlaneConfig

__all__ = ["RouterOptions", "chain_of"]


def chain_of(config: DataPlaneConfig) -> list[str]:
    """The names of the backends to try, in order; `tcp` is always the last."""
    chain: list[str] = []
    if config.nixl.enabled:
        chain += ["nixl", config.nixl.fallback]
    if config.mooncake.enabled:
        chain.append("mooncake_tcp" if config.mooncake.protocol == "tcp" else "mooncake")
    chain = [name for name in chain if name != "tcp"]
    return [*dict.fromkeys(chain), "tcp"]


@attrs.frozen(kw_only=True)
class RouterOptions:
    """How patient the router is."""

    attempt_s: float = 10.0
    """For one backend to confirm another block, while there is another one to fall back to."""
    drain_s: float = 5.0
    """How long a failed attempt may take to settle before its blocks may be moved again."""
    probe_s: float = 2.0
    """For one probe."""
    probe_interval_s: float = 5.0
    """Between two probes of a backend that failed."""
