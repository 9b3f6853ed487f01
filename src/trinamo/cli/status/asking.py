"""Who may know of a request, and what they tell: one look at all processes of a cluster."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import attrs
import msgspec

from trinamo.runtime.errors import TrinamoError, UnavailableError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.undecodable import UNDECODABLE
from trinamo.runtime.traces.ring import RecentView, TraceView
from trinamo.runtime.view.requests import ask_legs
from trinamo.transports.assembly.run_file import find_runs
from trinamo.transports.openai.http_client import fetch

from ..running.locating import NOTHING_RUNS, Target, reachable
from ..status.survey import survey_cluster

COMPLETION_TIMEOUT_S: Final = 0.5
"""Somebody has pressed a key and waits."""


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


async def ask_cluster(target: Target, request_id: str, *, url: str = "", key: str = "") -> Answers:
    """Ask every process of the cluster, and the frontend at `url`, for what it knows of a request.

    `key` is one of its clients'. Raises `UnavailableError` or `ConnectError`, with a sentence, if there
    is nobody to be asked.
    """
    places, keys = await find_places(target, url, key)
    told, away = await ask_legs(fetch, request_id, places, keys)
    answers = Answers(asked=len(places), away=away)
    for name, view in told:
        answers.keeping += view.requests_max > 0
        answers.found += [Found(name, trace) for trace in view.traces]
    answers.found.sort(key=lambda each: (_start(each.trace), each.process))
    return answers


async def find_places(target: Target, url: str, key: str) -> tuple[dict[str, str], dict[str, str]]:
    """Where every process of the cluster may be asked, their names by URL; and the keys for some.

    Raises as `ask_cluster` does.
    """
    survey = await survey_cluster(target, url=url, key=key)
    processes = () if target.run is None else target.run.processes
    places = {each.url: each.name for each in processes if each.url and each.pid}
    places = survey.places() | places
    if not places:
        raise UnavailableError(
            NOTHING_RUNS if target.run is None else "no process of this cluster has a status port"
        )
    return places, {each.url: key for each in survey.frontends if each.is_named}


def _start(trace: TraceView) -> float:
    return min((leg.start for leg in trace.legs), default=0.0)


async def recent_ids() -> list[str]:
    """The last requests of the newest `trinamo up` here; whoever does not answer at once has none."""
    runs = find_runs()
    places = [each.url for each in runs[0].processes if each.url] if runs else []
    lists: list[list[str]] = []

    async def ask(place: str) -> None:
        with suppress(TrinamoError, *UNDECODABLE):
            _, body = await fetch(f"{reachable(place)}/traces", timeout_s=COMPLETION_TIMEOUT_S)
            lists.append(msgspec.json.decode(body, type=RecentView).request_ids)

    async with open_nursery() as nursery:
        for place in places:
            nursery.start_soon(ask, place)
    return list(dict.fromkeys(each for ids in lists for each in ids))
