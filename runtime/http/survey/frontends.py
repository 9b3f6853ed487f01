"""Several frontends on one port: the port answers for one of them, so each is asked for itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

from ...errors import TrinamoError
from ...nurseries import open_nursery
from .http_client import fetch_json

ASK_TIMEOUT_S: Final = 1.5
ANSWER_BYTES_MAX: Final = 256 << 10


@attrs.define
class FrontendLook:
    """One of several frontends on one port."""

    name: str
    pid: int
    url: str
    """The port that they share."""
    status_url: str
    """Its own `/health`, `/live` and `/metrics`."""
    status: str = "away"
    in_flight: int | None = None
    problem: str = ""
    health: dict[str, Any] | None = None
    """What its status port says; None if it says nothing."""


async def ask_frontends(found: Iterable[FrontendLook], timeout_s: float = ASK_TIMEOUT_S) -> None:
    """Ask each how it is, all at once."""
    async with open_nursery() as nursery:
        for look in found:
            nursery.start_soon(_ask, look, timeout_s)


async def _ask(look: FrontendLook, timeout_s: float) -> None:
    if not look.pid or not look.status_url:
        look.problem = "it is starting"
        return
    try:
        health: Any = await fetch_json(
            f"{look.status_url}/health", timeout_s=timeout_s, bytes_max=ANSWER_BYTES_MAX
        )
    except TrinamoError as error:
        look.problem = error.message
        return
    if isinstance(health, dict):
        look.health = health
        look.status = str(health.get("status", "unknown"))
        in_flight = health.get("in_flight")
        look.in_flight = in_flight if isinstance(in_flight, int) else None
