"""The limits of the operating system that a serving process sets for itself."""

from __future__ import annotations

import resource
from typing import Final

DESCRIPTORS_MAX: Final = 1 << 20
"""Enough, where the hard limit is none: some libraries visit every number below it."""


def raise_descriptor_limit() -> None:
    """Let this process, and what it starts, open as many files as it may.

    The soft limit, 1,024 on most systems, is below `http.connections_max`; it is there for programs
    that use `select`, and we do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
