"""The tcp transfer plane: blocks over streams.

Read `memory.py` (regions, flows, fencing), then `link.py` (one stream), then its two ends,
`target.py` and `initiator.py`. Works on simulated sockets, too.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Final

import attrs
import msgspec
import trio

from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    ImpostorError,
    RefusedError,
    RemoteProtocolError,
    StaleMemoryError,
    TrinamoError,
    error_from_wire,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import Mover, Registrable, Transfer, TransferPlane
from trinamo.runtime.planes.settlement import InquiryReport, SettlementPlane
from trinamo.runtime.planes.transfer import open_plane
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.transfer.description import MemoryDescription, draw_incarnation
from trinamo.runtime.protocol.transfer.settlement import InquiryResult
from trinamo.runtime.protocol.transfer.stream import (
    Hello,
    Inquiry,
    InquiryAnswer,
    Ping,
    TransferFailed,
    Welcome,
)
from trinamo.transports.sockets.wire import Wire, open_wire

from ..accepting import Gate
from ..greeting import dial_member, greet, welcome
from ..sockets import TcpOptions, dial, format_address, open_listener
from .initiator import InitiatorLink, PeerStream, TcpRemote
from .link import TransferLink, serve
from .memory import NO_CHECKSUM, ChecksumChoice, TcpRegion, choose, offered
from .sealed import PIECE_KEY_BYTES, PieceBuffers
from .target import RefusalBucket, TargetLink

_log = logging.getLogger("trinamo.tcp")
_VERSION: Final = 2
_INQUIRY_VERSION: Final = 1


@attrs.frozen(kw_only=True)
class TransferOptions:
    """What an operator may set about transfers over TCP."""

    tcp: TcpOptions = attrs.field(factory=TcpOptions)
    slice_bytes: int = 1 << 21
    """What is sent before another transfer of the same peer gets its turn."""
    checksum: ChecksumChoice = "auto"
    """`auto`: XXH3 where both ends have the package `xxhash`, else CRC-32."""


class TcpMover(Mover[TcpRegion], SettlementPlane):
    """Blocks over one stream to each peer."""

    backend = "tcp"
    path = "stream"

    def __init__(
        self, options: TransferOptions, env: Env, nursery: trio.Nursery, address: str
    ) -> None:
        Mover.__init__(self, draw_incarnation(env.rng))
        SettlementPlane.__init__(self)
        self.options = options
        self.address = address
        self.malformed_count = 0
        """Streams that were ended because the peer talked nonsense."""
        self.outlives_us = False
        """Whether the port stays open until the process ends; see `open_transfer_plane`."""
        self._refusals = RefusalBucket()
        self._buffers = PieceBuffers()
        self._env, self._nursery = env, nursery
        self._peers: dict[str, PeerStream] = {}

    async def register(
        self, memory: Registrable, draft: MemoryDescription, *, needs_ticket: bool
    ) -> TcpRegion:
        """Nothing is pinned, so it costs nothing."""
        await trio.lowlevel.checkpoint()
        # Peers ask by block, and need not know where the memory of this process lies.
        described = msgspec.structs.replace(draft, address=self.address.encode())
        return TcpRegion(memory, described, needs_ticket=needs_ticket)

    # --- peers -----------------------------------------------------------------------------------

    async def ask(self, described: MemoryDescription) -> TcpRemote:
        """Dial, or exchange a word over the stream that there is."""
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
        is_new = not peer.is_reached
        link = await peer.reach()
        if not is_new:  # Else its greeting was the sign of life.
            with link.exchange() as exchange:
                link.put(Ping(exchange.id))
                await exchange.wait()
        return TcpRemote(described, peer)

    def _on_unreached(self, peer: PeerStream) -> None:
        if self._peers.get(peer.incarnation) is peer:
            del self._peers[peer.incarnation]

    def hang_up(self, incarnation: str, silent_s: float) -> bool:
        peer = self._peers.get(incarnation)
        return peer is not None and peer.hang_up(silent_s)

    async def close(self, incarnation: str) -> None:
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            peer.forget()
        await trio.lowlevel.checkpoint()

    # --- settlement ------------------------------------------------------------------------------

    async def inquire(
        self, address: str, incarnation: str, ticket: int, *, timeout_s: float
    ) -> InquiryReport:
        """Ask over a connection of its own, whatever streams there are to the peer; raises nothing."""
        options = self.options.tcp
        wire: Wire | None = None
        reached = ""
        with trio.move_on_after(timeout_s):
            try:
                wire = open_wire(await dial(address, options))
            except ConnectError as error:
                is_refused = isinstance(error.__cause__, ConnectionRefusedError)
                return InquiryReport(
                    InquiryResult.REFUSED if is_refused else InquiryResult.UNREACHED
                )
            try:
                reached = format_address(*wire.socket.getpeername()[:2])
                greeted, _ = await greet(wire, address, options, self._env, Purpose.TRANSFERS)
                link = TransferLink(greeted, self._buffers, slice_bytes=1)
                await link.send_now(Inquiry(_INQUIRY_VERSION, incarnation, ticket))
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
                InquiryResult.SAYS_SETTLED if said.is_settled else InquiryResult.SAYS_MOVING,
                reached,
            )
        return InquiryReport(
            InquiryResult.UNREACHED if wire is None else InquiryResult.SILENT, reached
        )

    # --- transfers -------------------------------------------------------------------------------

    def move(self, transfer: Transfer) -> Awaitable[bool]:
        """Dial if need be, ask, and wait for the peer's last word."""
        assert isinstance(transfer.local, TcpRegion), "memory of another plane"
        assert isinstance(transfer.remote, TcpRemote), "memory of a peer of another plane"
        return self._move(transfer, transfer.remote.peer)

    async def _move(self, transfer: Transfer, peer: PeerStream) -> bool:
        link = await peer.reach()
        # Aborted before it began, nobody would close a flow that is opened now.
        if not transfer.is_over:
            await link.move(transfer)
        return link.checksum is not NO_CHECKSUM

    # --- streams ---------------------------------------------------------------------------------

    async def _dial(
        self, address: str, incarnation: str, take: Callable[[InitiatorLink], None]
    ) -> None:
        wire, name = await dial_member(address, self.options.tcp, self._env, Purpose.TRANSFERS)
        with closing(wire.socket):
            if name != incarnation:
                raise StaleMemoryError(f"{address} is another process now")
            link = InitiatorLink(wire, self._buffers, slice_bytes=self.options.slice_bytes)
            async with _bounded(self.options.tcp.handshake_timeout_s):
                await self._greet(link, incarnation)
            take(link)
            await serve(link)

    async def _greet(self, link: InitiatorLink, incarnation: str) -> None:
        ours = offered(self.options.checksum, is_sealed=link.sealed is not None)
        key = self._key(link)
        await link.send_now(Hello(_VERSION, incarnation, list(ours), key))
        answer = await link.read_now()
        if isinstance(answer, TransferFailed):
            raise error_from_wire(answer.code, answer.message, definite=True)
        if not isinstance(answer, Welcome) or answer.checksum not in ours:
            raise RemoteProtocolError(f"peer {incarnation} did not answer with a welcome")
        link.checksum = ours[answer.checksum]
        if link.sealed is not None:
            link.sealed.change_keys(key, answer.key)

    async def serve_stream(self, wire: Wire) -> None:
        """Serve one connection of a peer, which has greeted, to its end; raises nothing."""
        try:
            link = TargetLink(
                wire,
                self._buffers,
                self.region,
                self._refusals,
                slice_bytes=self.options.slice_bytes,
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
            if hello.version != _INQUIRY_VERSION:
                raise RemoteProtocolError(f"an inquiry of version {hello.version}")
            is_meant = hello.incarnation == self.incarnation
            is_settled = is_meant and self.is_settled(hello.ticket)
            await link.send_now(InquiryAnswer(is_meant, is_settled))
            return False
        if not isinstance(hello, Hello) or hello.version != _VERSION:
            raise RemoteProtocolError("the peer did not greet, or speaks another version")
        try:
            if hello.wanted != self.incarnation:
                # Who we are is for those who know it already.
                raise StaleMemoryError(f"{self.address} is another process now")  # noqa: TRY301
            link.checksum = choose(
                hello.checksums, self.options.checksum, is_sealed=link.sealed is not None
            )
        except (StaleMemoryError, RefusedError) as error:
            await link.send_now(TransferFailed(0, error.code, error.message, error.definite))
            raise
        key = self._key(link)
        await link.send_now(Welcome(link.checksum.name, key))
        if link.sealed is not None:
            link.sealed.change_keys(key, hello.key)
        return True

    def _key(self, link: TransferLink) -> bytes:
        """For what we send over it once both ends have greeted."""
        return b"" if link.sealed is None else self._env.rng.randbytes(PIECE_KEY_BYTES)


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
) -> AsyncIterator[TransferPlane[TcpMover]]:
    """Bind the transfer port and serve registered memory until the block is left.

    Raises `ConfigError` if the address cannot be bound. Leaving it ends all transfers. Who is
    refused at the port takes the process for dead, so it must be opened before, and left after, all
    other planes of the process; where one of those has left bytes moving, `outlives_us` set before
    leaving keeps the port bound, and nobody answered, until the process ends.
    """
    options = TransferOptions() if options is None else options
    listener, address = await open_listener(options.tcp)
    mover: TcpMover | None = None
    try:
        async with open_nursery() as nursery:
            env = RealEnv() if env is None else env
            mover = TcpMover(options, env, nursery, address)
            # One who dials us proves that it is of this cluster; it is told nothing before.
            greet = partial(
                welcome,
                options=options.tcp,
                env=env,
                purpose=Purpose.TRANSFERS,
                name=mover.incarnation,
            )
            gate = Gate(options.tcp, greet, mover.serve_stream)
            nursery.start_soon(gate.accept, listener, nursery)
            try:
                async with open_plane(mover) as plane:
                    yield plane
            finally:
                nursery.cancel_scope.cancel()
    finally:
        if mover is not None and mover.outlives_us:
            listener.socket.detach()
        else:
            listener.socket.close()
