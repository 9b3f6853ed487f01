"""One look at a cluster: what discovery says, and what the processes say of themselves.

While etcd is away, discovery is what the frontend last knew of it (`/status`, described in
`trinamo/runtime/overview.py`); a plane that is away is one sentence in `Survey.away`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import attrs
import msgspec
import trio

from trinamo.runtime.caller.record import InstanceStatus
from trinamo.runtime.errors import (
    ConfigError,
    ConnectError,
    DeadlineError,
    RemoteProtocolError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.http.overview import FrontendView
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import ControlPlane, Entry
from trinamo.runtime.protocol.discovery.instances import (
    INSTANCE_PREFIX,
    Instance,
    decode_instance,
)
from trinamo.runtime.protocol.discovery.model_cards import MODEL_PREFIX
from trinamo.transports.assembly.planes import open_control_plane

from ..running.http_client import fetch_json
from ..running.locating import NOTHING_RUNS, Target, somebody_listens
from ..running.run_file import ProcessEntry
from .frontends import FrontendLook, look_at_frontends
from .models import ModelLook, look_at_models

__all__ = [
    "InstanceLook",
    "Survey",
    "ask_instances",
    "ask_processes",
    "survey_cluster",
]

ASK_TIMEOUT_S: Final = 1.5
ETCD_TIMEOUT_S: Final = 3.0
"""Longer than the choice of a new leader takes."""
ASKED_AT_ONCE_MAX: Final = 64
ANSWER_BYTES_MAX: Final = 256 << 10
"""Of a status port, whose address any process may have registered."""
TOLD_MAX: Final = 16
"""Sentences of one kind; the others are counted."""


@attrs.define
class InstanceLook:
    """One instance; `health` is what its status port says, `problem` why it says nothing."""

    endpoint: str
    id: str
    lease_id: str
    incarnation: int
    is_draining: bool
    transports: dict[str, str]
    metadata: dict[str, str]
    health: dict[str, Any] | None = None
    problem: str = ""
    seen: str = ""
    """How the frontend sees it, if it is asked instead of etcd."""
    in_flight: int | None = None
    """The frontend's requests under way to it, if it is asked."""


@attrs.define
class Survey:
    """The cluster as it is now, or as its frontend last knew it."""

    etcd: str
    """What etcd says of itself; empty if it does not answer."""
    cluster: dict[str, Any] | None
    """What `trinamo up` wrote about it; None for a cluster started otherwise."""
    frontend: dict[str, Any] | None
    """The frontend's own words; None if there is none that we know of."""
    away: list[str] = attrs.field(factory=list)
    """What does not answer, one sentence each; empty if the cluster is whole."""
    is_last_known: bool = False
    """Whether instances and models are what the frontend last knew of them."""
    frontends: list[FrontendLook] = attrs.field(factory=list)
    """Those that share a port with others; empty if none does."""
    instances: list[InstanceLook] = attrs.field(factory=list)
    models: list[ModelLook] = attrs.field(factory=list)
    refused: list[str] = attrs.field(factory=list)
    """Entries that make no sense, cards that contradict their model's, aliases that are taken."""


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
        survey.cluster = {"pid": run.pid, "state": run.state, "url": run.url, "engine": run.engine}
        survey.cluster["nats"] = list(run.nats)
        url = url or run.url
    view = await _ask_frontend(survey, url) if url else None
    survey.frontends = await look_at_frontends(target, url)
    for each in survey.frontends:
        if each.problem:
            survey.away.append(f"{each.name} at {each.url} does not answer: {each.problem}")
    await _ask_etcd(survey, target, view)
    await ask_instances(survey)
    await ask_processes(survey, () if run is None else run.processes)
    if view is not None:
        _tell_planes(survey, view, target)
    _tell_workers(survey)
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
            await _discover(control, survey)
    except ConfigError:
        raise
    except TrinamoError as error:
        if view is not None:
            _take_last_known(survey, view, _why_away(error, section.endpoints))
        else:
            more = survey.away or ["a frontend named with --url tells what it last knew"]
            raise UnavailableError("; ".join([error.message, *more])) from error


