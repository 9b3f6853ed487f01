"""One look at a cluster: what discovery says, what its processes say of themselves, and who is away.

While etcd is away, discovery is what a frontend last knew of it (`overview.py`); a plane that is away
is one sentence in `Survey.away`. Who looks brings the control plane: the command line opens one of
its own, a frontend has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
import msgspec

from ...caller.record import InstanceStatus
from ...errors import ConnectError, DeadlineError, TrinamoError
from ...nurseries import open_nursery
from ...planes import ControlPlane
from ...protocol.discovery.instances import INSTANCE_PREFIX, decode_instance
from ...protocol.discovery.model_cards import MODEL_PREFIX
from .frontends import FrontendLook
from .instances import ASK_TIMEOUT_S, InstanceLook, ask_each, fetch_facts, instance_look
from .models import ModelLook, look_at_models
from .overview import AWAY, FrontendView, InstanceView

AWAY_PROBLEM: Final = "the upstream fails its looks; the frontend's log says why"
LOST: Final[Mapping[str, str]] = {
    InstanceStatus.SUSPECTED: "the frontend has lost its connection to it",
    InstanceStatus.UNREACHED: "the frontend cannot reach it where it is registered",
}
"""States in which no request goes to an instance, and what is wrong."""
TOLD_MAX: Final = 16
"""Sentences of one kind; the others are counted."""


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
    is_whole: bool = False
    """Whether the frontend needs no etcd, so that what it knows is all there is."""
    frontends: list[FrontendLook] = attrs.field(factory=list)
    """Those that share a port with others; empty if none does."""
    instances: list[InstanceLook] = attrs.field(factory=list)
    models: list[ModelLook] = attrs.field(factory=list)
    refused: list[str] = attrs.field(factory=list)
    """Entries that make no sense, cards that contradict their model's, aliases that are taken."""


async def discover(control: ControlPlane, survey: Survey) -> None:
    """Read instances and models; raises what the control plane does, having changed nothing."""
    etcd = await control.check_health()
    entries = (await control.range(INSTANCE_PREFIX)).entries
    models, refused = look_at_models((await control.range(MODEL_PREFIX)).entries)
    survey.etcd, survey.models = etcd, models
    for entry in entries:
        try:
            instance = decode_instance(entry.key, entry.value)
        except TrinamoError as error:
            survey.refused.append(error.message)
        else:
            survey.instances.append(instance_look(instance, entry))
    survey.refused += refused


def take_view(survey: Survey, url: str, view: FrontendView) -> None:
    """Note what a frontend says of itself and of its connections to the instances."""
    survey.frontend = {"url": url, "status": view.status, "in_flight": view.in_flight}
    if view.cluster is None:
        return
    survey.frontend["control"] = msgspec.to_builtins(view.cluster.control)
    survey.frontend["events"] = msgspec.to_builtins(view.cluster.events)


def name_instances(survey: Survey, processes: Sequence[OwnedProcess]) -> None:
    """Call instances as `trinamo up` calls the processes that they are in."""
    names = {str(each.pid): each.name for each in processes if each.pid}
    for instance in survey.instances:
        instance.name = names.get(instance.metadata.get("pid", ""), instance.name)


async def ask_instances(
    survey: Survey,
    view: FrontendView | None = None,
    *,
    timeout_s: float = ASK_TIMEOUT_S,
    asked_max: int | None = None,
) -> None:
    """Ask each instance, or the first `asked_max`, how it is; count and tell those that do not answer.

    One that has no status port, so that it cannot be asked, is away if the frontend of `view` has
    lost its connection to it.
    """
    await ask_each(survey.instances[:asked_max], timeout_s)
    seen = (
        {}
        if view is None or view.cluster is None
        else {(each.endpoint, each.id): each for each in view.cluster.instances}
    )
    _take_away(survey, seen)
    for instance in survey.instances:
        known = seen.get((instance.endpoint, instance.id))
        if known is None:
            continue
        instance.in_flight = known.in_flight
        instance.active, instance.kv_used = known.active, known.kv_used
        if instance.health is None and "status" not in instance.metadata:
            # It has no port to be asked at, as an upstream, so the frontend's word counts.
            instance.seen = known.state
        if known.state in LOST and instance.health is None:
            instance.problem = instance.problem or LOST[known.state]
    _tell_instances(survey)
    _count_instances(survey)


def _take_away(survey: Survey, seen: Mapping[tuple[str, str], InstanceView]) -> None:
    """Upstreams that are offered to nobody: discovery names them no more."""
    named = {(each.endpoint, each.id) for each in survey.instances}
    for key, each in seen.items():
        if each.state == AWAY and key not in named:
            survey.instances.append(_last_known(each))


