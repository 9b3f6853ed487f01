"""One look at a cluster: what discovery says, what its processes say of themselves, and who is away.

The page of a frontend, `trinamo status`, `trace` and `doctor` all look by `survey_around`. Who
looks reads discovery (`listing.py`), and names the frontends that are known besides; a frontend
that looks is one of them. What frontends see of the instances comes first, since that decides where
requests go. While etcd is away it is all there is; a plane that is away is one sentence in
`Survey.away`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import attrs
import msgspec
import trio

from ..caller.record import InstanceStatus
from ..errors import ConnectError, DeadlineError, RemoteProtocolError, TrinamoError
from ..http.transport import Fetch, fetch_json
from ..nurseries import open_nursery
from ..protocol.discovery.instances import FrontendEntry
from ..protocol.undecodable import UNDECODABLE, decoding_fault
from ..traces.ring import RequestsView
from .listing import InstanceLook, Listing, ModelLook
from .overview import AWAY, FrontendView, InstanceView

ASK_TIMEOUT_S: Final = 1.5
ASKED_AT_ONCE_MAX: Final = 64
FACTS_BYTES_MAX: Final = 256 << 10
"""Of a status port, whose address any process may have registered."""
VIEW_BYTES_MAX: Final = 1 << 20
"""Of what a frontend knows of its cluster."""
AWAY_PROBLEM: Final = "the upstream fails its looks; the frontend's log says why"
LOST: Final[Mapping[str, str]] = {
    InstanceStatus.SUSPECTED: "has lost its connection to it",
    InstanceStatus.UNREACHED: "cannot reach it",
}
"""States in which a frontend sends an instance nothing, and what is wrong."""
GONE: Final = InstanceStatus.GONE.value
TOLD_MAX: Final = 16
"""Sentences of one kind; the others are counted."""
View = tuple[str, FrontendView]
"""What a frontend knows, and what to call it."""


class OwnedProcess(Protocol):
    """A process of the cluster as whoever started it has written it down."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        ...

    @property
    def url(self) -> str:
        """Where it answers HTTP; empty if it does not."""
        ...

    @property
    def is_worker(self) -> bool: ...


@attrs.define
class FrontendLook:
    """One frontend: found in discovery, written down on this machine, or named by an operator."""

    name: str
    pid: int
    """0 if it is not known, or does not run."""
    url: str
    """Where it answers the API, perhaps on a port that several share."""
    status_url: str
    """Where it alone answers; empty if it has no such port."""
    status: str = "away"
    in_flight: int | None = None
    problem: str = ""
    health: dict[str, Any] | None = None
    """What it says of itself; None if it says nothing."""
    wants_key: bool = False
    """Whether what it knows is only for whoever brings a key."""
    view: FrontendView | None = None
    requests: RequestsView | None = None
    is_named: bool = False
    """Whether an operator has named it, so that a client's key may be sent to `url`."""
    is_own: bool = False
    """Whether it is the process that looks, which asks itself nothing."""
    host: str = ""
    """The name of its machine, as it registered it."""
    api_url: str = ""
    """Where other machines reach the API, likewise; `url` may be what it binds."""


@attrs.define
class Neighbours:
    """What whoever started processes on this machine has written down of the cluster."""

    cluster: dict[str, Any] | None = None
    """See `Survey.cluster`."""
    frontends: list[FrontendLook] = attrs.field(factory=list)
    processes: Sequence[OwnedProcess] = ()


@attrs.frozen
class Asking:
    """How processes are asked."""

    fetch: Fetch
    timeout_s: float = attrs.field(default=ASK_TIMEOUT_S, kw_only=True)
    asked_max: int | None = attrs.field(default=None, kw_only=True)
    """Instances that are asked, the first ones; None: all."""
    key: str = ""
    """Of a client, for a frontend that an operator has named."""
    wants_requests: bool = False
    """Whether frontends are asked for their requests, too."""
    dial: Callable[[str, str], Awaitable[str]] | None = None
    """Tries the address of an instance, by its id, as a frontend would; says why it is not reached,
    or nothing. None: that is not tried."""


