"""Whether a worker's process answers: a connection does not tell, its kernel keeps that standing."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

import trio

from ..env import Env
from ..errors import TrinamoError
from ..nurseries import open_nursery
from ..planes import RequestPlane
from ..protocol.discovery.instances import Instance
from ..protocol.streams.request import AckStatus, Answer, Envelope, RequestKind
from ..protocol.streams.silence import Reply

__all__ = ["ANSWER_MAX_S", "Way", "answers", "question"]

_log = logging.getLogger("trinamo.router")
Way = tuple[RequestPlane, str]
"""A plane, and the address of an instance on it."""
ANSWER_MAX_S: Final = 1.0
"""An instance that lingers must answer within this."""
_ID_BITS: Final = 64


async def answers(way: Way, instance: Instance, env: Env) -> bool:
    """Whether `instance` itself says, within a second, that it would take a request.

    False also if it drains, or if somebody else lives at its address. Nothing runs at the worker,
    so this may be asked again at will; cancelled, it leaves nothing behind but its cancel.
    """
    ack = await _probe(way, instance, env, ANSWER_MAX_S)
    return ack is not None and ack.status is AckStatus.ACCEPTED


async def question(ways: Collection[Way], instance: Instance, env: Env, patience_s: float) -> Reply:
    """Whether `instance` says anything at all within `patience_s`, by whichever of `ways`.

    Returns with its first answer; that of somebody else counts only if it gives none, and that none
    came only if a plane that was asked over can still carry something. Cancelled, it leaves nothing
    behind but its cancels.
    """
    reply = Reply.NOTHING if ways else Reply.UNASKED
    async with open_nursery() as nursery:

        async def ask(way: Way) -> None:
            nonlocal reply
            ack = await _probe(way, instance, env, patience_s)
            if ack is None:
                return
            # A worker of an earlier version does not say who it is.
            if ack.instance_id in ("", instance.id):
                reply = Reply.ANSWERED
                nursery.cancel_scope.cancel()
            elif reply is Reply.NOTHING:
                reply = Reply.REPLACED

        for way in ways:
            nursery.start_soon(ask, way)
    if reply is Reply.NOTHING and not any(plane.is_usable for plane, _ in ways):
        # What carried the probe has gone in the meantime: it may never have arrived.
        return Reply.UNASKED
    return reply


async def _probe(way: Way, instance: Instance, env: Env, patience_s: float) -> Answer | None:
    plane, address = way
    probe = Envelope(
        id=f"{env.rng.getrandbits(_ID_BITS):016x}",
        endpoint=instance.endpoint,
        instance_id=instance.id,
        kind=RequestKind.PROBE,
    )
    with trio.move_on_after(patience_s):
        try:
            return await plane.send(address, probe, b"")
        except TrinamoError:
            return None
        except Exception:  # noqa: BLE001 -- a stranger's words end this question alone
            _log.exception("instance %s of %s cannot be asked", instance.id, instance.endpoint)
    return None
