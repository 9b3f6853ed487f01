"""Mistakes with what strangers say on the broker."""

from __future__ import annotations

from typing import Any

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.transports.nats.requests import NatsRequestPlane
from trinamo.transports.sockets.sealing import Sealer

from .planting import Patch, bug, instead_of


@bug
def nothing_is_sealed() -> list[Patch]:
    """Messages go as they are, and are taken as they come."""
    return [
        (Sealer, "seal", lambda _, message, __: message),
        (Sealer, "open", lambda _, message, *__, **___: message),
    ]


@bug
def seal_fits_everywhere() -> list[Patch]:
    """A seal does not say what the message is about."""
    seal, open_ = Sealer.seal, Sealer.open
    return [
        (Sealer, "seal", lambda self, message, _: seal(self, message, b"")),
        (Sealer, "open", lambda self, sealed, _, **once: open_(self, sealed, b"", **once)),
    ]


@instead_of(Sealer, "open")
def unopened_is_an_answer(
    open_: Any, self: Any, sealed: bytes, about: bytes, *, once: bool = False
) -> bytes:
    """A request is over with the first thing that anybody answers."""
    opened = b""
    try:
        opened = open_(self, sealed, about, once=once)
    except RemoteProtocolError:
        if once:
            raise
    return opened


@instead_of(NatsRequestPlane, "probe")
def nobody_is_believed(_: Any, __: Any, ___: Any, ____: Any, waiting: Any) -> None:
    """Whoever says that nobody is subscribed is believed."""
    waiting.cancel()
