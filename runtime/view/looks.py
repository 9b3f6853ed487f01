"""Who looks for the page: a frontend at its cluster, or one process at the engines in it.

It is the look of `trinamo status` (`survey.py`), with shorter patience: a page waits for the
slowest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import attrs
import trio

from ..config.config import Config
from ..engines.generation import GenerationEngine
from ..errors import DeadlineError, TrinamoError
from ..http.transport import Fetch
from ..planes import ControlPlane
from .facts import worker_facts
from .listing import InstanceLook, Listing, ModelLook, read_listing
from .overview import FrontendView
from .rows import INSTANCES_MAX
from .survey import Asking, FrontendLook, Neighbours, Survey, survey_around, why_away

ETCD_TIMEOUT_S: Final = 0.8
ASK_TIMEOUT_S: Final = 0.8
Look = Callable[[str, str], Awaitable[Survey]]
"""One look of the frontend that answers at this URL, and at that of its status port.

It takes some seconds at most, and raises nothing but bugs; one of `Survey.frontends` is the one
that looks."""


@attrs.frozen
class Place:
    """Where a frontend stands."""

    name: str = "frontend"
    pid: int = 0
    find_neighbours: Callable[[], Neighbours] = Neighbours
    """Must not wait; asked once a look. It tells no secret."""
    host: str = ""
    """The name of its machine, for people."""


@attrs.define(eq=False)
class Gatherer:
    """Looks at a cluster, and remembers what discovery said last."""

    _config: Config
    _control: ControlPlane
    _view: Callable[[], FrontendView]
    _place: Place
    _fetch: Fetch
    _last: Listing | None = None

    async def look(self, url: str, status_url: str) -> Survey:
        view, neighbours = self._view(), self._place.find_neighbours()
        found = [each for each in neighbours.frontends if each.pid == self._place.pid]
        if not found:
            found = [FrontendLook(self._place.name, self._place.pid, url, status_url)]
            neighbours.frontends += found
        own = found[0]
        own.host = self._place.host
        own.is_own, own.view, own.status, own.in_flight = True, view, view.status, view.in_flight
        asking = Asking(
            self._fetch, timeout_s=ASK_TIMEOUT_S, asked_max=INSTANCES_MAX, wants_requests=True
        )
        servers, last = self._config.event_plane.nats.servers, self._last
        endpoints = self._config.control_plane.etcd.endpoints
        listing: Listing | str = why_away(DeadlineError("too slow"), endpoints)
        try:
            with trio.move_on_after(ETCD_TIMEOUT_S):
                # Kept as it is read: a look adds to what it shows.
                self._last = await read_listing(self._control)
                listing = self._last.copy()
        except TrinamoError as error:
            listing = why_away(error, endpoints)
        return await survey_around(listing, neighbours, asking, servers=servers, last=last)


async def look_at_engines(
    view: Callable[[], FrontendView],
    engines: Sequence[GenerationEngine],
    url: str,
    status_url: str,
) -> Survey:
    """See `Look`: each of `engines` is an instance that is called as its model. Nobody is asked."""
    known, where = view(), "in this process"
    survey = Survey(etcd="", cluster=None, frontend=None)
    survey.frontends.append(
        FrontendLook("this process", 0, url, status_url, known.status, view=known, is_own=True)
    )
    for engine in engines:
        info, facts = engine.info, worker_facts([engine], {}, None)
        statistics = facts["engines"][info.model]
        survey.instances.append(
            InstanceLook(
                endpoint=where,
                id=info.model,
                lease_id="",
                incarnation=1,
                is_draining=False,
                transports={},
                metadata={"model": info.model, "engine": info.engine},
                health={
                    "status": "ready",
                    "active": statistics["running"] + statistics["waiting"],
                    **facts,
                },
                name=info.model,
            )
        )
        survey.models.append(
            ModelLook(
                info.model, where, info.engine, info.context_tokens_max, registered=1, instances=1
            )
        )
    return survey
