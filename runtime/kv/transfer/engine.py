"""The KV transfers of one engine: its memory, offered to peers, and peers' memory, by engine id.

`open_engine_transfers` registers the engine's cache with every backend of the chain. `publish` puts
the offer into the control plane, where peers find it by the engine's id. A peer is connected to when
it is first needed, and again after it was forgotten. One is forgotten that is gone: not in discovery
any more, and not answering either, for a lease that was lost while the store was away says nothing
about its holder.

What may be touched is still said block by block: the owner `grant`s blocks and hands the ticket to
its peer by any other plane, and only with that ticket the peer's `read` or `write` gets anywhere.
The peer's request brings its `descriptor`, so that it can be asked whether it has let go.
Which backend moves the blocks is decided in `router.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Required, TypedDict

import attrs
import trio
from typing_extensions import Unpack

from ...config.config import Config
from ...config.planes import TransferConfig
from ...env import Env
from ...errors import (
    ConfigError,
    ConnectError,
    RequestError,
    StaleMemoryError,
    TrinamoError,
    UnavailableError,
)
from ...nurseries import open_nursery
from ...planes import ControlPlane, TransferReport
from ...planes.retries import Retries
from ...protocol.transfer.description import (
    Direction,
    check_compatible,
    decode_description,
    decode_descriptions,
)
from ...protocol.transfer.settlement import PeerDescriptor, decode_peer, encode_peer
from ...worker.registration import Registrar
from ..regions import KvCache
from .leases import BlockLeases, open_block_leases
from .metadata import NixlMetadata, NixlMetadataStore
from .metrics import TransferMetrics
from .router import TransferRouter, open_transfer_router
from .routes import BackendStatistics, RoutedMemory, RoutedPeer, TransferStatistics
from .settlement import Grant, Inquiries

if TYPE_CHECKING:
    from ...planes.transports import TransferChain

_log = logging.getLogger("trinamo.transfer")
_OFFER_S: Final = 5.0
REGION: Final = "kv"
"""What an engine's cache is called in its metadata."""
_CONNECTS_MAX: Final = 3
_PATIENCE_S: Final = 1.0
"""For a peer that was named to us to be in discovery, again after an outage."""
_LOOK_S: Final = 0.2
_FORGET_S: Final = 10.0


