"""The one task of each instance: it holds the connections, looks for silence, and probes.

The rules are `protocol/discovery/presence.py`, what they lead to is `instances.py`. While every
request is heard from within the grace the task wakes four times in a grace and reads counters; with
no request under way it sleeps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

import trio

from ..context import Context
from ..env import Env, draw_id
from ..errors import TrinamoError
from ..nurseries import forget_frames, open_nursery
from ..planes import RequestPlane
from ..protocol.discovery.instances import Instance
from ..protocol.discovery.presence import Presence, Sign
from ..protocol.streams.request import AckStatus, Envelope, RequestAnswer, RequestKind
from .instances import Instances
from .record import InstanceRecord
from .unary import UnaryAttempt

_log = logging.getLogger("trinamo.router")
_BACKOFF_MIN_S: Final = 0.1
_BACKOFF_MAX_S: Final = 2.0
_STALE_PAUSE_S: Final = 1.0
"""Between two probes of a stale instance."""
_STALE_TIMEOUT_S: Final = 1.0
"""A stale instance must answer within this."""
Route = tuple[RequestPlane, str]
"""A plane, and the address of an instance on it."""


def find_routes(planes: Mapping[str, RequestPlane], instance: Instance) -> list[Route]:
    """Every route to an instance, the preferred one first."""
    return [
        (plane, instance.transports[transport])
        for transport, plane in planes.items()
        if transport in instance.transports
    ]


def best_route(planes: Mapping[str, RequestPlane], instance: Instance) -> Route | None:
    """The preferred one, unless it can carry nothing now and another can; None without any."""
    first: Route | None = None
    # A plain loop, because this is once for every request.
    for transport, plane in planes.items():
        address = instance.transports.get(transport)
        if address is not None:
            if plane.is_usable:
                return plane, address
            first = first or (plane, address)
    return first


class Monitor:
    """Watches the instances of one endpoint, each in a task of its own."""

    def __init__(self, instances: Instances, planes: Mapping[str, RequestPlane], env: Env) -> None:
        self._instances = instances
        self._planes = planes
        self._env = env

    async def watch(self, record: InstanceRecord) -> None:
        """Keep `record` as the world is, until it is over."""
        connecting, moves = trio.CancelScope(), -1
        probing, probed_as = trio.CancelScope(), (False, False)
        async with open_nursery() as nursery:
            while not record.is_over:
                now = trio.current_time()
                if record.stale_until <= now:
                    self._instances.step(record, Sign.OUT_OF_GRACE)
                self._instances.look(record)
                if record.presence is Presence.LEFT:
                    connecting.cancel()
                elif record.moves != moves:
                    connecting.cancel()
                    connecting, moves = trio.CancelScope(), record.moves
                    nursery.start_soon(self._connect, record, connecting)
                to_probe = (record.is_probed, record.presence is Presence.STALE)
                if to_probe != probed_as:
                    probing.cancel()
                    probing, probed_as = trio.CancelScope(), to_probe
                    if record.is_probed:
                        nursery.start_soon(self._probe, record, probing)
                look_at = math.inf if record.is_quiet else now + record.pause_s
                await record.wait_news(min(look_at, record.stale_until))
            nursery.cancel_scope.cancel()

    async def _connect(self, record: InstanceRecord, scope: trio.CancelScope) -> None:
        """Hold its connections: the lease tells of a death too, but only after its time to live.

        A plane that makes none, such as NATS, cannot tell. So where requests take such a plane, a
        connection of another plane that the instance speaks is held all the same. One that requests
        do not take says nothing until it has been made once: that port may simply be closed to us.
        """
        with scope:
            async with open_nursery() as nursery:
                for route in find_routes(self._planes, record.instance):
                    nursery.start_soon(self._hold, record, route)

    async def _hold(self, record: InstanceRecord, route: Route) -> None:
        plane, address = route
        instance = record.instance
        is_taken = best_route(self._planes, instance) == route
        backoff_s = _BACKOFF_MIN_S
        connected = partial(self._instances.connected, record, plane.transport)

        while True:
            why: TrinamoError | None = None
            try:
                await plane.hold(address, connected, instance_id=instance.id)
                backoff_s = _BACKOFF_MIN_S
            except TrinamoError as error:
                why, backoff_s = error, min(backoff_s * 2, _BACKOFF_MAX_S)
            except Exception:  # noqa: BLE001 -- one instance must not take the others along
                text = "instance %s of %s cannot be monitored"
                _log.exception(text, instance.id, instance.endpoint)
                backoff_s = _BACKOFF_MAX_S
            if is_taken or plane.transport in record.connected_once:
                self._instances.disconnected(record, why)
            forget_frames(why)
            await trio.sleep(backoff_s * self._env.rng.uniform(0.5, 1.5))

    async def _probe(self, record: InstanceRecord, scope: trio.CancelScope) -> None:
        """Probe it until the task says otherwise."""
        with scope:
            while True:
                asked_at, is_stale = trio.current_time(), record.presence is Presence.STALE
                timeout_s = _STALE_TIMEOUT_S if is_stale else record.pause_s
                # Those that requests take or that have been connected, and that can carry something
                # now: no answer says nothing where the port may simply be closed.
                routes = [
                    route
                    for number, route in enumerate(find_routes(self._planes, record.instance))
                    if route[0].is_usable
                    and (not number or route[0].transport in record.connected_once)
                ]
                reply = await probe(routes, record.instance, self._env, timeout_s)
                self._instances.take(record, reply, asked_at)
                if is_stale:
                    await trio.sleep(_STALE_PAUSE_S * self._env.rng.uniform(0.5, 1.5))
                else:
                    # Probes that wait for as long as the pause leave no moment in which an
                    # instance could live unheard.
                    await trio.sleep_until(asked_at + record.pause_s)


async def probe(routes: Collection[Route], instance: Instance, env: Env, timeout_s: float) -> Sign:
    """What `instance` says within `timeout_s`, by whichever of `routes`; nothing runs there.

    Returns with its first answer; that of somebody else counts only if it gives none, and that none
    came only if a plane that was asked over can still carry something. Cancelled, it leaves nothing
    behind but its cancels.
    """
    sign = Sign.UNANSWERED if routes else Sign.UNASKED
    async with open_nursery() as nursery:

        async def ask(route: Route) -> None:
            nonlocal sign
            ack = await _ask(route, instance, env, timeout_s)
            if ack is None:
                return
            # A worker of an earlier version does not say who it is.
            if ack.instance_id in ("", instance.id):
                is_accepted = ack.status is AckStatus.ACCEPTED
                sign = Sign.ACCEPTED if is_accepted else Sign.ANSWERED
                nursery.cancel_scope.cancel()
            elif sign is Sign.UNANSWERED:
                sign = Sign.REPLACED

        for route in routes:
            nursery.start_soon(ask, route)
    if sign is Sign.UNANSWERED and not any(plane.is_usable for plane, _ in routes):
        # What carried the probe has gone in the meantime: it may never have arrived.
        return Sign.UNASKED
    return sign


async def _ask(
    route: Route, instance: Instance, env: Env, timeout_s: float
) -> RequestAnswer | None:
    plane, address = route
    envelope = Envelope(
        id=draw_id(env.rng),
        endpoint=instance.endpoint,
        instance_id=instance.id,
        kind=RequestKind.PROBE,
    )
    with trio.move_on_after(timeout_s):
        try:
            answer, _ = await UnaryAttempt(Context(envelope.id)).run(plane, address, envelope, b"")
            return answer.ack
        except TrinamoError:
            return None
        except Exception:  # noqa: BLE001 -- a stranger's words end this probe alone
            _log.exception("instance %s of %s cannot be probed", instance.id, instance.endpoint)
    return None
