"""The tcp transfer plane: blocks over streams.

Read `memory.py` (regions, flows, fencing), then `link.py` (one stream), then
its two ends, `target.py` and `initiator.py`, and `flight.py` (one
transfer). Works on simulated sockets, too.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Final

import attrs
import trio

from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    RefusedError,
    RemoteProtocolError,
    StaleMemoryError,
    TrinamoError,
    error_from_wire,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import MemoryRegion, Registrable, RemoteMemory
from trinamo.runtime.planes.settlement import Answers, InquiryReport, IsSettled
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    MemoryDescription,
    decode_description,
    draw_incarnation,
)
from trinamo.runtime.protocol.transfer.stream import (
    Failed,
    Hello,
    Inquiry,
    Ping,
    Welcome,
)
from trinamo.transports.one_sided.region import check_parts, host_buffers
from trinamo.transports.one_sided.state import plan_transfer

from ..accepting import Gate
from ..greeting import dial_member, welcome
from ..sockets import TcpOptions, open_listener
from .checksum import Checksum, ChecksumChoice, choose, offered
from .flight import TcpTransfer
from .initiator import InitiatorLink, PeerStream, TcpRemote
from .inquiry import answer, inquire
from .link import serve
from .memory import TcpRegion
from .refusals import Refusals
from .target import TargetLink

_log = logging.getLogger("trinamo.tcp")
_VERSION: Final = 1


@attrs.frozen(kw_only=True)
class TransferOptions:
    """What an operator may set about transfers over TCP."""

    tcp: TcpOptions = attrs.field(factory=TcpOptions)
    slice_bytes: int = 1 << 21
    """What is sent before another transfer of the same peer gets its turn."""
    checksum: ChecksumChoice = "auto"
    """`auto`: XXH3 where both ends have the package `xxhash`, else CRC-32."""


class TcpTransferPlane:
    """Implements `TransferPlane` and `SettlementPlane`; made by `open_transfer_plane`."""

    backend: str = "tcp"

    def __init__(
        self, options: TransferOptions, env: Env, nursery: trio.Nursery, address: str
    ) -> None:
        self.options = options
        self.address = address
        self.incarnation = draw_incarnation(env.rng)
        self.malformed_count = 0
        """Streams that were ended because the peer talked nonsense."""
        self.outlives_us = False
        """Whether the port stays open until the process ends; see `open_transfer_plane`."""
        self._answers = Answers()
        self._refusals = Refusals()
        self._env, self._nursery = env, nursery
        self._regions: dict[int, TcpRegion] = {}
        self._numbers = 0
        self._peers: dict[str, PeerStream] = {}
        self._transfers: dict[int, TcpTransfer] = {}

    # --- memory ----------------------------------------------------------------------------------

    async def register(
        self,
        memory: Registrable,
        *,
        block_bytes: int,
        fingerprint: str = "",
        needs_ticket: bool = False,
        parts: int = 1,
    ) -> TcpRegion:
        """Register writable buffers; nothing is pinned, so it costs nothing."""
        await trio.lowlevel.checkpoint()
        views = host_buffers(memory, block_bytes, backend="tcp")
        length = sum(view.nbytes for view in views)
        check_parts(length // block_bytes, parts)
        self._numbers += 1
        # Peers ask by block, and need not know where the memory of this process lies.
        described = MemoryDescription(
            backend=self.backend,
            incarnation=self.incarnation,
            region=self._numbers,
            generation=1,
            fingerprint=fingerprint,
            length=length,
            block_bytes=block_bytes,
            parts=parts,
            address=self.address.encode(),
        )
        region = TcpRegion(views, described, needs_ticket=needs_ticket)
        self._regions[self._numbers] = region
        return region

    async def deregister(self, region: MemoryRegion) -> None:
        """Refuse all transfers with the region and end those under way."""
        if self._regions.get(region.description.region) is region:
            self._regions.pop(region.description.region).withdraw()
        await trio.lowlevel.checkpoint()

    def region(self, number: int) -> TcpRegion:
        """A region by number, for peers."""
        region = self._regions.get(number)
        if region is None:
            raise StaleMemoryError(f"there is no region {number}")
        return region

    # --- peers -----------------------------------------------------------------------------------

    async def connect(self, description: bytes) -> TcpRemote:
        """Dial the peer, or use the stream there is."""
        described = decode_description(description, backend=self.backend)
        try:
            address = described.address.decode("ascii")
        except UnicodeDecodeError:
            raise RemoteProtocolError("the address is no host:port") from None
        peer = self._peers.get(described.incarnation)
        if peer is None:
            peer = PeerStream(
                described.incarnation, address, self._dial, self._nursery, self._on_unreached
            )
            self._peers[described.incarnation] = peer
        await peer.reach()
        return TcpRemote(described, peer)

    def _on_unreached(self, peer: PeerStream) -> None:
        if self._peers.get(peer.incarnation) is peer:
            del self._peers[peer.incarnation]

    async def forget(self, incarnation: str) -> None:
        """Close the stream to a peer; what is under way with it fails."""
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            for transfer in list(self._transfers.values()):
                if transfer.peer is peer:
                    transfer.fail(DisconnectedError(f"peer {incarnation} was forgotten"))
            peer.forget()
        await trio.lowlevel.checkpoint()

    async def probe(self, remote: RemoteMemory) -> None:
        """One exchange with the peer over a stream that is dialled if need be."""
        link = await self._of_ours(remote).peer.reach()
        with link.exchange() as exchange:
            link.put(Ping(exchange.id))
            await exchange.wait()

    def _of_ours(self, remote: RemoteMemory) -> TcpRemote:
        assert isinstance(remote, TcpRemote), "memory of a peer of another plane"
        return remote

    # --- settlement ------------------------------------------------------------------------------

    def answering(self, is_settled: IsSettled) -> AbstractContextManager[None]:
        """Answer peers' inquiries until the block is left."""
        return self._answers.answering(is_settled)

    async def inquire(
        self, address: str, incarnation: str, ticket: int, *, timeout_s: float
    ) -> InquiryReport:
        """Ask over a connection of its own, whatever streams there are to the peer."""
        return await inquire(address, incarnation, ticket, self.options.tcp, self._env, timeout_s)

    # --- transfers -------------------------------------------------------------------------------

    def start(
        self,
        direction: Direction,
        local: MemoryRegion,
        local_blocks: Sequence[int],
        remote: RemoteMemory,
        remote_blocks: Sequence[int],
        *,
        deadline_s: float,
        notify: bytes | None = None,
        ticket: int = 0,
    ) -> TcpTransfer:
        """Start one transfer in the plane's nursery."""
        assert isinstance(local, TcpRegion), "memory of another plane"
        plan = plan_transfer(
            direction,
            local,
            local_blocks,
            self._of_ours(remote),
            remote_blocks,
            deadline_s=deadline_s,
            notify=notify,
            ticket=ticket,
        )
        transfer = TcpTransfer(plan, self._env.clock)
        self._transfers[id(transfer)] = transfer
        self._nursery.start_soon(self._drive, transfer)
        return transfer

    async def _drive(self, transfer: TcpTransfer) -> None:
        try:
            await transfer.drive()
        finally:
            del self._transfers[id(transfer)]

    # --- streams ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End all transfers and refuse all memory. Synchronous."""
        for transfer in list(self._transfers.values()):
            transfer.abort()
        for number in list(self._regions):
            self._regions.pop(number).withdraw()

    async def _dial(
        self, address: str, incarnation: str, task_status: trio.TaskStatus[InitiatorLink]
    ) -> None:
        stream, name = await dial_member(address, self.options.tcp, self._env, Purpose.TRANSFERS)
        async with stream:
            if name != incarnation:
                raise StaleMemoryError(f"{address} is another process now")
            link = InitiatorLink(stream, slice_bytes=self.options.slice_bytes)
            async with _bounded(self.options.tcp.handshake_timeout_s):
                await self._greet(link, incarnation)
            task_status.started(link)
            await serve(link)

    async def _greet(self, link: InitiatorLink, incarnation: str) -> None:
        ours = offered(self.options.checksum)
        await link.send_now(Hello(_VERSION, incarnation, list(ours)))
        answer = await link.read_now()
        if isinstance(answer, Failed):
            raise error_from_wire(answer.code, answer.message, definite=True)
        if not isinstance(answer, Welcome) or answer.checksum not in ours:
            raise RemoteProtocolError(f"peer {incarnation} did not answer with a welcome")
        link.checksum = ours[answer.checksum]

    async def greet(self, stream: trio.SocketStream) -> None:
        """Have one who dials us prove that it is of this cluster; it is told nothing before."""
        await welcome(stream, self.options.tcp, self._env, Purpose.TRANSFERS, self.incarnation)

    async def serve_stream(self, stream: trio.SocketStream, _: None) -> None:
        """Serve one connection of a peer, which has greeted, to its end; raises nothing."""
        try:
            link = TargetLink(
                stream, self.region, self._refusals, slice_bytes=self.options.slice_bytes
            )
            try:
                async with _bounded(self.options.tcp.handshake_timeout_s):
                    has_come_to_stay = await self._welcome(link)
                if has_come_to_stay:
                    await serve(link)
            finally:
                link.close()
        except RemoteProtocolError as error:
            self.malformed_count += 1
            _log.warning("transfer stream: %s", error)
        except TrinamoError:
            pass  # The peer hung up, was refused, or did not greet in time.

    async def _welcome(self, link: TargetLink) -> bool:
        """Read the peer's first message; whether there will be more."""
        hello = await link.read_now()
        if isinstance(hello, Inquiry):
            await answer(link, hello, self.incarnation, self._answers)
            return False
        if not isinstance(hello, Hello) or hello.version != _VERSION:
            raise RemoteProtocolError("the peer did not greet, or speaks another version")
        try:
            link.checksum = self._accept(hello)
        except (StaleMemoryError, RefusedError) as error:
            await link.send_now(Failed(0, error.code, error.message, error.definite))
            raise
        await link.send_now(Welcome(link.checksum.name))
        return True

    def _accept(self, hello: Hello) -> Checksum:
        if hello.wanted != self.incarnation:
            # Who we are is for those who know it already.
            raise StaleMemoryError(f"{self.address} is another process now")
        return choose(hello.checksums, self.options.checksum)