@attrs.define
class Survey:
    """The cluster as it is now, or as its frontends last knew it."""

    etcd: str
    """What etcd says of itself; empty if it does not answer."""
    cluster: dict[str, Any] | None
    """What `trinamo up` wrote about it; None for a cluster started otherwise."""
    frontend: dict[str, Any] | None
    """The words of the first of `frontends`; None if there is none that we know of."""
    away: list[str] = attrs.field(factory=list)
    """What does not answer, one sentence each; empty if the cluster is whole."""
    is_last_known: bool = False
    """Whether instances and models are what the frontend last knew of them."""
    is_whole: bool = False
    """Whether all answers: nothing is in `away`."""
    frontends: list[FrontendLook] = attrs.field(factory=list)
    """All that are known: those with a status port, and one that was named or started here."""
    instances: list[InstanceLook] = attrs.field(factory=list)
    """Engines: those that answer requests, and those that compute prompts for them."""
    models: list[ModelLook] = attrs.field(factory=list)
    refused: list[str] = attrs.field(factory=list)
    """Entries that make no sense, cards that contradict their model's, aliases that are taken."""

    def to_json(self) -> dict[str, Any]:
        """All of it but what frontends said word for word."""
        return attrs.asdict(self, filter=lambda each, _: each.name not in ("view", "requests"))

    def places(self) -> dict[str, str]:
        """Where each process may be asked for the legs of a request, and its name."""
        found = {
            each.status_url or each.url: each.name for each in self.frontends if not each.is_own
        }
        for each in self.instances:
            if (url := each.metadata.get("status")) and each.seen != GONE:
                found.setdefault(url, each.name or f"worker {each.id}")
        return found


async def survey_around(
    listing: Listing | str,
    neighbours: Neighbours,
    asking: Asking,
    *,
    servers: Sequence[str] = (),
    last: Listing | None = None,
) -> Survey:
    """Look; `listing` is what discovery says, or why it says nothing.

    `servers` are those of NATS, `last` what discovery said before. Raises `ConnectError` if neither
    discovery nor a frontend tells anything.
    """
    survey = Survey(etcd="", cluster=neighbours.cluster, frontend=None)
    survey.frontends = neighbours.frontends
    told = last if isinstance(listing, str) else listing
    add_listed(survey.frontends, told.frontends if told is not None else ())
    await ask_frontends(survey.frontends[: asking.asked_max], asking)
    views = tell_frontends(survey)
    if not isinstance(listing, str):
        survey.etcd, survey.models = listing.etcd, listing.models
        survey.instances, survey.refused = listing.instances, listing.refused
    elif views:
        _take_last_known(survey, views[0][1], listing, last)
    else:
        wants = [
            f"{each.url} wants a key: --key-env" for each in survey.frontends if each.wants_key
        ]
        more = wants or survey.away or ["a frontend named with --url tells what it last knew"]
        raise ConnectError("; ".join([listing, *more]))
    # Instances are called as `trinamo up` calls the processes that they are in.
    names = {str(each.pid): each.name for each in neighbours.processes if each.pid}
    for instance in survey.instances:
        instance.name = names.get(instance.metadata.get("pid", ""), instance.name)
    await ask_instances(survey, asking, views)
    await ask_processes(survey, asking, neighbours.processes)
    for who, view in views:
        _tell_planes(survey, view, servers, who)
    healths = [each.health for each in survey.instances if each.health is not None]
    for key, server in (("control_connected", "etcd"), ("events_connected", "NATS")):
        count = sum(health.get(key) is False for health in healths)
        # With etcd away that is told already.
        if count and not (survey.is_last_known and server == "etcd"):
            survey.away.append(
                f"{count} of {len(healths)} instances have no connection to {server}"
            )
    survey.is_whole = not survey.away
    return survey


def why_away(error: TrinamoError, endpoints: Sequence[str]) -> str:
    if isinstance(error, (ConnectError, DeadlineError)):
        return f"etcd at {','.join(endpoints)} does not answer"
    return error.message


# --- frontends, each asked for itself: how it is, and how it sees the instances ---


def add_listed(known: list[FrontendLook], listed: Iterable[FrontendEntry]) -> None:
    """Add those that discovery names to those that are known, each once."""
    for entry in listed:
        found = next((each for each in known if each.status_url == entry.status), None)
        found = found or next(
            (e for e in known if not e.status_url and e.url in (entry.url, entry.status)), None
        )
        if found is None:
            place = urlsplit(entry.status).netloc or entry.id
            found = FrontendLook(place, 0, entry.url, entry.status)
            known.append(found)
        found.status_url = entry.status
        found.host, found.api_url = entry.host, entry.url