async def ask_processes(survey: Survey, processes: Sequence[OwnedProcess]) -> None:
    """Ask the workers that `trinamo up` runs and that discovery does not name."""
    missing: list[str] = []
    async with open_nursery() as nursery:
        for process in processes:
            if process.is_worker:
                nursery.start_soon(_ask_process, survey, process, missing)
    survey.away += sorted(missing)


async def _ask_process(survey: Survey, process: OwnedProcess, missing: list[str]) -> None:
    """A worker that `trinamo up` runs: discovery may not name it, or not say which port to ask."""
    if any(each.metadata.get("pid") == str(process.pid) for each in survey.instances):
        return
    try:
        health = await fetch_facts(process.url) if process.url and process.pid else {}
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


def why_away(error: TrinamoError, endpoints: Sequence[str]) -> str:
    """Why etcd tells nothing, in a sentence."""
    if isinstance(error, (ConnectError, DeadlineError)):
        return f"etcd at {','.join(endpoints)} does not answer"
    return error.message


def tell_frontends(survey: Survey) -> None:
    """Which of several frontends on one port do not answer."""
    for each in survey.frontends:
        if each.problem:
            survey.away.append(f"{each.name} at {each.url} does not answer: {each.problem}")


def _last_known(each: InstanceView) -> InstanceLook:
    return InstanceLook(
        endpoint=each.endpoint,
        id=each.id,
        lease_id="",
        incarnation=each.incarnation,
        is_draining=False,
        transports={},
        metadata={"model": each.model, "engine": each.engine},
        seen=each.state,
        in_flight=each.in_flight,
        problem=AWAY_PROBLEM if each.state == AWAY else "",
    )


def take_last_known(survey: Survey, view: FrontendView, why: str) -> None:
    """Take instances and models from what a frontend knows, as etcd is away: `why`.

    A frontend before upstreams, and one with engines of its own, have no etcd that could be away.
    """
    control = view.cluster.control if view.cluster is not None else None
    survey.is_whole = control is None
    survey.is_last_known = not survey.is_whole
    if control is not None and control.is_connected:
        survey.away.append(f"{why} from here; this is what the frontend knows")
    elif control is not None:
        survey.away.append(
            f"{why}; this is what the frontend last knew, {control.silence_s:.0f} s ago"
        )
    survey.etcd = ""
    seen = view.cluster.instances if view.cluster is not None else []
    survey.instances = [_last_known(each) for each in seen]
    counts = Counter(each.model for each in seen if each.state != AWAY)
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


def tell_planes(survey: Survey, view: FrontendView, servers: Sequence[str]) -> None:
    """What the frontend's own connections add to what we have found out; `servers` are those of NATS."""
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
        where = ",".join(servers)
        survey.away.append(
            f"NATS at {where} does not answer the frontend: {events.waiting_messages} messages "
            f"wait in it, {events.dropped_outgoing} were dropped"
        )


def _tell_instances(survey: Survey) -> None:
    """Who does not answer; a cluster without anybody who could is no whole one either."""
    silent = [each for each in survey.instances if each.problem]
    for each in silent[:TOLD_MAX]:
        who = f"instance {each.id} of {each.endpoint}"
        named = f"{each.name}, {who}," if each.name else who
        survey.away.append(f"{named} does not answer: {each.problem}")
    if len(silent) > TOLD_MAX:
        survey.away.append(f"{len(silent) - TOLD_MAX} more instances do not answer")
    if not (survey.instances or survey.is_last_known or survey.is_whole):
        survey.away.append("no instance is registered: no request can be answered")


def _count_instances(survey: Survey) -> None:
    """Of each model's instances only those that answer, or were not asked, count as serving it."""
    silent = Counter(
        (each.metadata.get("model", ""), each.endpoint)
        for each in survey.instances
        # One that is away has taken its cards with it.
        if (each.problem and each.seen != AWAY) or each.seen in LOST
    )
    for model in survey.models:
        model.instances = max(0, model.registered - silent[model.name, model.endpoint])


def tell_workers(survey: Survey) -> None:
    """Whose status ports say that they miss a plane; with etcd away that is told already."""
    healths = [each.health for each in survey.instances if each.health is not None]
    for key, server in (("control_connected", "etcd"), ("events_connected", "NATS")):
        count = sum(health.get(key) is False for health in healths)
        if count and not (survey.is_last_known and server == "etcd"):
            survey.away.append(
                f"{count} of {len(healths)} instances have no connection to {server}"
            )
