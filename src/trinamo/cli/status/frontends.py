"""Several frontends on one port: the port answers for one of them, so each is asked for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.nurseries import open_nursery

from ..running.frontends_file import find_frontends
from ..running.http_client import fetch_json
from ..running.locating import Target
from ..running.run_file import ProcessEntry

__all__ = ["FrontendLook", "look_at_frontends"]

ASK_TIMEOUT_S: Final = 1.5


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


async def look_at_frontends(target: Target, url: str) -> list[FrontendLook]:
    """Those on this machine that `trinamo up` or `trinamo frontend --processes` has started.

    Of the cluster that is meant, or at `url`.
    """
    etcd, run = target.config.control_plane.etcd.endpoints, target.run
    groups: list[tuple[str, Sequence[ProcessEntry]]] = [
        (each.url, each.processes)
        for each in find_frontends()
        if each.etcd == etcd or each.url == url
    ]
    if run is not None:
        shared = [each for each in run.processes if each.name.startswith("frontend-")]
        groups.insert(0, (run.url, shared))
    found = [
        FrontendLook(each.name, each.pid, shared_url, each.url)
        for shared_url, processes in groups
        for each in processes
    ]
    async with open_nursery() as nursery:
        for look in found:
            nursery.start_soon(_ask, look)
    return found


async def _ask(look: FrontendLook) -> None:
    if not look.pid or not look.status_url:
        look.problem = "it is starting"
        return
    try:
        health: Any = await fetch_json(f"{look.status_url}/health", timeout_s=ASK_TIMEOUT_S)
    except TrinamoError as error:
        look.problem = error.message
        return
    if isinstance(health, dict):
        look.status = str(health.get("status", "unknown"))
        in_flight = health.get("in_flight")
        look.in_flight = in_flight if isinstance(in_flight, int) else None