@asynccontextmanager
async def _bounded(timeout_s: float) -> AsyncIterator[None]:
    try:
        with trio.fail_after(timeout_s):
            yield
    except trio.TooSlowError:
        raise ConnectError(f"no greeting from the peer within {timeout_s:g} s") from None


@asynccontextmanager
async def open_transfer_plane(
    options: TransferOptions | None = None, env: Env | None = None
) -> AsyncIterator[TcpTransferPlane]:
    """Bind the transfer port and serve registered memory until the block is left.

    Raises `ConfigError` if the address cannot be bound. Leaving it ends all transfers. Who is
    refused at the port takes the process for dead, so it must be opened before, and left after, all
    other planes of the process; where one of those has left bytes moving, `outlives_us` set before
    leaving keeps the port bound, and nobody answered, until the process ends.
    """
    options = TransferOptions() if options is None else options
    listener, address = await open_listener(options.tcp)
    plane: TcpTransferPlane | None = None
    try:
        async with open_nursery() as nursery:
            plane = TcpTransferPlane(options, RealEnv() if env is None else env, nursery, address)
            gate = Gate(options.tcp, plane.greet, plane.serve_stream)
            nursery.start_soon(gate.accept, listener, nursery)
            try:
                yield plane
            finally:
                plane.close()
                nursery.cancel_scope.cancel()
    finally:
        if plane is not None and plane.outlives_us:
            listener.socket.detach()
        else:
            listener.socket.close()
