"""One stream of the tcp transfer plane: small messages and bulk slices, both ways.

Bulk goes by `sendmsg` from and `recvmsg_into` straight to the registered memory. One task writes
and one reads. The writer takes turns between transfers, a slice each, and messages go first, so no
transfer waits for the whole of another. A fenced flow (see `memory.py`) is padded or
discarded up to the end of its slice: the stream stays in step and serves the others.

What the messages mean is up to the two kinds of link, `target.py` and
`initiator.py`.
"""

from __future__ import annotations

import contextlib
import socket as stdlib_socket
from collections import deque
from ipaddress import ip_address
from typing import Final

import trio

from trinamo.runtime.errors import (
    CorruptedError,
    DisconnectedError,
    RemoteProtocolError,
    TrinamoError,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.transfer.stream import (
    BLOCK_LIST_BYTES_MAX,
    HEADER_BYTES_MAX,
    PREFIX,
    Slice,
    Sums,
    TransferMessage,
    decode_message,
    encode_message,
)
from trinamo.transports.sockets.wire import Wire, send_all

from .memory import NO_CHECKSUM, SLICE_RUNS_MAX, BlockFlow
from .sealed import PieceBuffers, SealedSocket

_NAME_BYTES_MAX = 16  # TCP_CA_NAME_MAX


def is_loopback(ours: str, theirs: str) -> bool:
    """Whether a connection between these addresses never leaves the host."""
    try:
        return ours == theirs or ip_address(theirs.partition("%")[0]).is_loopback
    except ValueError:
        return False


def send_unpaced(socket: trio.socket.SocketType) -> None:
    """Let nothing but the receiver slow a loopback connection down; others stay as they are.

    BBR, the default congestion control of some machines, *paces*: it sends a packet, starts a timer,
    and sends the next one when that goes off. That keeps queues in the network short. Between two
    ends of one host there is no such queue, and a timer for every 64 KB cost two fifths of all CPU
    time of a transfer (bench/README.md). So a loopback connection that would be paced uses Reno,
    which every Linux has and every user may choose. A machine's choice that does not pace stays.
    A connection that is over already, or a kernel that does not know the option, changes nothing.
    """
    with contextlib.suppress(OSError):
        ours, theirs = socket.getsockname()[0], socket.getpeername()[0]
        if is_loopback(ours, theirs):
            option = (stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_CONGESTION)
            if socket.getsockopt(*option, _NAME_BYTES_MAX).startswith(b"bbr"):
                socket.setsockopt(*option, b"reno")


_AHEAD_BYTES: Final = HEADER_BYTES_MAX + PREFIX.size
_QUEUE_BYTES_MAX: Final = 1 << 20
_LOOK_AHEAD_BYTES: Final = 1024
"""Received behind a slice in the same system call: its sums and the head of the next one."""
_LOW_WATER_BYTES: Final = 1 << 18
"""Inside a slice we are woken up for so many bytes at once, not for every segment."""
_JOINED_BYTES_MAX: Final = 1 << 14
"""A slice up to this is copied to go out with its sums, in one call that wakes the peer once."""
_SCRATCH_BYTES: Final = 1 << 16
_SIGN_S: Final = 0.25
"""A slice that takes longer is answered while it comes."""
_ZEROS: Final = memoryview(bytes(_SCRATCH_BYTES))


class TransferLink:
    """The stream; its user runs `read` and `write` side by side until one of them raises.

    Both raise `DisconnectedError` when the stream is over, `RemoteProtocolError` when the peer
    talks nonsense; after either the stream is of no more use.
    """

    def __init__(self, wire: Wire, buffers: PieceBuffers, *, slice_bytes: int) -> None:
        self.receiving: dict[int, BlockFlow] = {}
        self._wire = wire
        self.sealed = None if wire.seal is None else SealedSocket(wire, buffers)
        self._socket = self.sealed or wire.socket
        self.slice_bytes = slice_bytes
        self.checksum = NO_CHECKSUM
        """As agreed in the handshake."""
        self.received_at = trio.current_time()
        """When the peer's last bytes came."""
        self._messages: deque[bytes] = deque()
        self._queued_bytes = 0
        self._sending: deque[BlockFlow] = deque()
        self._work = trio.Event()
        self._room = trio.Event()
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._ahead_start = self._ahead_end = 0
        self._low_water = 1
        send_unpaced(wire.socket)

    # --- what the two kinds of link add ----------------------------------------------------------

    def take(self, message: TransferMessage, data: bytes) -> None:
        """Act on a message that is neither slice nor sums; synchronous."""
        raise RemoteProtocolError(f"{type(message).__name__} does not belong here, {len(data)}")

    def received(self, flow: BlockFlow) -> None:
        """A slice of `flow` has arrived and is verified."""

    def arriving(self, flow: BlockFlow) -> None:
        """More of a slice of `flow` has come, and is not all; called about every `_SIGN_S` seconds."""

    async def rest(self) -> None:
        """Called after each message: many that have come at once do not keep others waiting."""
        await trio.lowlevel.checkpoint()

    # --- writing ---------------------------------------------------------------------------------

    def put(self, message: TransferMessage, data: bytes = b"") -> None:
        """Queue a message; it goes out before the next slice."""
        self._put(encode_message(message, len(data)) + data)

    def _put(self, frame: bytes) -> None:
        self._messages.append(frame)
        self._queued_bytes += len(frame)
        self._work.set()

    def send_blocks(self, flow: BlockFlow) -> None:
        """Send all slices of a flow, then call its `on_sent`; a fenced flow is dropped in silence."""
        self._sending.append(flow)
        self._work.set()

    async def write(self) -> None:
        """Send what is queued, until cancelled or broken."""
        try:
            while True:
                if self._sending:
                    await self._write_slice(self._sending.popleft())
                elif self._messages:
                    await self._send_messages()
                else:
                    self._work = trio.Event()
                    await self._work.wait()
        except (OSError, trio.ClosedResourceError) as error:
            raise DisconnectedError(f"the transfer stream broke: {error}") from error

    async def send_now(self, message: TransferMessage) -> None:
        """Send one message before `write` runs: the handshake."""
        self.put(message)
        try:
            await self._send_messages()
        except (OSError, trio.ClosedResourceError) as error:
            raise DisconnectedError(f"the transfer stream broke: {error}") from error

    async def _send_messages(self) -> None:
        await trio.lowlevel.checkpoint()
        data = self._take_messages()
        await send_all(self._wire, data if self.sealed is None else self.sealed.seal(data))

    def _take_messages(self) -> bytes:
        joined = b"".join(self._messages)
        self._messages.clear()
        self._queued_bytes = 0
        self._room.set()
        return joined

    async def _write_slice(self, flow: BlockFlow) -> None:
        if not flow.is_live():
            return
        if not flow.is_complete:
            count = flow.next_count(self.slice_bytes)
            payload_bytes = flow.begin(count)
            head = encode_message(Slice(flow.id, flow.position, count), payload_bytes)
            # More than so much is sent first, with a checkpoint.
            if payload_bytes <= _JOINED_BYTES_MAX >= self._queued_bytes:
                self._put(b"".join([head, *flow.views]))
                flow.advance(payload_bytes)
            else:
                head = self._take_messages() + head
                await self._send_slice(memoryview(head), flow, payload_bytes)
            try:
                sums = await flow.sums()
            except TrinamoError:
                return  # Fenced: whoever did it has queued the word for it.
            flow.end()
            self.put(Sums(flow.id, sums))
        if flow.is_complete:
            flow.close()
            flow.on_sent()
        else:
            self._sending.append(flow)

    async def _send_slice(self, head: memoryview, flow: BlockFlow, payload_bytes: int) -> None:
        """Send `head` and the views of the flow; zeros in their place from where it is fenced."""
        left = payload_bytes
        while left or head.nbytes:
            if flow.is_live():
                try:
                    sent = await self._socket.sendmsg([head, *flow.views])
                except (ValueError, TypeError):
                    # A view was released while we waited for room in the socket.
                    if flow.is_live():
                        raise
                    continue
            else:
                sent = await self._socket.send(head if head.nbytes else _ZEROS[:left])
            of_head = min(sent, head.nbytes)
            head = head[of_head:]
            left -= sent - of_head
            if flow.is_live():
                flow.advance(sent - of_head)

    # --- reading ---------------------------------------------------------------------------------

    async def read(self) -> None:
        """Take what comes, until cancelled or broken."""
        try:
            while True:
                message, data_bytes = await self._read_header()
                if isinstance(message, Slice):
                    flow = self.receiving.get(message.id)
                    if flow is not None and flow.is_live():
                        flow.begin_received(message.first, message.count, data_bytes)
                        taken = self._take_ahead(data_bytes)
                        _fill(flow, taken)
                        await self._fill_from_socket(flow, data_bytes - taken.nbytes)
                    else:
                        await self._discard(data_bytes - self._take_ahead(data_bytes).nbytes)
                elif isinstance(message, Sums):
                    await self._read_sums(message, data_bytes)
                else:
                    self.take(message, await self._read_data(data_bytes))
                    await self.rest()
                # A peer that asks without reading the answers must not fill our memory.
                while self._queued_bytes > _QUEUE_BYTES_MAX:
                    self._room = trio.Event()
                    await self._room.wait()
        except (OSError, trio.ClosedResourceError) as error:
            raise DisconnectedError(f"the transfer stream broke: {error}") from error

    async def read_now(self) -> TransferMessage:
        """The next message before `read` runs: the handshake."""
        try:
            message, data_bytes = await self._read_header()
        except (OSError, trio.ClosedResourceError) as error:
            raise DisconnectedError(f"the transfer stream broke: {error}") from error
        if data_bytes:
            raise RemoteProtocolError("a handshake with a data part")
        return message

    async def _read_header(self) -> tuple[TransferMessage, int]:
        header_bytes, data_bytes = PREFIX.unpack(await self._need(PREFIX.size))
        if not 0 < header_bytes <= HEADER_BYTES_MAX:
            raise RemoteProtocolError(
                f"a header of {header_bytes} bytes; 1 to {HEADER_BYTES_MAX} are taken"
            )
        return decode_message(await self._need(header_bytes)), data_bytes

    async def _need(self, count: int) -> bytes:
        """The next `count` bytes, through the small buffer."""
        while self._ahead_end - self._ahead_start < count:
            if self._ahead_start:
                held = bytes(self._ahead[self._ahead_start : self._ahead_end])
                self._ahead[: len(held)] = held
                self._ahead_start, self._ahead_end = 0, len(held)
            self._ahead_end += await self._receive_into(self._ahead[self._ahead_end :])
        start = self._ahead_start
        self._ahead_start += count
        return bytes(self._ahead[start : start + count])

    def _wake_at(self, count: int) -> None:
        """Let the socket be readable only when so many bytes have come, or it is over."""
        # Sealed, it is pieces that come, and who opens them knows their ends.
        if count != self._low_water and self.sealed is None:
            self._low_water = count
            self._wire.socket.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVLOWAT, count)

    async def _receive_into(self, view: memoryview) -> int:
        self._wake_at(1)
        count = await self._socket.recv_into(view)
        if not count:
            raise DisconnectedError("the peer closed the transfer stream")
        self.received_at = trio.current_time()
        return count

    def _take_ahead(self, count_max: int) -> memoryview:
        start = self._ahead_start
        self._ahead_start = min(self._ahead_end, start + count_max)
        return self._ahead[start : self._ahead_start]

    async def _read_data(self, count: int) -> bytes:
        if count > BLOCK_LIST_BYTES_MAX:
            raise RemoteProtocolError(
                f"a data part of {count} bytes; at most {BLOCK_LIST_BYTES_MAX} are taken"
            )
        if not count:
            return b""
        data = bytearray(self._take_ahead(count))
        while len(data) < count:
            # It costs what has come of it, not what was announced.
            self._wake_at(1)
            part = await self._socket.recv(min(count - len(data), _SCRATCH_BYTES))
            if not part:
                raise DisconnectedError("the peer closed the transfer stream")
            data += part
        return bytes(data)

    async def _fill_from_socket(self, flow: BlockFlow, left: int) -> None:
        told_at = trio.current_time()
        while left:
            if not flow.is_live():
                await self._discard(left)
                return
            count = await self._scatter(flow, left)
            if count is None:
                continue
            if not count:
                raise DisconnectedError("the peer closed the transfer stream")
            mine = min(count, left)
            # What is beyond the slice has gone to the small buffer.
            self._ahead_start, self._ahead_end = 0, count - mine
            if flow.is_live():
                flow.advance(mine)
            left -= mine
            if left and self.received_at - told_at >= _SIGN_S:
                told_at = self.received_at
                self.arriving(flow)

    async def _scatter(self, flow: BlockFlow, left: int) -> int | None:
        """Receive into the flow's views and then the small buffer; None if it was fenced.

        What is in one piece there may be in many here: they are filled some at a time.
        """
        self._wake_at(min(left, _LOW_WATER_BYTES))
        views = flow.views[:SLICE_RUNS_MAX]
        if len(views) == len(flow.views):
            views.append(self._ahead[:_LOOK_AHEAD_BYTES])
        try:
            count, _, _, _ = await self._socket.recvmsg_into(views)
        except (ValueError, TypeError):
            # A view was released while we waited for data: a TypeError or a ValueError, by place.
            if flow.is_live():
                raise
            return None
        self.received_at = trio.current_time()
        return count

    async def _discard(self, left: int) -> None:
        scratch = memoryview(bytearray(min(left, _SCRATCH_BYTES)))
        while left:
            left -= await self._receive_into(scratch[:left])

    async def _read_sums(self, message: Sums, data_bytes: int) -> None:
        if data_bytes:
            raise RemoteProtocolError("sums with a data part")
        flow = self.receiving.get(message.id)
        if flow is None or not flow.is_live():
            return
        if not flow.pending or flow.views:
            raise RemoteProtocolError("sums without a slice")
        try:
            await flow.verify(message.sums)
        except CorruptedError as error:
            flow.fence(error)
        except TrinamoError:
            return  # Fenced meanwhile.
        else:
            self.received(flow)


def _fill(flow: BlockFlow, data: memoryview) -> None:
    """Copy what has come into the flow's views; nothing if it is fenced."""
    while data.nbytes and flow.views:
        count = min(data.nbytes, flow.views[0].nbytes)
        flow.views[0][:count] = data[:count]
        data = data[count:]
        flow.advance(count)


async def serve(link: TransferLink) -> None:
    """Read and write until one of them raises."""
    async with open_nursery() as nursery:
        nursery.start_soon(link.write)
        await link.read()
