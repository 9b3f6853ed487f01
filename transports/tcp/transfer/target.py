"""The end of a transfer stream whose memory is read and written: it was dialled, and answers.

Each request is admitted by the region's access table before a byte moves, and fenced as soon as
what admitted it is withdrawn; the peer is told why. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import trio
from typing_extensions import override

from trinamo.runtime.errors import (
    KilledError,
    OverloadedError,
    RemoteProtocolError,
    StaleMemoryError,
    TrinamoError,
)
from trinamo.runtime.protocol.transfer.description import BLOCKS_MAX
from trinamo.runtime.protocol.transfer.stream import (
    Abort,
    Confirmed,
    Finished,
    Notify,
    Read,
    Request,
    TransferFailed,
    TransferMessage,
    Write,
    unpack_blocks,
)
from trinamo.transports.sockets.wire import Wire

from .link import TransferLink
from .memory import BlockFlow, TcpRegion
from .sealed import PieceBuffers

_REQUESTS_MAX: Final = 1024
_BLOCKS_MAX: Final = 4 * BLOCKS_MAX
"""Of all requests of one peer that are under way: a list costs some 36 bytes a block."""


@attrs.define(eq=False)
class _Request:
    """One request that is under way here."""

    flow: BlockFlow
    ticket: int
    notify: bytes | None = None


_PER_S: Final = 1000
_BURST: Final = 2048
"""As many as one honest peer may have under way when its ticket is withdrawn, twice."""


class RefusalBucket:
    """A bucket that refills; in debt, each refusal waits for its turn."""

    def __init__(self) -> None:
        self.count = 0
        """Requests that were refused."""
        self._left: float = _BURST
        self._at = trio.current_time()

    def spend(self) -> float:
        """Count one refusal; how many seconds to let its peer wait."""
        now = trio.current_time()
        self._left = min(_BURST, self._left + (now - self._at) * _PER_S) - 1
        self._at = now
        self.count += 1
        return max(0.0, -self._left / _PER_S)


class TargetLink(TransferLink):
    def __init__(
        self,
        wire: Wire,
        buffers: PieceBuffers,
        region: Callable[[int], TcpRegion],
        refusals: RefusalBucket,
        *,
        slice_bytes: int,
    ) -> None:
        super().__init__(wire, buffers, slice_bytes=slice_bytes)
        self._region, self._refusals = region, refusals
        self._pause_s = 0.0
        self._block_count = 0
        self._requests: dict[int, _Request] = {}

    def close(self) -> None:
        """The stream is over: let go of all memory. Synchronous."""
        for request in list(self._requests.values()):
            request.flow.close()
        self._requests.clear()
        self.receiving.clear()

    # --- requests --------------------------------------------------------------------------------

    def take(self, message: TransferMessage, data: bytes) -> None:
        if not isinstance(message, Request):
            raise RemoteProtocolError(f"{type(message).__name__} is no request")
        try:
            match message:
                case Read(number):
                    request = self._admit(message, data, is_target=False)
                    request.flow.on_sent = lambda: self._finish(number)
                    self.send_blocks(request.flow)
                case Write(number):
                    request = self._admit(message, data, is_target=True)
                    request.notify = message.notify
                    if request.flow.blocks:
                        self.receiving[number] = request.flow
                    else:
                        self._complete(number, request)
                case Abort(number):
                    # The answer follows the last slice, so the peer knows that nothing more comes.
                    self._fail(number, KilledError("aborted by the peer"))
                case Notify(number):
                    self._region(message.region).access.complete(message.ticket, message.message)
                    self.put(Finished(number))
                case _:  # A ping.
                    self.put(Finished(message.id))
        except RemoteProtocolError:
            raise
        except TrinamoError as error:
            self._pause_s = self._refusals.spend()
            self._fail(message.id, error)

    @override
    async def rest(self) -> None:
        """As any link; a peer that was refused may have to wait."""
        pause_s, self._pause_s = self._pause_s, 0.0
        await trio.sleep(pause_s)

    def _admit(
        self,
        message: Read | Write,
        data: bytes,
        *,
        is_target: bool,
    ) -> _Request:
        if message.id in self._requests:
            raise RemoteProtocolError(f"request {message.id} is under way already")
        if len(self._requests) >= _REQUESTS_MAX:
            raise OverloadedError(
                f"{_REQUESTS_MAX} requests under way", bound="transfers", value=_REQUESTS_MAX
            )
        region = self._region(message.region)
        if message.block_bytes != region.block_bytes:
            raise StaleMemoryError(
                f"blocks of {region.block_bytes} bytes here, of {message.block_bytes} there"
            )
        # Who shows no ticket is refused before the list, which may be long, is looked at.
        region.access.check(message.generation, message.ticket)
        blocks = unpack_blocks(data)
        if self._block_count + len(blocks) > _BLOCKS_MAX:
            raise OverloadedError(
                f"{_BLOCKS_MAX} blocks under way", bound="transfer_blocks", value=_BLOCKS_MAX
            )
        region.access.admit(message.generation, message.ticket, blocks, is_target=is_target)
        number = message.id
        flow = BlockFlow(
            number,
            region,
            blocks,
            self.checksum,
            admitted=(message.generation, message.ticket),
            on_fence=lambda error: self._fail(number, error),
        )
        request = _Request(flow, message.ticket)
        self._requests[number] = request
        self._block_count += len(blocks)
        return request

    def _fail(self, number: int, error: TrinamoError) -> None:
        self._drop(number)
        self.put(TransferFailed(number, error.code, error.message[:2000], error.definite))

    def _finish(self, number: int) -> None:
        self._drop(number)
        self.put(Finished(number))

    def _drop(self, number: int) -> None:
        self.receiving.pop(number, None)
        request = self._requests.pop(number, None)
        if request is not None:
            self._block_count -= len(request.flow.blocks)
            request.flow.close()

    def received(self, flow: BlockFlow) -> None:
        if flow.is_complete:
            self._complete(flow.id, self._requests[flow.id])
        else:
            self.put(Confirmed(flow.id, flow.position))

    @override
    def arriving(self, flow: BlockFlow) -> None:
        # Else the writer hears nothing for a whole slice, and takes a slow connection for a dead one.
        self.put(Confirmed(flow.id, flow.position))

    def _complete(self, number: int, request: _Request) -> None:
        if request.notify is not None:
            try:
                request.flow.region.access.complete(request.ticket, request.notify)
            except StaleMemoryError as error:
                self._fail(number, error)
                return
        self._finish(number)
