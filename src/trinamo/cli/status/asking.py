"""What an operator's command asks of a cluster: a survey from outside, and who knows of a request.

A survey is made over a connection to etcd of our own, by asking, and by dialling as frontends do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import attrs
import msgspec
import trio

from trinamo.runtime.config.config import Config, read_secrets
from trinamo.runtime.config.keys import is_loopback
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConfigError, TrinamoError, UnavailableError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.undecodable import UNDECODABLE
from trinamo.runtime.traces.ring import ProcessView, RecentView, TraceView
from trinamo.runtime.view.listing import Listing, read_listing
from trinamo.runtime.view.overview import FrontendView
from trinamo.runtime.view.requests import ask_places
from trinamo.runtime.view.survey import ASK_TIMEOUT_S, Asking, Survey, survey_around, why_away
from trinamo.transports.assembly.planes import open_control_plane, open_fleet, reach_control
from trinamo.transports.assembly.run_file import find_runs
from trinamo.transports.openai.client import fetch
from trinamo.transports.security.signed import signed_control
from trinamo.transports.tcp import TcpOptions, open_request_plane

from ..running.frontends_file import neighbours_of
from ..running.locating import NOTHING_RUNS, Target, reachable, somebody_listens

if TYPE_CHECKING:
    from trinamo.transports.security.fleet import Fleet

ETCD_TIMEOUT_S: Final = 3.0
"""Longer than the choice of a new leader takes."""
COMPLETION_TIMEOUT_S: Final = 0.5
"""Somebody has pressed a key and waits."""


NO_CLUSTER: Final = "the frontend has no etcd: it is in front of upstreams or engines of its own"


async def is_alone(
    config: Config, url: str, key: str = "", *, timeout_s: float = ASK_TIMEOUT_S
) -> bool:
    """Whether the frontend at `url` answers, and belongs to no cluster, as one in front of upstreams."""
    if _is_of_a_package(config):
        return False  # Such a control plane may count nothing, as if there were none.
    with suppress(TrinamoError, *UNDECODABLE):
        _, body = await fetch(f"{url}/status", timeout_s=timeout_s, key=key)
        known = msgspec.json.decode(body, type=FrontendView).cluster
        return known is None or known.control is None
    return False


async def survey_cluster(
    target: Target, *, url: str = "", key: str = "", timeout_s: float = ASK_TIMEOUT_S
) -> Survey:
    """Look; `url` is a frontend that `trinamo up` here did not start, `key` one for its clients.

    Of a frontend that belongs to no cluster nothing else is looked at: another cluster that runs here
    is not its own. Each process has `timeout_s` seconds to answer. Raises `UnavailableError` or `ConnectError` with a sentence if neither etcd nor a frontend is
    there to be asked.
    """
    if url and await is_alone(target.config, url, key, timeout_s=timeout_s):
        asking = Asking(fetch, key=key, timeout_s=timeout_s)
        return await survey_around(NO_CLUSTER, neighbours_of(None, None, url), asking)
    config, run = target.config, target.run
    endpoints = config.control_plane.etcd.endpoints
    neighbours = neighbours_of(config.control_plane.etcd, run, url)
    is_named = target.is_named or _is_of_a_package(config)
    is_known = run is not None or is_named or neighbours.frontends
    if not is_known and not await somebody_listens(endpoints[0]):
        raise UnavailableError(NOTHING_RUNS)
    listing = await _listing(
        target, can_wait=not neighbours.frontends, etcd_s=max(timeout_s, ETCD_TIMEOUT_S)
    )
    async with _dialling(config, timeout_s) as dial:
        return await survey_around(
            listing,
            neighbours,
            Asking(fetch, key=key, dial=dial, timeout_s=timeout_s),
            servers=config.event_plane.nats.servers,
        )


def _is_of_a_package(config: Config) -> bool:
    """Whether an installed package carries the control plane, and no etcd of anybody's."""
    return config.control_plane.backend not in ("etcd", "memory")