async def ask_frontends(found: Iterable[FrontendLook], asking: Asking) -> None:
    """Ask each how it is, all at once."""
    room = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)

    async def ask(look: FrontendLook) -> None:
        # One that shares its port answers there for any of them.
        places = [look.status_url] if look.status_url else []
        if look.is_named and look.url not in places:
            places.append(look.url)
        look.problem = "" if places else "it is starting"
        for url in places:
            key = asking.key if look.is_named and url == look.url else ""
            try:
                async with room:
                    await _ask_frontend(look, url, asking, key)
            except TrinamoError as error:
                look.problem = look.problem or error.message
            else:
                look.problem = ""
                return

    async with open_nursery() as nursery:
        for look in found:
            if not look.is_own:
                nursery.start_soon(ask, look)


async def _ask_frontend(look: FrontendLook, url: str, asking: Asking, key: str) -> None:
    ask = partial(asking.fetch, timeout_s=asking.timeout_s, bytes_max=VIEW_BYTES_MAX, key=key)
    code, body = await ask(f"{url}/status")
    # How it is it tells all, also where what it knows is for those with a key.
    look.wants_key = code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    health: Any = await fetch_json(
        asking.fetch, f"{url}/health", timeout_s=asking.timeout_s, bytes_max=VIEW_BYTES_MAX
    )
    try:
        if code == HTTPStatus.OK:
            look.view = msgspec.json.decode(body, type=FrontendView)
        if asking.wants_requests and look.status_url == url:
            code, body = await ask(f"{url}/requests")
            if code == HTTPStatus.OK:
                look.requests = msgspec.json.decode(body, type=RequestsView)
    except UNDECODABLE as error:
        raise RemoteProtocolError(
            f"{url} is no frontend of this version: {decoding_fault(error)}"
        ) from error
    if not isinstance(health, dict) or "status" not in health:
        raise RemoteProtocolError(f"{url} is no frontend of this version")
    look.health, look.status = health, str(health["status"])
    in_flight = health.get("in_flight")
    look.in_flight = in_flight if isinstance(in_flight, int) else None


def tell_frontends(survey: Survey) -> list[View]:
    """Which frontends do not answer; what the others know, the one that looks first."""
    found = sorted(survey.frontends, key=lambda each: not each.is_own)
    for each in found:
        if each.problem:
            where = f"{each.api_url or each.url}{f' on {each.host}' if each.host else ''}"
            survey.away.append(f"{each.name} at {where} does not answer: {each.problem}")
    if found:
        first = found[0]
        survey.frontend = {
            "url": first.url,
            "status": first.status,
            "in_flight": first.in_flight,
        }
        if first.problem:
            survey.frontend["problem"] = first.problem
        if first.view is not None and first.view.cluster is not None:
            survey.frontend["control"] = msgspec.to_builtins(first.view.cluster.control)
            survey.frontend["events"] = msgspec.to_builtins(first.view.cluster.events)
    return [
        ("the frontend" if len(found) == 1 else f"frontend {each.name}", each.view)
        for each in found
        if each.view is not None
    ]


def _tell_planes(survey: Survey, view: FrontendView, servers: Sequence[str], who: str) -> None:
    """What a frontend's own connections add to what we have found out; `servers` are those of NATS."""
    if view.status in ("waiting", "unavailable"):
        survey.away.append(
            f"{who} knows no live instance: requests wait for one for http.queue_timeout_s, if at"
            " all, and are a 503 then"
        )
    if view.cluster is None:
        return
    control, events = view.cluster.control, view.cluster.events
    states = [each.state for each in view.cluster.instances if each.state != GONE]
    if count := states.count(InstanceStatus.STALE):
        survey.away.append(
            f"{count} of {len(states)} instances are no longer in etcd; {who} keeps them "
            "for a while, because they answer"
        )
    if control is not None and not control.is_connected and not survey.is_last_known:
        survey.away.append(f"{who} has no answer from etcd; it goes by what it last knew")
    if events is not None and not events.is_connected:
        survey.away.append(
            f"NATS at {','.join(servers)} does not answer {who}: {events.waiting_messages} messages "
            f"wait in it, {events.dropped_outgoing} were dropped"
        )


