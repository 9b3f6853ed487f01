"""One look at the cluster from inside a frontend: its own planes, and questions to the others.

It is the look of `trinamo status` (`survey/survey.py`), with shorter patience: a page waits for the slowest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import attrs
import trio

from ...config.config import Config
from ...errors import DeadlineError, TrinamoError
from ...planes import ControlPlane
from ...traces.requests import RequestsView
from ..survey.frontends import FrontendLook
from ..survey.instances import Asking
from ..survey.listing import Listing, read_listing
from ..survey.overview import FrontendView
from ..survey.survey import Neighbours, Survey, survey_around, why_away

ETCD_TIMEOUT_S: Final = 0.8
ASK_TIMEOUT_S: Final = 0.8
INSTANCES_MAX: Final = 256
"""Asked and shown: who looks again and again must not keep a frontend of a large cluster busy with it."""


@attrs.frozen
class Place:
    """Where a frontend stands."""

    name: str = "frontend"
    pid: int = 0
    find_neighbours: Callable[[], Neighbours] = Neighbours
    """Must not wait; asked once a look. It tells no secret."""


@attrs.define
class Look:
    """What was found."""

    survey: Survey

    @property
    def requests(self) -> list[tuple[str, RequestsView]]:
        """Of the other frontends, each with its name."""
        found = self.survey.frontends
        return [(each.name, each.requests) for each in found if each.requests is not None]

    @property
    def asked(self) -> int:
        """How many processes were asked for it, about."""
        return len(self.survey.frontends) + min(len(self.survey.instances), INSTANCES_MAX)


class Looks(Protocol):
    """Whoever looks for the dashboard."""

    async def look(self, url: str, status_url: str) -> Look:
        """One look of the frontend that answers there; raises nothing but bugs."""
        ...


class Gatherer:
    """Looks, and remembers what discovery said last."""

    def __init__(
        self, config: Config, control: ControlPlane, view: Callable[[], FrontendView], place: Place
    ) -> None:
        self._config, self._control, self._view, self._place = config, control, view, place
        self._last: Listing | None = None

    async def look(self, url: str, status_url: str) -> Look:
        """See `Looks`; takes at most some seconds."""
        view, neighbours = self._view(), self._place.find_neighbours()
        found = [each for each in neighbours.frontends if each.pid == self._place.pid]
        if not found:
            found = [FrontendLook(self._place.name, self._place.pid, url, status_url)]
            neighbours.frontends += found
        own = found[0]
        own.is_own, own.view, own.status, own.in_flight = True, view, view.status, view.in_flight
        asking = Asking(timeout_s=ASK_TIMEOUT_S, asked_max=INSTANCES_MAX, wants_requests=True)
        servers, last = self._config.event_plane.nats.servers, self._last
        listing = await self._read()
        survey = await survey_around(listing, neighbours, asking, servers=servers, last=last)
        return Look(survey)

    async def _read(self) -> Listing | str:
        """What discovery says, or why it says nothing."""
        try:
            with trio.move_on_after(ETCD_TIMEOUT_S):
                # Kept as it is read: a look adds to what it shows.
                self._last = await read_listing(self._control)
                return self._last.copy()
            raise DeadlineError("too slow")
        except TrinamoError as error:
            return why_away(error, self._config.control_plane.etcd.endpoints)
