"""Several routers of one endpoint predict the same load: each tells what it sends and sees end.

Told after the fact and without waiting for anybody, so two routers may send to the same instance in
the same millisecond. The events are numbered (`events/source.py`), so one that was lost leads to a
snapshot of that router's requests, and a router that says nothing for some seconds has none.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import trio

from ...errors import RemoteProtocolError
from ...events.follower import EventFollower
from ...events.source import EventSource, topic_of
from ...nurseries import open_nursery
from ...planes import EventPlane
from ...protocol.discovery.instances import EndpointName
from ...protocol.kv.active import (
    ActiveEvent,
    Began,
    Ended,
    FirstToken,
    decode_active,
    encode_active,
    next_active,
    pack_keys,
    unpack_keys,
)
from .loads import ActiveRequest, PredictedLoads

ACTIVE_TOPIC: Final = "active"
_GATHER_S: Final = 0.001
"""Events of so long go in one message."""
_WAITING_MAX: Final = 8192
_ROUTERS_MAX: Final = 256
_REQUESTS_MAX: Final = 1 << 16
"""Of one other router; no frontend has as many under way."""
BEAT_S: Final = 1.0
SILENT_S: Final = 5.0
"""A router that misses so many beats has ended, and its requests with it."""


class Agreement:
    """Tells other routers of our requests, and counts theirs in `loads`.

    At most `_WAITING_MAX` events wait to be sent; what is beyond goes with all that waits, as a gap,
    which costs every other router one snapshot.
    """

    def __init__(
        self, events: EventPlane, endpoint: EndpointName, router_id: str, loads: PredictedLoads
    ) -> None:
        self._loads = loads
        self._told: dict[int, Began] = {}
        """Our requests, as far as others have been told."""
        self._waiting: deque[ActiveEvent] = deque()
        self._wakeup = trio.Event()
        self._theirs: dict[str, dict[int, None]] = {}
        """The requests of other routers, by router."""
        topic = topic_of(ACTIVE_TOPIC, endpoint)
        self._source = EventSource(
            events,
            topic,
            publisher=router_id,
            incarnation=1,
            snapshot=self._snapshot,
            beat_s=BEAT_S,
        )
        self._follower = EventFollower(
            events,
            topic,
            on_event=self._on_event,
            on_snapshot=self._on_snapshot,
            on_lost=self._forget,
            follows=lambda publisher: publisher != router_id,
            publishers_max=_ROUTERS_MAX,
            # Discovery does not know routers: what one that has ended once said must not count.
            asks_first=True,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell and listen until cancelled."""
        async with open_nursery() as nursery:
            await nursery.start(self._source.run)
            await nursery.start(self._follower.run)
            nursery.start_soon(self._forget_silent)
            task_status.started()
            while True:
                await self._wakeup.wait()
                await trio.sleep(_GATHER_S)
                self._wakeup = trio.Event()
                while self._waiting:
                    batch = next_active(self._waiting)
                    self._take_as_told(batch)
                    await self._source.publish(encode_active(batch))

    @property
    def router_count(self) -> int:
        """Other routers that have told something and are not silent."""
        return len(self._theirs)

    # --- ours ---

    def began(self, number: int, request: ActiveRequest) -> None:
        """We have sent a request. Never waits."""
        keys = pack_keys(request.keys)
        self._tell(Began(number, request.instance_id, request.prefill_tokens, keys))

    def first_token(self, number: int) -> None:
        """The first token of one of ours has come. Never waits."""
        self._tell(FirstToken(number))

    def ended(self, number: int) -> None:
        """One of ours has ended. Never waits."""
        self._tell(Ended(number))

    def _tell(self, event: ActiveEvent) -> None:
        self._waiting.append(event)
        if len(self._waiting) > _WAITING_MAX:
            self._take_as_told(list(self._waiting))
            self._waiting.clear()
            self._source.skip()
        self._wakeup.set()

    def _take_as_told(self, batch: list[ActiveEvent]) -> None:
        for event in batch:
            match event:
                case Began(number):
                    self._told[number] = event
                case FirstToken(number):
                    began = self._told[number]
                    self._told[number] = Began(number, began.instance_id, 0, began.keys)
                case Ended(number):
                    del self._told[number]

    def _snapshot(self, part: int, parts: int) -> bytes:
        return encode_active([each for each in self._told.values() if each.number % parts == part])

    # --- theirs ---

    def _on_event(self, router_id: str, body: bytes) -> None:
        theirs = self._theirs.setdefault(router_id, {})
        for event in decode_active(body):
            name = (router_id, event.number)
            match event:
                case Began(number, instance_id, prefill_tokens, keys):
                    request = ActiveRequest(instance_id, unpack_keys(keys), prefill_tokens)
                    theirs[number] = None
                    if len(theirs) > _REQUESTS_MAX:
                        self._forget(router_id)
                        raise RemoteProtocolError(f"more than {_REQUESTS_MAX} requests under way")
                    self._loads.begin(name, request)
                case FirstToken():
                    self._loads.first_token(name)
                case Ended(number):
                    theirs.pop(number, None)
                    self._loads.end(name)

    def _on_snapshot(self, router_id: str, bodies: tuple[bytes, ...]) -> None:
        self._forget(router_id)
        for body in bodies:
            self._on_event(router_id, body)

    def _forget(self, router_id: str) -> None:
        for number in self._theirs.pop(router_id, ()):
            self._loads.end((router_id, number))

    async def _forget_silent(self) -> None:
        while True:
            await trio.sleep(BEAT_S)
            for router_id in self._follower.silent(trio.current_time() - SILENT_S):
                self._follower.forget(router_id)
                self._forget(router_id)