async def _listing(target: Target, *, can_wait: bool, etcd_s: float) -> Listing | str:
    """What etcd says, or why it says nothing; `UnavailableError` if nobody else can be asked."""
    if _is_of_a_package(target.config):
        try:
            async with reach_control(target.config) as control:
                return await read_listing(control)
        except TrinamoError as error:
            if can_wait:
                raise
            return error.message
    section = target.config.control_plane.etcd
    endpoints = section.endpoints
    timeout_s = min(section.connect_timeout_s, etcd_s)
    brief = msgspec.structs.replace(section, connect_timeout_s=timeout_s)
    # Trying again for a while is of no use if somebody else can be asked.
    if not (can_wait or any([await somebody_listens(each) for each in endpoints])):
        return f"etcd at {','.join(endpoints)} does not answer"
    try:
        async with open_control_plane(brief, list(endpoints)) as control:
            secrets, fleet = _known_of(target.config)
            signed = signed_control(control, RealEnv(), secrets, fleet)
            return await read_listing(signed)
    except ConfigError:
        raise
    except TrinamoError as error:
        if not can_wait:
            return why_away(error, endpoints)
        more = "a frontend named with --url tells what it last knew"
        raise UnavailableError(f"{error.message}; {more}") from error


def _known_of(config: Config) -> tuple[tuple[bytes, bytes], Fleet | None]:
    """The cluster's secrets, and its authority, or nothing.

    Who only looks may lack them, and believes entries of anybody then.
    """
    with suppress(ConfigError):
        secrets = read_secrets(config.security)
        return secrets, open_fleet(config.security, RealEnv(), secrets)
    return (b"", b""), None


@asynccontextmanager
async def _dialling(
    config: Config, timeout_s: float = ASK_TIMEOUT_S
) -> AsyncIterator[Callable[[str, str], Awaitable[str]]]:
    """Tries an address as a frontend with this configuration does; nothing is asked there.

    Who only looks may lack the cluster's secret: then nothing is tried. A cluster that has none is
    on this machine.
    """
    (secret, second), fleet = _known_of(config)
    is_open = config.security.secret_file is None
    options = TcpOptions.of(
        config.data_plane.tcp,
        secret=secret,
        second_secret=second,
        fleet=fleet,
        connect_timeout_s=timeout_s,
    )
    async with open_request_plane(options, RealEnv()) as plane:

        async def dial(address: str, instance_id: str) -> str:
            if not (secret or (is_open and is_loopback(address.rpartition(":")[0].strip("[]")))):
                return ""
            connected = trio.CancelScope()
            try:
                with connected:
                    await plane.hold(address, connected.cancel, instance_id=instance_id)
            except TrinamoError as error:
                return error.message
            return ""

        yield dial


@attrs.define
class ProcessAnswers:
    """What the processes said."""

    found: list[tuple[str, TraceView]] = attrs.field(factory=list)
    """Each request in each process: its name, as `trinamo up` calls it, or by its instance."""
    asked: int = 0
    keeping: int = 0
    """How many of them keep traces at all."""
    away: list[str] = attrs.field(factory=list)
    """Who did not answer, one sentence each."""


async def ask_cluster(
    target: Target, request_id: str, *, url: str = "", key: str = ""
) -> ProcessAnswers:
    """Ask every process of the cluster, and the frontend at `url`, for what it knows of a request.

    `key` is one of its clients'. Raises `UnavailableError` or `ConnectError`, with a sentence, if
    there is nobody to be asked.
    """
    places, keys = await find_places(target, url, key)
    told, away = await ask_places(fetch, f"/traces/{request_id}", ProcessView, places, keys)
    answers = ProcessAnswers(asked=len(places), away=away)
    for name, view in told:
        answers.keeping += view.requests_max > 0
        answers.found += [(name, trace) for trace in view.traces]
    answers.found.sort(
        key=lambda each: (min((leg.start for leg in each[1].legs), default=0.0), each[0])
    )
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
