"""How an instance is reached from here, and whether its process answers.

A connection does not tell whether it does: its kernel keeps that standing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

import trio

from ..env import Env
from ..errors import TrinamoError
from ..nurseries import open_nursery
from ..planes import RequestPlane
from ..protocol.discovery.instances import Instance
from ..protocol.discovery.presence import Sign
from ..protocol.streams.request import AckStatus, Answer, Envelope, RequestKind

__all__ = ["Route", "best_route", "find_routes", "probe"]

_log = logging.getLogger("trinamo.router")
Route = tuple[RequestPlane, str]
"""A plane, and the address of an instance on it."""
_ID_BITS: Final = 64


def find_routes(planes: Mapping[str, RequestPlane], instance: Instance) -> list[Route]:
    """Every route to an instance, the preferred one first."""
    return [
        (plane, instance.transports[transport])
        for transport, plane in planes.items()
        if transport in instance.transports
    ]


def best_route(planes: Mapping[str, RequestPlane], instance: Instance) -> Route | None:
    """The preferred one, unless it can carry nothing now and another can; None without any."""
    routes = find_routes(planes, instance)
    return next((route for route in routes if route[0].is_usable), routes[0] if routes else None)


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


async def _ask(route: Route, instance: Instance, env: Env, timeout_s: float) -> Answer | None:
    plane, address = route
    envelope = Envelope(
        id=f"{env.rng.getrandbits(_ID_BITS):016x}",
        endpoint=instance.endpoint,
        instance_id=instance.id,
        kind=RequestKind.PROBE,
    )
    with trio.move_on_after(timeout_s):
        try:
            return await plane.send(address, envelope, b"")
        except TrinamoError:
            return None
        except Exception:  # noqa: BLE001 -- a stranger's words end this probe alone
            _log.exception("instance %s of %s cannot be probed", instance.id, instance.endpoint)
    return None
