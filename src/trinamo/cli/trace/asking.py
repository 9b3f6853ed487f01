"""Who may know of a request, and what they tell: one look at all processes of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import attrs
import msgspec
import trio

from trinamo.runtime.errors import RemoteProtocolError, TrinamoError, UnavailableError
from trinamo.runtime.http.survey.http_client import fetch
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.traces.ring import ProcessView, RecentView, TraceView
from trinamo.transports.assembly.run_file import find_runs

from ..running.locating import NOTHING_RUNS, Target, reachable
from ..status.survey import survey_cluster

ASK_TIMEOUT_S: Final = 1.5
COMPLETION_TIMEOUT_S: Final = 0.5
"""Somebody has pressed a key and waits."""
ASKED_AT_ONCE_MAX: Final = 64
ANSWER_BYTES_MAX: Final = 1 << 20
"""Of a status port, whose address any process may have registered."""
T = TypeVar("T")


@attrs.frozen
class Found:
    """One request in one process."""

    process: str
    """Its name: as `trinamo up` calls it, or by its instance."""
    trace: TraceView


@attrs.define
class Answers:
    """What the processes said."""

    found: list[Found] = attrs.field(factory=list)
    asked: int = 0
    keeping: int = 0
    """How many of them keep traces at all."""
    away: list[str] = attrs.field(factory=list)
    """Who did not answer, one sentence each."""


async def ask_cluster(target: Target, request_id: str, *, url: str = "") -> Answers:
    """Ask every process of the cluster, and the frontend at `url`, for what it knows of a request.

    Raises `UnavailableError` or `ConnectError`, with a sentence, if there is nobody to be asked.
    """
    places = await _places(target, url)
    if not places:
        raise UnavailableError(
            NOTHING_RUNS if target.run is None else "no process of this cluster has a status port"
        )
    answers, room = Answers(asked=len(places)), trio.CapacityLimiter(ASKED_AT_ONCE_MAX)

    async def ask(name: str, place: str) -> None:
        async with room:
            try:
                view = await _get(f"{place}/traces/{request_id}", ProcessView, ASK_TIMEOUT_S)
            except TrinamoError as error:
                answers.away.append(f"{name} does not answer: {error.message}")
                return
        answers.keeping += view.requests_max > 0
        answers.found += [Found(name, trace) for trace in view.traces]

    async with open_nursery() as nursery:
        for place, name in places.items():
            nursery.start_soon(ask, name, place)
    answers.found.sort(key=lambda each: (_start(each.trace), each.process))
    answers.away.sort()
    return answers


def _start(trace: TraceView) -> float:
    return min((leg.start for leg in trace.legs), default=0.0)


async def _places(target: Target, url: str) -> dict[str, str]:
    """The status ports and public addresses to ask, each with a name for people."""
    survey = await survey_cluster(target, url=url)
    places: dict[str, str] = {}
    instance_at = {
        reachable(each.metadata["status"]): f"worker {each.id}"
        for each in survey.instances
        if each.metadata.get("status")
    }
    for process in () if target.run is None else target.run.processes:
        if process.url and process.pid:
            places[reachable(process.url)] = process.name
    for frontend in survey.frontends:
        if frontend.status_url:
            places.setdefault(reachable(frontend.status_url), frontend.name)
    if survey.frontend is not None and not survey.frontends:
        places.setdefault(str(survey.frontend["url"]), "frontend")
    for place, name in instance_at.items():
        places.setdefault(place, name)
    return places


async def _get(url: str, of: type[T], timeout_s: float) -> T:
    status, body = await fetch(url, timeout_s=timeout_s, bytes_max=ANSWER_BYTES_MAX)
    try:
        if status == 200:
            return msgspec.json.decode(body, type=of)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"{url} is not of this version: {error}") from error
    raise RemoteProtocolError(f"{url} answers with {status}: it keeps no traces")


async def recent_ids() -> list[str]:
    """The last requests of the newest `trinamo up` here; whoever does not answer at once has none."""
    runs = find_runs()
    places = [each.url for each in runs[0].processes if each.url] if runs else []
    lists: list[list[str]] = []

    async def ask(place: str) -> None:
        try:
            view = await _get(f"{reachable(place)}/traces", RecentView, COMPLETION_TIMEOUT_S)
        except TrinamoError:
            return
        lists.append(view.request_ids)

    async with open_nursery() as nursery:
        for place in places:
            nursery.start_soon(ask, place)
    return _merged(lists)


def _merged(lists: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(each for ids in lists for each in ids))