@attrs.define(eq=False)
class _Engine:
    """One engine that we move blocks to and from."""

    lock: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while connecting: one connection, however many ask. Peers do not share it."""
    incarnation: str = ""
    """Of the process that `routed` leads to, or is being connected to."""
    routed: RoutedPeer | None = None
    is_gone: bool = False
    """Whether that process ended while it was being connected to."""
    moved_bytes: int = 0
    """What was read from it and written to it, by us."""


class Moving(TypedDict, total=False):
    """How blocks are moved: the arguments of `EngineTransfers.move` beside the blocks."""

    ticket: Required[int]
    deadline_s: float | None
    notify: bytes | None
    layers: range | None


@attrs.define(eq=False)
class EngineTransfers:
    """One engine's transfers; made by `open_engine_transfers`."""

    engine_id: str
    """What peers know us by."""
    kv: KvCache
    memory: RoutedMemory
    router: TransferRouter
    leases: BlockLeases
    store: NixlMetadataStore
    _chain: TransferChain
    _section: TransferConfig
    _peers: dict[str, _Engine] = attrs.field(factory=dict, init=False)
    _missing: dict[str, int] = attrs.field(factory=dict, init=False)
    """By incarnation, how often it was said to be missing since it is being asked."""
    _is_draining: bool = attrs.field(default=False, init=False)

    # --- our side --------------------------------------------------------------------------------

    async def offer(self, registrar: Registrar) -> None:
        """`publish`, but go on without after some seconds: the registrar goes on trying."""
        with trio.move_on_after(_OFFER_S) as scope:
            await self.publish(registrar)
        if scope.cancelled_caught:
            _log.warning("peers cannot find this engine's memory yet; the process goes on")

    async def publish(self, registrar: Registrar) -> None:
        """Let peers find us, now and after every lost lease; returns once they can.

        Raises `FencedError` if another process lives under our engine id.
        """
        packed = self.metadata()
        await registrar.register(self.store.key(self.engine_id), lambda _: packed)

    def metadata(self) -> bytes:
        """What peers must know of us, as it is stored."""
        incarnation = self.memory.description.incarnation
        metadata = NixlMetadata.of(self.engine_id, incarnation, {REGION: self.memory})
        return self.store.encode(self.engine_id, metadata)

    def descriptor(self) -> bytes | None:
        """Who we are, for whoever lends us blocks; None where nobody could ask us.

        It belongs into the very request for the blocks, so that who gets the ticket is who is asked
        about.
        """
        plane = self._chain.settlement
        if plane is None:
            return None
        return encode_peer(PeerDescriptor(self.engine_id, plane.address, plane.incarnation))

    @asynccontextmanager
    async def grant(
        self,
        blocks: Sequence[int],
        peer: bytes | None = None,
        *,
        may_write: bool = False,
        ttl_s: float | None = None,
    ) -> AsyncIterator[Grant]:
        """Lend blocks of the pool to one peer until the block is left; hand it `Grant.ticket`.

        The caller owns the blocks. `peer` is what the peer's request brought of its `descriptor`.
        The peer may read, or write too if it `may_write`. Leaving ends the grant in every case; so
        does the end of `ttl_s` seconds (None: `data_plane.transfer.timeout_s`), after which
        `Grant.completed` raises. Blocks that the caller gives back are not used again while the
        peer may still write them.

        Where the backend cannot stop a peer that may write, it is asked first, for
        `data_plane.transfer.probe_timeout_s` or a little more. Raises `UnavailableError` if it does
        not answer, as blocks lent to it would be lost should it die, and while shutting down;
        `RequestError` for blocks that are not there; `RemoteProtocolError` for a descriptor that is
        none; and what the backends raise.
        """
        self._check_open()
        self.kv.memory.check_blocks(blocks)
        whom = None if peer is None else decode_peer(peer)
        if may_write and not self.memory.is_fenced:
            if whom is None or not await self.leases.meet(whom):
                raise UnavailableError("the peer could not be asked, should it hang or die")
            self._check_open()
        ttl_s = self._section.timeout_s if ttl_s is None else ttl_s
        grant = self.leases.grant(self.memory, blocks, whom, may_write=may_write, ttl_s=ttl_s)
        try:
            yield grant
        finally:
            grant.withdraw()

    def statistics(self) -> TransferStatistics:
        """The chain as configured, and what is under way."""
        found = self.router.statistics()
        by_name = {each.backend: each for each in found.chain}
        for backend, why in self._chain.missing.items():
            by_name[backend] = BackendStatistics(backend=backend, is_open=False, problem=why)
        return attrs.evolve(
            found,
            chain=[by_name[backend] for backend in self._chain.order],
            blocks_in_flight=self.kv.pool.in_flight_count,
            moved_bytes=self.moved_bytes,
        )

    async def drain(self) -> None:
        """Refuse new transfers and return once no block is held by one; use it with a timeout.

        Cancelled, it leaves everything as it is: `open_engine_transfers` then quarantines.
        """
        self._is_draining = True
        await self.leases.drain()

    def _check_open(self) -> None:
        if self._is_draining:
            raise UnavailableError("this engine is shutting down and moves no more blocks")

    # --- peers -----------------------------------------------------------------------------------

    async def connect(self, engine_id: str) -> RoutedPeer:
        """The peer with this engine id; from now on it is kept until it is gone.

        Raises `MetadataNotFoundError` if nobody has this id, `RequestError` if we have,
        `IncompatibleKvError` if its bytes mean something else than ours,
        `RemoteProtocolError` for metadata that is none, `ConnectError` if no backend reaches it,
        `StaleMemoryError` if it is not there any more, and what the control plane raises.
        """
        if engine_id == self.engine_id:
            raise RequestError("an engine does not transfer to itself")
        peer = self._peers.setdefault(engine_id, _Engine())
        try:
            async with peer.lock:
                # Its connections may break before the watch reports why: it ended, and another
                # process may have its name already.
                is_broken = peer.routed is not None and not peer.routed.usable
                if is_broken and await self._has_successor(engine_id, peer.incarnation):
                    await self.forget(peer.incarnation)
                for _ in range(_CONNECTS_MAX):
                    if peer.routed is None:
                        peer.routed = await self._connected(engine_id, peer)
                if peer.routed is None:
                    raise ConnectError(f"engine {engine_id} restarts faster than it is reached")
                return peer.routed
        finally:
            # Whoever has the lock now goes on with this entry.
            if peer.routed is None and not peer.lock.locked():
                self._peers.pop(engine_id, None)

    async def _has_successor(self, engine_id: str, incarnation: str) -> bool:
        """Whether the store names another incarnation; False if it names none or cannot be asked."""
        self.store.drop(engine_id)
        with suppress(TrinamoError):
            return (await self.store.get(engine_id)).agent_name != incarnation
        return False

    async def _connected(self, engine_id: str, peer: _Engine) -> RoutedPeer | None:
        """One connection; None if the peer ended meanwhile, so there is news to read."""
        metadata = await self.store.find(engine_id, patience_s=_PATIENCE_S)
        offer = metadata.memory_descriptors.get(REGION)
        if offer is None:
            raise StaleMemoryError(f"engine {engine_id} offers no memory called {REGION!r}")
        # All backends describe the same memory; what does not fit ours is not even connected to.
        described = next(iter(decode_descriptions(offer).values()))
        check_compatible(self.memory.description, decode_description(described))
        peer.incarnation, peer.is_gone = metadata.agent_name, False
        try:
            routed = await self.router.connect(offer)
        except (ConnectError, StaleMemoryError):
            # What we had cached may be older than what is stored: look once past the cache.
            self.store.drop(engine_id)
            if (await self.store.get(engine_id)).agent_name != metadata.agent_name:
                return None
            raise
        if peer.is_gone:
            await self.router.forget(routed)
            return None
        _log.info("engine %s is connected by %s", engine_id, ", ".join(routed.usable))
        return routed

    @property
    def moved_bytes(self) -> dict[str, int]:
        """By engine id, as long as the peer is there."""
        return {engine_id: peer.moved_bytes for engine_id, peer in self._peers.items()}

    async def watch(self) -> None:
        """Forget peers that are gone; runs until cancelled.

        What the store refuses is logged and tried again: a worker serves without transfers, too.
        """
        async with open_nursery() as nursery:

            def missed(incarnation: str) -> None:
                count = self._missing[incarnation] = self._missing.get(incarnation, 0) + 1
                if count == 1:
                    nursery.start_soon(self._reap, incarnation)

            retries = Retries(_log, "peers' memory is not watched")
            await retries.run(partial(self.store.watch, missed))

    async def _reap(self, incarnation: str) -> None:
        """Forget a missing peer, unless it answers, and is named again within the grace.

        A store that was away for longer than the lease takes everybody's keys with it, though
        everybody lives. So whoever is missing is asked itself.
        """
        try:
            ends_at = trio.current_time() + self._section.missing_grace_s
            pause_s = _LOOK_S
            while trio.current_time() < ends_at and await self._answers(incarnation):
                await trio.sleep(min(pause_s, max(0.0, ends_at - trio.current_time())))
                pause_s *= 2  # After an outage everybody asks about everybody.
                count = self._missing[incarnation]
                # News that came while we asked is younger than the answer may be.
                if await self._is_named(incarnation) and self._missing[incarnation] == count:
                    _log.info("peer %s is in discovery again; nothing was lost", incarnation)
                    return
        finally:
            del self._missing[incarnation]
        await self.forget(incarnation)

    async def _answers(self, incarnation: str) -> bool:
        """Whether we are connected to this incarnation, and it says so itself."""
        for peer in self._peers.values():
            if peer.incarnation == incarnation and peer.routed is not None:
                return await self.router.probe(peer.routed)
        return False

    async def _is_named(self, incarnation: str) -> bool:
        """Whether the store names it now; False too if it cannot be asked."""
        for engine_id, peer in list(self._peers.items()):
            if peer.incarnation == incarnation:
                with suppress(TrinamoError):
                    return (await self.store.get(engine_id)).agent_name == incarnation
        return False

    async def evict(self, peer: PeerDescriptor) -> None:
        """This incarnation has ended, which is proven: close what we have open to it."""
        with trio.move_on_after(_FORGET_S), suppress(TrinamoError):
            await self.forget(peer.incarnation)

    async def forget(self, incarnation: str) -> None:
        """This incarnation has ended: its transfers fail, and `connect` looks for a new one."""
        await trio.lowlevel.checkpoint()
        for engine_id, peer in list(self._peers.items()):
            if peer.incarnation != incarnation:
                continue
            peer.is_gone = True
            routed, peer.routed = peer.routed, None
            if routed is not None:
                if not peer.lock.locked():
                    del self._peers[engine_id]
                _log.info("engine %s is gone: its transfers end", engine_id)
                await self.router.forget(routed)

    # --- moving ----------------------------------------------------------------------------------

    async def read(
        self,
        engine_id: str,
        blocks: Sequence[int],
        peer_blocks: Sequence[int],
        **how: Unpack[Moving],
    ) -> list[TransferReport]:
        """Take `peer_blocks` of a peer into our `blocks`, as many, which the caller owns.

        See `move` for what it raises and what cancellation leaves behind.
        """
        return await self.move(Direction.READ, engine_id, blocks, peer_blocks, **how)

    async def write(
        self,
        engine_id: str,
        blocks: Sequence[int],
        peer_blocks: Sequence[int],
        **how: Unpack[Moving],
    ) -> list[TransferReport]:
        """Put our `blocks` into as many `peer_blocks` of a peer; see `move`."""
        return await self.move(Direction.WRITE, engine_id, blocks, peer_blocks, **how)

    async def move(
        self,
        direction: Direction,
        engine_id: str,
        blocks: Sequence[int],
        peer_blocks: Sequence[int],
        *,
        ticket: int,
        deadline_s: float | None = None,
        notify: bytes | None = None,
        layers: range | None = None,
    ) -> list[TransferReport]:
        """Move blocks; a report for each backend that moved a part of them.

        All of them, or only their KV of some `layers`, numbered from 0, so that one layer travels
        while the next is computed: that needs a layout that keeps layers apart (`worker.kv_layout`).
        Give `notify` with the last move of a grant, once the others have returned: then all has
        landed when `Grant.completed` returns. Connecting counts into `deadline_s` (None: `data_plane.transfer.timeout_s`). Our blocks are
        leased until nothing touches them any more, also if this is cancelled. Raises what
        `connect` and `TransferRouter.move` raise, `UnavailableError` while shutting down, and
        `RequestError` for blocks or layers that are not there.
        """
        self._check_open()
        ends_at = trio.current_time() + (
            self._section.timeout_s if deadline_s is None else deadline_s
        )
        regions = self.kv.memory
        ours = regions.range_ids(blocks, layers=layers)
        try:
            with trio.fail_at(ends_at):
                peer = await self.connect(engine_id)
        except trio.TooSlowError:
            raise ConnectError(f"engine {engine_id} could not be connected to in time") from None
        count = peer.description.pool_blocks
        theirs = regions.range_ids(peer_blocks, block_count=count, layers=layers)
        reports = await self.router.move(
            direction,
            self.memory,
            ours,
            peer,
            theirs,
            deadline_s=ends_at - trio.current_time(),
            notify=notify,
            ticket=ticket,
        )
        if engine_id in self._peers:  # Else it was forgotten meanwhile.
            self._peers[engine_id].moved_bytes += sum(report.byte_count for report in reports)
        # Planes count ranges. All blocks' last ranges are the last to go, and complete them.
        found, ranges = [], len(ours) - sum(report.block_count for report in reports)
        for report in reports:
            begun, ranges = ranges, ranges + report.block_count
            complete, before = (max(0, n - len(ours) + len(blocks)) for n in (ranges, begun))
            found.append(attrs.evolve(report, block_count=complete - before))
        return found