async def _does_listen(endpoints: tuple[str, ...]) -> bool:
    for endpoint in endpoints:
        if await somebody_listens(endpoint):
            return True
    return False


async def _discover(control: ControlPlane, survey: Survey) -> None:
    survey.etcd = await control.check_health()
    for entry in (await control.range(INSTANCE_PREFIX)).entries:
        try:
            instance = decode_instance(entry.key, entry.value)
        except TrinamoError as error:
            survey.refused.append(error.message)
        else:
            survey.instances.append(_look(instance, entry))
    survey.models, refused = look_at_models((await control.range(MODEL_PREFIX)).entries)
    survey.refused += refused


def _look(instance: Instance, entry: Entry) -> InstanceLook:
    return InstanceLook(
        endpoint=instance.endpoint,
        id=instance.id,
        lease_id=f"{entry.lease_id:x}",
        incarnation=instance.incarnation,
        is_draining=instance.draining,
        transports=dict(instance.transports),
        metadata=dict(instance.metadata),
    )


async def ask_instances(survey: Survey) -> None:
    """Ask each instance how it is, and count and tell those that do not answer."""
    room = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)
    async with open_nursery() as nursery:
        for instance in survey.instances:
            nursery.start_soon(_ask_instance, instance, room)
    _tell_instances(survey)
    _count_instances(survey)


async def ask_processes(survey: Survey, processes: Sequence[ProcessEntry]) -> None:
    """Ask the workers that `trinamo up` runs and that discovery does not name."""
    missing: list[str] = []
    async with open_nursery() as nursery:
        for process in processes:
            if process.is_worker:
                nursery.start_soon(_ask_process, survey, process, missing)
    survey.away += sorted(missing)


async def _ask_instance(instance: InstanceLook, room: trio.CapacityLimiter) -> None:
    url = instance.metadata.get("status")
    if not url:
        return
    async with room:
        try:
            instance.health = await _ask(f"{url}/health")
        except TrinamoError as error:
            instance.problem = error.message


async def _ask_process(survey: Survey, process: ProcessEntry, missing: list[str]) -> None:
    """A worker that `trinamo up` runs: discovery may not name it, or not say which port to ask."""
    if any(each.metadata.get("pid") == str(process.pid) for each in survey.instances):
        return
    try:
        health = await _ask(f"{process.url}/health") if process.url and process.pid else {}
    except TrinamoError:
        health = {}
    for instance in survey.instances:
        if instance.id == health.get("instance_id"):
            instance.health = health
            instance.lease_id = str(health.get("lease_id", ""))
            instance.metadata["pid"] = str(process.pid)
            return
    if not survey.is_last_known:
        what = "is not registered" if process.pid else "does not run"
        missing.append(f"{process.name} of `trinamo up` {what}; its log says why")


async def _ask_frontend(survey: Survey, url: str) -> FrontendView | None:
    try:
        view = msgspec.convert(
            await fetch_json(f"{url}/status", timeout_s=ASK_TIMEOUT_S), FrontendView
        )
    except (TrinamoError, msgspec.ValidationError) as error:
        if not isinstance(error, TrinamoError):
            error = RemoteProtocolError(f"{url} is no frontend of this version: {error}")
        survey.frontend = {"url": url, "status": "away", "problem": error.message}
        survey.away.append(f"the frontend does not answer: {error.message}")
        return None
    survey.frontend = {"url": url, "status": view.status, "in_flight": view.in_flight}
    if view.cluster is not None:
        survey.frontend["control"] = msgspec.to_builtins(view.cluster.control)
        survey.frontend["events"] = msgspec.to_builtins(view.cluster.events)
    return view


