"""One question to a transfer plane over a connection of its own: has this incarnation settled?

`inquire` asks and turns all that can happen into an `InquiryResult`; `answer` is the other end, called for a
stream that begins with an `Inquiry` and no `Hello`. What the results mean is in
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
from trinamo.runtime.planes.settlement import InquiryReport, SettlementAnswers
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.transfer.settlement import InquiryResult
from trinamo.runtime.protocol.transfer.stream import Inquiry, InquiryAnswer
from trinamo.transports.sockets.wire import Wire, open_wire

from ..greeting import greet
from ..sockets import TcpOptions, dial, format_address
from .link import TransferLink

_VERSION = 1


async def inquire(
    address: str, incarnation: str, ticket: int, options: TcpOptions, env: Env, timeout_s: float
) -> InquiryReport:
    """See `SettlementPlane.inquire`."""
    wire: Wire | None = None
    reached = ""
    with trio.move_on_after(timeout_s):
        try:
            wire = open_wire(await dial(address, options))
        except ConnectError as error:
            is_refused = isinstance(error.__cause__, ConnectionRefusedError)
            return InquiryReport(InquiryResult.REFUSED if is_refused else InquiryResult.UNREACHED)
        try:
            reached = format_address(*wire.socket.getpeername()[:2])
            greeted, _ = await greet(wire, address, options, env, Purpose.TRANSFERS)
            link = TransferLink(greeted, slice_bytes=1)
            await link.send_now(Inquiry(_VERSION, incarnation, ticket))
            said = await link.read_now()
        except (RemoteProtocolError, ImpostorError):
            return InquiryReport(InquiryResult.NONSENSE, reached)
        except (OSError, ConnectError, DisconnectedError):
            return InquiryReport(InquiryResult.BROKEN, reached)
        finally:
            wire.socket.close()
        if not isinstance(said, InquiryAnswer):
            return InquiryReport(InquiryResult.NONSENSE, reached)
        if not said.is_meant:
            return InquiryReport(InquiryResult.REPLACED, reached)
        return InquiryReport(
            InquiryResult.SAYS_SETTLED if said.is_settled else InquiryResult.SAYS_MOVING, reached
        )
    return InquiryReport(InquiryResult.UNREACHED if wire is None else InquiryResult.SILENT, reached)


async def answer(
    link: TransferLink, inquiry: Inquiry, incarnation: str, answers: SettlementAnswers
) -> None:
    """Say whether we are who is asked for and, if so, whether we have settled.

    Raises `DisconnectedError` if the asker has gone, `RemoteProtocolError` for another version.
    """
    if inquiry.version != _VERSION:
        raise RemoteProtocolError(f"an inquiry of version {inquiry.version}")
    is_meant = inquiry.incarnation == incarnation
    await link.send_now(InquiryAnswer(is_meant, is_meant and answers.is_settled(inquiry.ticket)))
