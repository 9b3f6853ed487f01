"""The secret that the hosts of a simulated cluster share: they are not loopback to each other."""

from __future__ import annotations

from typing import Final

SECRET: Final = b"the secret of a simulated cluster"