def _why_away(error: TrinamoError, endpoints: tuple[str, ...]) -> str:
    if isinstance(error, (ConnectError, DeadlineError)):
        return f"etcd at {','.join(endpoints)} does not answer"
    return error.message


def _take_last_known(survey: Survey, view: FrontendView, why: str) -> None:
    control = view.cluster.control if view.cluster is not None else None
    if control is not None and control.is_connected:
        survey.away.append(f"{why} from here; this is what the frontend knows")
    else:
        since = "" if control is None else f", {control.silence_s:.0f} s ago"
        survey.away.append(f"{why}; this is what the frontend last knew{since}")
    survey.is_last_known = True
    survey.etcd = ""
    seen = view.cluster.instances if view.cluster is not None else []
    survey.instances = [
        InstanceLook(
            endpoint=each.endpoint,
            id=each.id,
            lease_id="",
            incarnation=each.incarnation,
            is_draining=False,
            transports={},
            metadata={"model": each.model, "engine": each.engine},
            seen=each.state,
            in_flight=each.in_flight,
        )
        for each in seen
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
    if view.cluster is not None and view.cluster.instances_left_out:
        survey.away.append(f"{view.cluster.instances_left_out} more instances are not listed")


def _tell_planes(survey: Survey, view: FrontendView, target: Target) -> None:
    """What the frontend's own connections add to what we have found out."""
    if view.status == "unavailable":
        survey.away.append("the frontend knows no live instance: it answers every request with 503")
    if view.cluster is None:
        return
    control, events = view.cluster.control, view.cluster.events
    states = [each.state for each in view.cluster.instances]
    if count := states.count(InstanceStatus.STALE):
        survey.away.append(
            f"{count} of {len(states)} instances are no longer in etcd; the frontend keeps them "
            "for a while, because they answer"
        )
    if control is not None and not control.is_connected and not survey.is_last_known:
        survey.away.append("the frontend has no answer from etcd; it goes by what it last knew")
    if events is not None and not events.is_connected:
        where = ",".join(target.config.event_plane.nats.servers)
        survey.away.append(
            f"NATS at {where} does not answer the frontend: {events.waiting_messages} messages "
            f"wait in it, {events.dropped_outgoing} were dropped"
        )


def _tell_instances(survey: Survey) -> None:
    """Who does not answer; a cluster without anybody who could is no whole one either."""
    silent = [each for each in survey.instances if each.problem]
    for each in silent[:TOLD_MAX]:
        survey.away.append(f"instance {each.id} of {each.endpoint} does not answer: {each.problem}")
    if len(silent) > TOLD_MAX:
        survey.away.append(f"{len(silent) - TOLD_MAX} more instances do not answer")
    if not survey.instances and not survey.is_last_known:
        survey.away.append("no instance is registered: no request can be answered")


def _count_instances(survey: Survey) -> None:
    """Of each model's instances only those that answer, or were not asked, count as serving it."""
    silent = Counter(
        (each.metadata.get("model", ""), each.endpoint)
        for each in survey.instances
        if each.problem or each.seen == InstanceStatus.SUSPECTED
    )
    for model in survey.models:
        model.instances = max(0, model.registered - silent[model.name, model.endpoint])


def _tell_workers(survey: Survey) -> None:
    """Whose status ports say that they miss a plane; with etcd away that is told already."""
    healths = [each.health for each in survey.instances if each.health is not None]
    for key, server in (("control_connected", "etcd"), ("events_connected", "NATS")):
        count = sum(health.get(key) is False for health in healths)
        if count and not (survey.is_last_known and server == "etcd"):
            survey.away.append(
                f"{count} of {len(healths)} instances have no connection to {server}"
            )


async def _ask(url: str) -> dict[str, Any]:
    answer = await fetch_json(url, timeout_s=ASK_TIMEOUT_S, bytes_max=ANSWER_BYTES_MAX)
    return answer if isinstance(answer, dict) else {}
