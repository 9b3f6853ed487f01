"""The dashboard of one frontend: looks every second or so while a page is open, and tells all pages.

A look is made and encoded once, however many pages there are. While none is open nobody is asked
anything: only what this process knows anyway is compared with what it knew, every few seconds, so
that the time line of a page that opens later is not empty.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..caller.record import InstanceStatus
from ..config.config import Config
from ..env import Clock
from ..errors import RequestError
from ..http.exchanges import Handler
from ..http.transport import Fetch
from ..traces.ring import ID_CHARACTERS_MAX, ProcessView, Traces, view_requests
from .facts import FrontendFacts
from .looks import Look, Place
from .overview import AWAY, PREFIX, FrontendView, Overview
from .pages import HEADERS, Tabs, file_routes
from .requests import ask_places, legs_view
from .rows import INSTANCES_MAX, role_of
from .snapshot import ClusterSnapshot, Snapshots
from .timeline import Minutes, Seen, Timeline

INTERVAL_S: Final = 1.0
ASKED_PER_S_MAX: Final = 64
"""Processes asked a second, be there ever so many: looks are rarer then."""
IDLE_INTERVAL_S: Final = 2.0
_REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:\-]{{1,{ID_CHARACTERS_MAX}}}\Z")
NOTED_MAX: Final = 4096
PLACES_MAX: Final = 256
_STATES: Final = {
    InstanceStatus.SUSPECTED.value: "connection lost",
    InstanceStatus.UNREACHED.value: "cannot be reached",
    InstanceStatus.STALE.value: "no longer in etcd",
    InstanceStatus.INHIBITED.value: "failed, and is passed over",
    InstanceStatus.FOREIGN.value: "speaks no transport of this frontend",
    AWAY: "does not answer",
}
"""What is wrong with an instance; a live one, and one that drains, is well."""
_ABOUTS: Final = {
    "prefill": "prefill worker",
    "decode": "decode worker",
    "upstream": "upstream",
}
_encode: Final = msgspec.json.Encoder().encode
log = logging.getLogger("trinamo.http")


@attrs.define
class _Instance:
    """What is remembered of an instance, also where discovery names it no more."""

    name: str = ""
    """What people call it, as far as anybody has said."""
    about: str = "worker"
    is_asked: bool = False
    """This frontend asks it, or has asked it."""


class Dashboard:
    """What is served below `/dashboard`; `run` must run for it to show anything."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        *,
        look: Look,
        view: Callable[[], FrontendView],
        facts: Callable[[], FrontendFacts],
        traces: Traces,
        place: Place,
        fetch: Fetch,
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._view, self._own_facts, self._traces, self._place = view, facts, traces, place
        self._look_around = look
        self._addresses = {
            "etcd": list(config.control_plane.etcd.endpoints),
            "NATS": list(config.event_plane.nats.servers),
        }
        self._snapshots = Snapshots()
        self._timeline = Timeline()
        self._minutes = Minutes()
        self._tabs = Tabs()
        self._instances: OrderedDict[str, _Instance] = OrderedDict()
        """By id, the newest `NOTED_MAX`."""
        self._url = self._status_url = ""
        self._places: dict[str, str] = {}
        """Whom to ask for the legs of a request, their names by URL."""
        self._processes: dict[str, str] = {}
        self.handlers: Mapping[tuple[bytes, bytes], Handler] = {
            (b"GET", f"{PREFIX}/events".encode()): self._tabs.serve
        }
        self.routes = [
            *file_routes(PREFIX),
            Route(f"{PREFIX}/requests/{{request_id}}", self._tell_request),
        ]

    def serves_at(self, url: str, status_url: str = "") -> None:
        self._url, self._status_url = url, status_url

    def facts(self) -> FrontendFacts:
        """What this frontend says of itself, with what it has noted of the last minutes."""
        found = self._own_facts()
        self._minutes.note(self._clock.wall(), found)
        return msgspec.structs.replace(found, minutes=list(self._minutes.rows))

    def processes(self) -> Mapping[str, str]:
        """The others' status ports as of the last look, by instance id; frontends by name and pid."""
        return self._processes

    async def run(self) -> None:
        """Look while somebody looks at it, until cancelled."""
        while True:
            if not await self._tabs.wait_any(IDLE_INTERVAL_S):
                self.facts()
                self._observe_own(self._view().cluster, {})
                continue
            began, pause_s = trio.current_time(), INTERVAL_S
            try:
                snapshot = await self._look()
                pause_s = snapshot.interval_s
                data = snapshot.number, _encode(snapshot)
                self._tabs.send(b"event: snapshot\nid: %d\ndata: %b\n\n" % data)
            except* Exception as errors:
                # A mistake in what is only shown must not end who answers requests.
                log.exception("the dashboard's look has failed", exc_info=errors)
            await trio.sleep_until(began + pause_s)

    async def _look(self) -> ClusterSnapshot:
        survey = await self._look_around(self._url, self._status_url)
        own = next(each for each in survey.frontends if each.is_own)
        own.health = msgspec.to_builtins(self.facts())
        own.requests = view_requests(self._traces)
        # All of a look: instances that no frontend asks, such as prefill workers, too.
        problems = {}
        for each in survey.instances:
            noted = self._noted(each.id)
            noted.about = _ABOUTS.get(role_of(each), "worker")
            noted.name = each.name or noted.name
            each.name = noted.name or each.id[:8]
            if each.problem:
                problems[each.id] = "does not answer"
        self._observe_own(self._view().cluster, problems)
        others = {
            each.id: Seen(each.name, problems.get(each.id, ""), noted.about)
            for each in survey.instances
            if not (noted := self._noted(each.id)).is_asked
        }
        frontends = {
            f"{each.name} {each.pid}": Seen(
                each.name, "does not answer" if each.problem else "", "frontend"
            )
            for each in survey.frontends
        }
        wall = self._clock.wall()
        self._timeline.observe("others", wall, others)
        self._timeline.observe("frontends", wall, frontends)
        self._places = dict(list(survey.places().items())[:PLACES_MAX])
        self._processes = {
            **{each.id: each.metadata.get("status", "") for each in survey.instances},
            **{f"{each.name} {each.pid}": each.status_url for each in survey.frontends},
        }
        asked = len(survey.frontends) + min(len(survey.instances), INSTANCES_MAX)
        return self._snapshots.make(
            survey,
            self._view().cluster,
            self._addresses,
            self._timeline.events,
            interval_s=interval_s(asked),
            now_s=self._clock.now(),
            wall=self._clock.wall(),
        )

    # --- what has happened ---

    def _observe_own(self, known: Overview | None, problems: Mapping[str, str]) -> None:
        """What this process knows without asking; `problems` are those of instances, by id."""
        if known is None:
            return
        wall = self._clock.wall()
        control, events = known.control, known.events
        servers = {}
        if control is not None:
            state = "" if control.is_connected else "does not answer"
            servers["etcd"] = Seen("etcd", state, "control plane", control.stream_losses)
        if events is not None:
            state = "" if events.is_connected else "does not answer"
            servers["NATS"] = Seen("NATS", state, "event plane", events.connections)
        self._timeline.observe("servers", wall, servers)
        seen: dict[str, Seen] = {}
        for each in known.instances:
            noted = self._noted(each.id)
            noted.is_asked = True
            if each.state == InstanceStatus.GONE.value:
                continue  # It has left, and is only named for some minutes more.
            state = _STATES.get(each.state, "") or problems.get(each.id, "")
            before = seen.get(each.id)
            if before is None or not before.state:
                seen[each.id] = Seen(noted.name or each.id[:8], state, noted.about)
        self._timeline.observe("answering", wall, seen)

    def _noted(self, instance_id: str) -> _Instance:
        found = self._instances.setdefault(instance_id, _Instance())
        self._instances.move_to_end(instance_id)
        if len(self._instances) > NOTED_MAX:
            self._instances.popitem(last=False)
        return found

    # --- one request ---

    async def _tell_request(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        if not _REQUEST_ID.match(request_id):
            raise RequestError("this is no id of a request")
        found, away = await ask_places(
            self._fetch, f"/traces/{request_id}", ProcessView, self._places
        )
        own = (self._place.name, self._traces.find(request_id))
        view = legs_view(request_id, [own, *found], away, self._clock.wall())
        return Response(
            _encode(view),
            media_type="application/json",
            headers={**HEADERS, "cache-control": "no-store"},
        )


def interval_s(asked: int) -> float:
    """From one look to the next, of a cluster in which a look asks so many processes."""
    return max(INTERVAL_S, asked / ASKED_PER_S_MAX)