def _take_last_known(survey: Survey, view: FrontendView, why: str, last: Listing | None) -> None:
    """Take instances and models from what a frontend knows, as etcd is away: `why`.

    Of those that no frontend asks, such as prefill workers, what discovery said in `last` is all
    there is. A frontend before upstreams, and one with engines of its own, have no etcd that could
    be away.
    """
    known = view.cluster
    control = known.control if known is not None else None
    survey.is_last_known = control is not None
    if control is not None and control.is_connected:
        survey.away.append(f"{why} from here; this is what the frontend knows")
    elif control is not None:
        survey.away.append(
            f"{why}; this is what the frontend last knew, {control.silence_s:.0f} s ago"
        )
    # Those that are gone are added by `ask_instances`.
    seen = [each for each in (known.instances if known is not None else ()) if each.state != GONE]
    listed = {(each.endpoint, each.id): each for each in last.instances} if last is not None else {}
    for each in seen:
        look = _last_known(each)
        if (before := listed.get((each.endpoint, each.id))) is not None:
            look.lease_id, look.is_draining = before.lease_id, before.is_draining
        survey.instances.append(look)
    asked = {each.endpoint for each in seen} | {each.endpoint for each in view.models}
    survey.instances += [
        attrs.evolve(each, health=None, problem="", seen="", in_flight=None, unreached=[])
        for each in listed.values()
        if each.endpoint not in asked
    ]
    counts = Counter(each.model for each in seen)
    survey.models = [
        ModelLook(
            each.name,
            each.endpoint,
            each.engine,
            each.context_tokens_max,
            registered=counts[each.name],
            refused=each.refused_cards,
            aliases=each.aliases,
        )
        for each in view.models
    ]
    if known is not None and known.instances_left_out:
        survey.away.append(f"{known.instances_left_out} more instances are not listed")


def _last_known(each: InstanceView) -> InstanceLook:
    return InstanceLook(
        endpoint=each.endpoint,
        id=each.id,
        lease_id="",
        incarnation=each.incarnation,
        is_draining=False,
        transports=dict(each.transports),
        metadata={"model": each.model, "engine": each.engine, **each.metadata},
        seen=each.state,
        problem=_problem_of(each),
        name=each.transports.get("http", ""),
    )


def _problem_of(each: InstanceView) -> str:
    """Why an instance that is not asked itself serves nothing; empty if it does."""
    if each.state == GONE:
        ago = f"{each.gone_s / 60:.0f} min" if each.gone_s >= 90 else f"{each.gone_s:.0f} s"
        return f"it left {ago} ago without draining: it was killed, hangs, or lost its network"
    return AWAY_PROBLEM if each.state == AWAY else ""


# --- instances, each asked at the status port that it tells, and dialled ---


async def ask_instances(survey: Survey, asking: Asking, views: Sequence[View] = ()) -> None:
    """Ask each instance how it is; count and tell those that do not answer, or are not reached.

    How frontends see an instance counts whatever it says of itself: requests go by that.
    """
    known = [
        (who, each)
        for who, view in views
        for each in (view.cluster.instances if view.cluster is not None else ())
    ]
    looks = {(each.endpoint, each.id): each for each in survey.instances}
    for _, each in known:
        # Discovery does not name those that have left, or upstreams that never said what they serve.
        if each.state in (AWAY, GONE) and (each.endpoint, each.id) not in looks:
            look = looks[each.endpoint, each.id] = _last_known(each)
            survey.instances.append(look)
    named = [each for each in survey.instances if each.seen != GONE]
    await _ask_each(named[: asking.asked_max], asking)
    for who, each in known:
        if each.state != GONE and (seen := looks.get((each.endpoint, each.id))) is not None:
            seen.in_flight = (seen.in_flight or 0) + each.in_flight
            seen.active = each.active if seen.active is None else seen.active
            seen.kv_used = each.kv_used if seen.kv_used is None else seen.kv_used
            if each.state in LOST:
                seen.seen = each.state
                address = seen.transports.get("tcp", "")
                is_named = address and each.state == InstanceStatus.UNREACHED
                place = f" at {address}" if is_named else ""
                seen.unreached.append(f"{who} {LOST[each.state]}{place}")
            elif seen.seen not in LOST and seen.health is None and not seen.problem:
                # It was not asked, as an upstream, which has no port for it, so the frontend's word counts.
                seen.seen = each.state
                seen.problem = AWAY_PROBLEM if each.state == AWAY else seen.problem
    _tell_instances(survey)


