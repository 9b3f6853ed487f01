"""Whether a worker's process answers: a connection does not tell, its kernel keeps that standing."""

from __future__ import annotations

from typing import Final

import trio

from .env import Env
from .errors import TrinamoError
from .planes import RequestPlane
from .protocol.instances import Instance
from .protocol.request import AckStatus, Envelope, RequestKind

__all__ = ["ANSWER_MAX_S", "answers"]

ANSWER_MAX_S: Final = 1.0
"""An answer that comes later is none."""
_ID_BITS: Final = 64


async def answers(plane: RequestPlane, address: str, instance: Instance, env: Env) -> bool:
    """Whether `instance` itself says at `address`, within a second, that it would take a request.

    False also if it drains, or if somebody else lives at its address. Nothing runs at the worker,
    so this may be asked again at will; cancelled, it leaves nothing behind but its cancel.
    """
    probe = Envelope(
        id=f"{env.rng.getrandbits(_ID_BITS):016x}",
        endpoint=instance.endpoint,
        instance_id=instance.id,
        kind=RequestKind.PROBE,
    )
    with trio.move_on_after(ANSWER_MAX_S):
        try:
            ack = await plane.send(address, probe, b"")
        except TrinamoError:
            return False
        return ack.status is AckStatus.ACCEPTED
    return False