@asynccontextmanager
async def open_engine_transfers(
    chain: TransferChain,
    kv: KvCache,
    config: Config,
    env: Env,
    control: ControlPlane,
    *,
    engine_id: str,
    metrics: TransferMetrics,
) -> AsyncIterator[EngineTransfers]:
    """Register `kv` with the chain, which must be open for longer, until the block is left.

    Raises `ConfigError` if no backend takes the memory, and says why. Leaving aborts what is under way,
    and quarantines blocks that are not settled by then; `drain` first to give them time.
    """
    section = config.data_plane.transfer
    for backend in chain.missing:
        metrics.opened(backend, is_open=False)
    inquiries: Inquiries | None = None
    if chain.settlement is not None:
        inquiries = Inquiries(
            chain.settlement, timeout_s=section.probe_timeout_s, on_status=metrics.inquired
        )
    async with (
        open_block_leases(
            kv.pool,
            drain_s=section.quarantine_after_s,
            on_quarantine=metrics.quarantined,
            on_readmit=metrics.readmitted,
            rng=env.rng,
            block_of=kv.memory.block_of,
            inquiries=inquiries,
        ) as leases,
        open_transfer_router(
            chain.planes, metrics=metrics, leases=leases, section=section
        ) as router,
    ):
        try:
            memory = await router.register(
                kv.memory.buffers,
                block_bytes=kv.memory.range_bytes,
                fingerprint=kv.fingerprint,
                needs_ticket=True,
                parts=kv.memory.parts,
            )
        except RequestError as error:
            absent = "".join(f"; {name} is away: {why}" for name, why in chain.missing.items())
            raise ConfigError(
                f"{error.message}{absent}: name one that does in data_plane.transfer.backends (nixl"
                " and mooncake move memory of a GPU), or set data_plane.transfer.enabled to false"
            ) from error
        transfers = EngineTransfers(
            engine_id,
            kv,
            memory,
            router,
            leases,
            NixlMetadataStore(config.worker.namespace, control),
            chain,
            section,
        )
        if inquiries is not None:
            inquiries.on_gone = transfers.evict
        yield transfers
