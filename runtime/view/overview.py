"""What one process knows of its cluster at this moment, without asking anybody.

A frontend answers `/status` with it (`FrontendView`), so that `trinamo status` can say something
while etcd or NATS is away. On the port of the API it names no address and no process, because
whoever may ask a frontend for an answer may ask for this too; on the status port it does. The
states are those of `protocol/discovery/instances.py`, the counts those of `planes/control.py`, `planes/events.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from ..caller.client import Client
from ..caller.record import InstanceStatus
from ..caller.router import Router
from ..planes import (
    ControlPlane,
    ControlStatistics,
    CountsControl,
    CountsEvents,
    EventPlane,
    EventStatistics,
)
from ..protocol.discovery.instances import Instance

PREFIX: Final = "/dashboard"
"""Where the page is."""
AWAY: Final = "away"
"""The state of an upstream that fails its looks: it is given nothing new, and shown all the same."""
INSTANCES_MAX: Final = 1024
MODELS_MAX: Final = 1024
TEXTS_MAX: Final = 16
TEXT_CHARACTERS_MAX: Final = 128
"""Of a value that another process registered."""


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as this process sees it."""

    endpoint: str
    id: str
    state: str
    """An `InstanceStatus`, such as `live`, `draining` or `gone`; or `AWAY`."""
    in_flight: int
    """This process's own requests under way to it."""
    incarnation: int
    model: str = ""
    engine: str = ""
    gone_s: float = 0.0
    """For how long it has been `gone`, in seconds."""
    active: int | None = None
    """Requests that it said are running or waiting there, whoever sent them; None if it has not."""
    kv_used: float | None = None
    """The fraction of its KV cache that it said is in use."""
    transports: dict[str, str] = {}
    """Where it is registered; empty for those who are no operators."""
    metadata: dict[str, str] = {}
    """What it says of itself to people, likewise."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The planes and the live sets of one process."""

    control: ControlStatistics | None
    """None if the plane does not count, as in memory."""
    events: EventStatistics | None
    instances: list[InstanceView]
    """Endpoint by endpoint, at most `INSTANCES_MAX`."""
    instances_left_out: int = 0
    settings: dict[str, Any] = {}
    """What is in force of those that change while it runs; empty if it follows none."""


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model that a frontend offers; what its card says, as far as it has one."""

    name: str
    aliases: list[str] = []
    """Other names that requests may use."""
    endpoint: str = ""
    engine: str = ""
    context_tokens_max: int = 0
    refused_cards: int = 0
    """Workers that are not asked, because their cards contradict the one in force."""


class FrontendView(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend answers at `/status`."""

    status: str
    """`ready`; without a live instance of any model `waiting`, then `unavailable`; or `draining`."""
    in_flight: int
    """Requests of its clients that are being answered."""
    waiting: int = 0
    """Requests that wait for a place (`http.queue_max`)."""
    models: list[ModelView]
    """At most `MODELS_MAX`, the oldest first."""
    cluster: Overview | None = None
    """None for a service without a runtime under it."""


class HasPlanes(Protocol):
    """A process with its planes; `Runtime` is one."""

    @property
    def control(self) -> ControlPlane: ...

    @property
    def events(self) -> EventPlane: ...

    @property
    def clients(self) -> Iterable[Client]: ...


def overview(
    process: HasPlanes,
    unknown: Sequence[InstanceView] = (),
    away: Container[str] = (),
) -> Overview:
    """What `process` and its clients know now; some microseconds an instance.

    `unknown` are those that no client knows, and `away` the ids of those that do not answer.
    Synchronous and bounded.
    """
    control, events = process.control, process.events
    routers = [client.router for client in process.clients]
    total = len(unknown) + sum(
        router.instance_count + sum(1 for _ in router.gone()) for router in routers
    )
    known = (view for router in routers for view in _views(router, away))
    views = [*islice(chain(unknown, known), INSTANCES_MAX)]
    return Overview(
        control=control.statistics() if isinstance(control, CountsControl) else None,
        events=events.statistics() if isinstance(events, CountsEvents) else None,
        instances=views,
        instances_left_out=total - len(views),
    )


def _views(router: Router, away: Container[str]) -> Iterator[InstanceView]:
    for instance, status, in_flight in router.statuses():
        report = router.report(instance.id)
        yield replace(
            _view(instance, AWAY if instance.id in away else status.value),
            in_flight=in_flight,
            active=None if report is None else report.active,
            kv_used=(
                report.blocks_used / report.blocks_total
                if report is not None and report.blocks_total
                else None
            ),
        )

    for instance, gone_s in router.gone():
        yield replace(_view(instance, InstanceStatus.GONE.value), gone_s=gone_s)


def _view(instance: Instance, state: str) -> InstanceView:
    return InstanceView(
        endpoint=instance.endpoint,
        id=instance.id,
        state=state,
        in_flight=0,
        incarnation=instance.incarnation,
        model=instance.metadata.get("model", "")[:TEXT_CHARACTERS_MAX],
        engine=instance.metadata.get("engine", "")[:TEXT_CHARACTERS_MAX],
        transports=_cut(instance.transports),
        metadata=_cut(instance.metadata),
    )


def _cut(texts: Mapping[str, str]) -> dict[str, str]:
    few = islice(texts.items(), TEXTS_MAX)
    return {key[:TEXT_CHARACTERS_MAX]: value[:TEXT_CHARACTERS_MAX] for key, value in few}


def for_clients(view: FrontendView) -> FrontendView:
    """The same without what is for operators: addresses, and what processes say of themselves."""
    if view.cluster is None:
        return view
    instances = [replace(each, transports={}, metadata={}) for each in view.cluster.instances]
    return replace(view, cluster=replace(view.cluster, instances=instances))


def describe_planes(process: HasPlanes) -> dict[str, bool]:
    """Whether each plane has its server, for `/health`; planes that do not count are left out."""
    found: dict[str, bool] = {}
    if isinstance(process.control, CountsControl):
        found["control_connected"] = process.control.statistics().is_connected
    if isinstance(process.events, CountsEvents):
        found["events_connected"] = process.events.statistics().is_connected
    return found
