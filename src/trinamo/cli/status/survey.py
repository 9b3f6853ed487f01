"""A survey from outside: over a connection to etcd of our own, and by asking a frontend."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec

from trinamo.runtime.errors import (
    ConfigError,
    ConnectError,
    RemoteProtocolError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.http.survey.frontends import ask_frontends
from trinamo.runtime.http.survey.http_client import fetch
from trinamo.runtime.http.survey.instances import ASK_TIMEOUT_S
from trinamo.runtime.http.survey.overview import FrontendView
from trinamo.runtime.http.survey.survey import (
    Survey,
    ask_instances,
    ask_processes,
    discover,
    name_instances,
    take_last_known,
    take_view,
    tell_frontends,
    tell_planes,
    tell_workers,
    why_away,
)
from trinamo.runtime.protocol.undecodable import UNDECODABLE
from trinamo.transports.assembly.planes import open_control_plane

from ..running.locating import NOTHING_RUNS, Target, somebody_listens
from ..running.neighbours import about_run, frontends_of

ETCD_TIMEOUT_S: Final = 3.0
"""Longer than the choice of a new leader takes."""

_OF_HEALTH: Final = ("status", "in_flight")


async def survey_cluster(target: Target, *, url: str = "") -> Survey:
    """Look; `url` is a frontend that `trinamo up` here did not start.

    Raises `UnavailableError` or `ConnectError` with a sentence if neither etcd nor a frontend is
    there to be asked.
    """
    section, run = target.config.control_plane.etcd, target.run
    if (
        run is None
        and not (target.is_named or url)
        and not await somebody_listens(section.endpoints[0])
    ):
        raise UnavailableError(NOTHING_RUNS)
    survey = Survey(etcd="", cluster=None, frontend=None)
    if run is not None:
        survey.cluster = about_run(run)
        url = url or run.url
    view = await _ask_frontend(survey, url) if url else None
    survey.frontends = frontends_of(section.endpoints, run, url)
    await ask_frontends(survey.frontends)
    tell_frontends(survey)
    await _ask_etcd(survey, target, view)
    processes = () if run is None else run.processes
    name_instances(survey, processes)
    await ask_instances(survey, view)
    await ask_processes(survey, processes)
    if view is not None:
        tell_planes(survey, view, target.config.event_plane.nats.servers)
    tell_workers(survey)
    return survey


async def _ask_etcd(survey: Survey, target: Target, view: FrontendView | None) -> None:
    """Discovery from etcd; if it is away, from what a frontend said."""
    section = target.config.control_plane.etcd
    brief = msgspec.structs.replace(
        section, connect_timeout_s=min(section.connect_timeout_s, ETCD_TIMEOUT_S)
    )
    try:
        if view is not None and not await _does_listen(section.endpoints):
            # Trying again for a while is of no use if somebody else can be asked.
            raise ConnectError("every endpoint refuses connections")
        async with open_control_plane(brief, list(section.endpoints)) as control:
            await discover(control, survey)
    except ConfigError:
        raise
    except TrinamoError as error:
        if view is not None:
            take_last_known(survey, view, why_away(error, section.endpoints))
        else:
            more = survey.away or ["a frontend named with --url tells what it last knew"]
            raise UnavailableError("; ".join([error.message, *more])) from error


async def _does_listen(endpoints: tuple[str, ...]) -> bool:
    for endpoint in endpoints:
        if await somebody_listens(endpoint):
            return True
    return False


async def _ask_frontend(survey: Survey, url: str) -> FrontendView | None:
    try:
        status, body = await fetch(f"{url}/status", timeout_s=ASK_TIMEOUT_S)
        if status == HTTPStatus.UNAUTHORIZED:
            # What it knows is for those with a key; how it is, it tells all.
            _, body = await fetch(f"{url}/health", timeout_s=ASK_TIMEOUT_S)
            health = msgspec.json.decode(body, type=dict[str, Any])
            survey.frontend = {"url": url, **{key: health.get(key) for key in _OF_HEALTH}}
            return None
        view = msgspec.json.decode(body, type=FrontendView)
    except (TrinamoError, *UNDECODABLE) as error:
        if not isinstance(error, TrinamoError):
            error = RemoteProtocolError(f"{url} is no frontend of this version: {error}")
        survey.frontend = {"url": url, "status": "away", "problem": error.message}
        survey.away.append(f"the frontend does not answer: {error.message}")
        return None
    take_view(survey, url, view)
    return view
