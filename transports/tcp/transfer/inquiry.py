"""One question to a transfer plane over a connection of its own: has this life settled?

`inquire` asks and turns all that can happen into a `Sign`; `answer` is the other end, called for a
stream that begins with an `Inquiry` and no `Hello`. What the signs mean is in
`runtime/protocol/transfer/settlement.py`.
"""

from __future__ import annotations

import trio

from trinamo.runtime.env import Env
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    ImpostorError,
    RemoteProtocolError,
)
from trinamo.runtime.planes.settlement import Answers, Finding
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.transfer.settlement import Sign
from trinamo.runtime.protocol.transfer.stream import Answer, Inquiry

from ..greeting import greet
from ..sockets import TcpOptions, dial, format_address
from .link import Link

__all__ = ["answer", "inquire"]

_VERSION = 1


async def inquire(
    address: str, life: str, ticket: int, options: TcpOptions, env: Env, timeout_s: float
) -> Finding:
    """See `SettlementPlane.inquire`."""
    stream: trio.SocketStream | None = None
    reached = ""
    with trio.move_on_after(timeout_s):
        try:
            stream = await dial(address, options)
        except ConnectError as error:
            is_refused = isinstance(error.__cause__, ConnectionRefusedError)
            return Finding(Sign.REFUSED if is_refused else Sign.UNREACHED)
        try:
            reached = format_address(*stream.socket.getpeername()[:2])
            await greet(stream, address, options, env, Purpose.TRANSFERS)
            link = Link(stream, slice_bytes=1)
            await link.send_now(Inquiry(_VERSION, life, ticket))
            said = await link.read_now()
        except (RemoteProtocolError, ImpostorError):
            return Finding(Sign.NONSENSE, reached)
        except (OSError, ConnectError, DisconnectedError):
            return Finding(Sign.BROKEN, reached)
        finally:
            stream.socket.close()
        return Finding(_sign_of(said), reached)
    return Finding(Sign.UNREACHED if stream is None else Sign.SILENT, reached)


def _sign_of(said: object) -> Sign:
    if not isinstance(said, Answer):
        return Sign.NONSENSE
    if not said.is_meant:
        return Sign.OTHER_LIFE
    return Sign.SAYS_SETTLED if said.is_settled else Sign.SAYS_MOVING


async def answer(link: Link, inquiry: Inquiry, life: str, answers: Answers) -> None:
    """Say whether we are who is asked for and, if so, whether we have settled.

    Raises `DisconnectedError` if the asker has gone, `RemoteProtocolError` for another version.
    """
    if inquiry.version != _VERSION:
        raise RemoteProtocolError(f"an inquiry of version {inquiry.version}")
    is_meant = inquiry.life == life
    await link.send_now(Answer(is_meant, is_meant and answers.is_settled(inquiry.ticket)))
