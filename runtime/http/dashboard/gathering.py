"""One look at the cluster from inside a frontend: its own planes, and questions to the others.

What is asked is what `trinamo status` asks, with shorter patience: a page waits for the slowest. While
etcd is away, discovery is as it was when it was last read, and the instances are asked all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import attrs
import msgspec
import trio

from ...config.config import Config
from ...errors import DeadlineError, TrinamoError
from ...nurseries import open_nursery
from ...planes import ControlPlane
from ...protocol.undecodable import UNDECODABLE
from ...traces.requests import RequestsView
from ..survey.frontends import FrontendLook, ask_frontends
from ..survey.http_client import fetch
from ..survey.instances import InstanceLook
from ..survey.models import ModelLook
from ..survey.overview import FrontendView
from ..survey.survey import (
    OwnedProcess,
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

ETCD_TIMEOUT_S: Final = 0.8
ASK_TIMEOUT_S: Final = 0.8
REQUESTS_BYTES_MAX: Final = 1 << 20
INSTANCES_MAX: Final = 256
"""Asked and shown: who looks again and again must not keep a frontend of a large cluster busy with it."""


@attrs.define
class Neighbours:
    """What whoever started a frontend has written down of the cluster around it."""

    cluster: dict[str, Any] | None = None
    """See `Survey.cluster`."""
    frontends: list[FrontendLook] = attrs.field(factory=list)
    """Those on the same port, this one included."""
    processes: Sequence[OwnedProcess] = ()


def alone() -> Neighbours:
    """Nobody has written anything down."""
    return Neighbours()


@attrs.frozen
class Place:
    """Where a frontend stands."""

    name: str = "frontend"
    pid: int = 0
    find_neighbours: Callable[[], Neighbours] = alone
    """Must not wait; asked once a look. It tells no secret."""


@attrs.define
class Look:
    """What was found."""

    survey: Survey
    neighbours: Neighbours
    requests: list[tuple[str, RequestsView]] = attrs.field(factory=list)
    """Of the other frontends, each with its name."""

    @property
    def asked(self) -> int:
        """How many processes were asked for it, about."""
        return len(self.survey.frontends) + min(len(self.survey.instances), INSTANCES_MAX)


class Looks(Protocol):
    """Whoever looks for the dashboard."""

    async def look(self, url: str) -> Look:
        """One look of the frontend that answers at `url`; raises nothing but bugs."""
        ...


@attrs.define
class _Discovered:
    instances: list[InstanceLook]
    models: list[ModelLook]
    refused: list[str]


class Gatherer:
    """Looks, and remembers what discovery said last."""

    def __init__(
        self, config: Config, control: ControlPlane, view: Callable[[], FrontendView], place: Place
    ) -> None:
        self._config, self._control, self._view, self._place = config, control, view, place
        self._last: _Discovered | None = None

    async def look(self, url: str) -> Look:
        """See `Looks`; takes at most some seconds."""
        view, neighbours = self._view(), self._place.find_neighbours()
        survey = Survey(etcd="", cluster=neighbours.cluster, frontend=None)
        take_view(survey, url, view)
        survey.frontends = neighbours.frontends
        look = Look(survey, neighbours)
        others = [each for each in survey.frontends if each.pid != self._place.pid]
        async with open_nursery() as nursery:
            nursery.start_soon(self._discover, survey, view)
            nursery.start_soon(ask_frontends, others, ASK_TIMEOUT_S)
            for each in others:
                nursery.start_soon(_ask_requests, each, look.requests)
        tell_frontends(survey)
        name_instances(survey, neighbours.processes)
        await ask_instances(survey, view, timeout_s=ASK_TIMEOUT_S, asked_max=INSTANCES_MAX)
        await ask_processes(survey, neighbours.processes)
        tell_planes(survey, view, self._config.event_plane.nats.servers)
        tell_workers(survey)
        return look

    async def _discover(self, survey: Survey, view: FrontendView) -> None:
        endpoints = self._config.control_plane.etcd.endpoints
        try:
            with trio.move_on_after(ETCD_TIMEOUT_S) as scope:
                await discover(self._control, survey)
            if scope.cancelled_caught:
                raise DeadlineError("too slow")
        except TrinamoError as error:
            take_last_known(survey, view, why_away(error, endpoints))
            if self._last is not None:
                # What the frontend knows is no more than this, and has no address to ask.
                survey.instances = [_unasked(each) for each in self._last.instances]
                survey.models = [copy.copy(each) for each in self._last.models]
                survey.refused = list(self._last.refused)
            return
        self._last = _Discovered(survey.instances, survey.models, survey.refused)


def _unasked(instance: InstanceLook) -> InstanceLook:
    return attrs.evolve(instance, health=None, problem="", seen="", in_flight=None)


async def _ask_requests(frontend: FrontendLook, found: list[tuple[str, RequestsView]]) -> None:
    if not frontend.status_url:
        return
    try:
        status, body = await fetch(
            f"{frontend.status_url}/requests",
            timeout_s=ASK_TIMEOUT_S,
            bytes_max=REQUESTS_BYTES_MAX,
        )
        if status == 200:
            found.append((frontend.name, msgspec.json.decode(body, type=RequestsView)))
    except (TrinamoError, *UNDECODABLE):
        # That it is away, its health says.
        return