async def _ask_each(instances: Sequence[InstanceLook], asking: Asking) -> None:
    """Ask each that has a status port, and dial it; one port, of whatever endpoints, is asked once."""
    room = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)

    async def ask(url: str, looks: list[InstanceLook]) -> None:
        async with room:
            try:
                health = await fetch_facts(asking.fetch, url, asking.timeout_s)
            except TrinamoError as error:
                for look in looks:
                    look.problem = error.message
                return
        for look in looks:
            look.health = health

    async def dial(address: str, looks: list[InstanceLook]) -> None:
        assert asking.dial is not None
        async with room:
            why = await asking.dial(address, looks[0].id)
        for look in looks if why else ():
            look.unreached.append(why)

    async with open_nursery() as nursery:
        for url, looks in _grouped(instances, lambda each: each.metadata.get("status")):
            nursery.start_soon(ask, url, looks)
        if asking.dial is not None:
            for address, looks in _grouped(instances, lambda each: each.transports.get("tcp")):
                nursery.start_soon(dial, address, looks)


def _grouped(
    instances: Sequence[InstanceLook], place: Callable[[InstanceLook], str | None]
) -> Iterable[tuple[str, list[InstanceLook]]]:
    found: dict[str, list[InstanceLook]] = {}
    for each in instances:
        if where := place(each):
            found.setdefault(where, []).append(each)
    return found.items()


async def fetch_facts(fetch: Fetch, url: str, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    answer = await fetch_json(
        fetch, f"{url}/health", timeout_s=timeout_s, bytes_max=FACTS_BYTES_MAX
    )
    return answer if isinstance(answer, dict) else {}


def _tell_instances(survey: Survey) -> None:
    """Who does not answer; a cluster without anybody who could is no whole one either."""
    silent = [each for each in survey.instances if each.problem or each.unreached]
    for each in silent:
        reasons = filter(None, [each.problem, *each.unreached])
        each.problem = "; ".join(dict.fromkeys(reasons))
    for each in silent[:TOLD_MAX]:
        host = each.metadata.get("host")
        who = f"instance {each.id} of {each.endpoint}" + (f" on {host}" if host else "")
        named = f"{each.name}, {who}," if each.name else who
        # One that answers us is away all the same if no request comes to it.
        what = f"{named} does not answer" if each.health is None else named.rstrip(",")
        if each.seen == GONE:
            what = f"gone: {named.rstrip(',')}"
        survey.away.append(f"{what}: {each.problem}")
    if len(silent) > TOLD_MAX:
        survey.away.append(f"{len(silent) - TOLD_MAX} more instances do not answer")
    if survey.etcd and all(each.seen == GONE for each in survey.instances):
        survey.away.append("no instance is registered: no request can be answered")
    # Of each model's instances only those that answer, or were not asked, count as serving it.
    lost = Counter(
        (each.metadata.get("model", ""), each.endpoint)
        for each in survey.instances
        # The cards of those that are gone went with them.
        if (each.problem or each.seen in LOST) and each.seen != GONE
    )
    for model in survey.models:
        model.instances = max(0, model.registered - lost[model.name, model.endpoint])


async def ask_processes(survey: Survey, asking: Asking, processes: Sequence[OwnedProcess]) -> None:
    """Ask the workers that `trinamo up` runs and that discovery does not name."""
    missing: list[str] = []

    async def ask(process: OwnedProcess) -> None:
        """It may not be named at all, or without the port to ask."""
        if any(each.metadata.get("pid") == str(process.pid) for each in survey.instances):
            return
        try:
            health = (
                await fetch_facts(asking.fetch, process.url, asking.timeout_s)
                if process.url and process.pid
                else {}
            )
        except TrinamoError:
            health = {}
        for instance in survey.instances:
            if instance.id == health.get("instance_id"):
                instance.health = health
                instance.lease_id = str(health.get("lease_id", ""))
                instance.metadata["pid"] = str(process.pid)
                instance.name = process.name
                return
        if not survey.is_last_known:
            what = "is not registered" if process.pid else "does not run"
            missing.append(f"{process.name} of `trinamo up` {what}; its log says why")

    async with open_nursery() as nursery:
        for process in processes:
            if process.is_worker:
                nursery.start_soon(ask, process)
    survey.away += sorted(missing)
