"""One look at a cluster: what discovery says, and what the processes say of themselves."""

from __future__ import annotations

from typing import Any, Final

import attrs
import trio

from trinamo.runtime.errors import TrinamoError, UnavailableError
from trinamo.runtime.planes import ControlPlane, Entry
from trinamo.runtime.protocol.instances import INSTANCE_PREFIX, Instance, decode_instance
from trinamo.runtime.protocol.model_cards import MODEL_PREFIX, decode_card

from .http_client import fetch_json
from .locating import NOTHING_RUNS, Target, somebody_listens
from .planes import open_control_plane

__all__ = ["InstanceLook", "ModelLook", "Survey", "survey_cluster"]

ASK_TIMEOUT_S: Final = 1.5


@attrs.define
class InstanceLook:
    """One registered instance; `health` is what its status port says, or why it says nothing."""

    endpoint: str
    id: str
    lease_id: str
    incarnation: int
    is_draining: bool
    transports: dict[str, str]
    metadata: dict[str, str]
    health: dict[str, Any] | None = None
    problem: str = ""


@attrs.define
class ModelLook:
    """One model and how many instances publish it."""

    name: str
    endpoint: str
    engine: str
    context_tokens_max: int
    instances: int = 1


@attrs.define
class Survey:
    """The cluster as it is now."""

    etcd: str
    cluster: dict[str, Any] | None
    """What `trinamo up` wrote about it; None for a cluster started otherwise."""
    frontend: dict[str, Any] | None
    """The frontend's own answer; None if there is none that we know of."""
    instances: list[InstanceLook] = attrs.field(factory=list)
    models: list[ModelLook] = attrs.field(factory=list)
    refused: list[str] = attrs.field(factory=list)
    """Entries that could not be read, one sentence each."""


async def survey_cluster(target: Target) -> Survey:
    """Look; raises `UnavailableError` or `ConnectError` with a sentence if nothing is there."""
    section = target.config.control_plane.etcd
    if (
        target.run is None
        and not target.is_named
        and not await somebody_listens(section.endpoints[0])
    ):
        raise UnavailableError(NOTHING_RUNS)
    async with open_control_plane(section, list(section.endpoints)) as control:
        survey = await _discovered(control, target)
    async with trio.open_nursery() as nursery:
        for instance in survey.instances:
            nursery.start_soon(_ask_instance, instance)
        nursery.start_soon(_ask_frontend, survey)
    return survey


async def _discovered(control: ControlPlane, target: Target) -> Survey:
    run = target.run
    cluster = None
    if run is not None:
        cluster = {"pid": run.pid, "state": run.state, "url": run.url, "engine": run.engine}
        cluster["nats"] = list(run.nats)
    survey = Survey(etcd=await control.check_health(), cluster=cluster, frontend=None)
    for entry in (await control.range(INSTANCE_PREFIX)).entries:
        try:
            instance = decode_instance(entry.key, entry.value)
        except TrinamoError as error:
            survey.refused.append(error.message)
        else:
            survey.instances.append(_look(instance, entry))
    models: dict[str, ModelLook] = {}
    for entry in (await control.range(MODEL_PREFIX)).entries:
        try:
            card = decode_card(entry.key, entry.value)
        except TrinamoError as error:
            survey.refused.append(error.message)
            continue
        if card.name in models:
            models[card.name].instances += 1
        else:
            models[card.name] = ModelLook(
                card.name, card.endpoint, card.engine, card.context_tokens_max
            )
    survey.models = list(models.values())
    return survey


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


async def _ask_instance(instance: InstanceLook) -> None:
    url = instance.metadata.get("status")
    if not url:
        return
    try:
        instance.health = await _ask(f"{url}/health")
    except TrinamoError as error:
        instance.problem = error.message


async def _ask_frontend(survey: Survey) -> None:
    url = survey.cluster["url"] if survey.cluster is not None else ""
    if not url:
        return
    try:
        survey.frontend = {"url": url, **await _ask(f"{url}/health")}
    except TrinamoError as error:
        survey.frontend = {"url": url, "status": "away", "problem": error.message}


async def _ask(url: str) -> dict[str, Any]:
    answer = await fetch_json(url, timeout_s=ASK_TIMEOUT_S)
    return answer if isinstance(answer, dict) else {}
