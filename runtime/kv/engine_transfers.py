"""The KV transfers of one engine: its memory, offered to peers, and peers' memory, by engine id.

`open_engine_transfers` registers the engine's cache with every backend of the chain. `publish` puts
the offer into the control plane, where peers find it by the engine's id; `watch` forgets peers that
are gone: not in discovery any more, and not answering either, for a lease that was lost while the
store was away says nothing about its holder. A peer is connected to when it is first needed, and
again after it was forgotten.

What may be touched is still said block by block: the owner `grant`s blocks and hands the ticket to
its peer by any other plane, and only with that ticket the peer's `read` or `write` gets anywhere.
Which backend moves the blocks is decided in `transfer_router.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import attrs
import trio

from ..config import Config
from ..config_planes import TransferConfig
from ..env import Env
from ..errors import (
    ConnectError,
    RequestError,
    StaleMemoryError,
    TrinamoError,
    UnavailableError,
)
from ..planes import ControlPlane, TransferReport
from ..protocol.transfer import Direction
from ..protocol.transfer_notice import Notice
from ..registration import Registrar
from ..transfer_metrics import TransferMetrics
from .cache import KvCache
from .farewells import Farewells
from .metadata import NixlMetadata, NixlMetadataStore
from .transfer_chain import RouterOptions
from .transfer_router import TransferRouter, open_transfer_router
from .transfer_routes import RoutedMemory, RoutedPeer
from .transfer_statistics import BackendStatistics, TransferStatistics
from .transfers import BlockLeases, Grant, open_block_leases

if TYPE_CHECKING:
    from ..composition import TransferChain

__all__ = ["REGION", "EngineTransfers", "open_engine_transfers"]

_log = logging.getLogger("trinamo.transfer")
REGION: Final = "kv"
"""What an engine's cache is called in its metadata."""
_CONNECTS_MAX: Final = 3
_OFFER_S: Final = 5.0
_RETRY_S: Final = 5.0


@attrs.define(eq=False)
class _Peer:
    """One engine that we move blocks to and from."""

    lock: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while connecting: one connection, however many ask. Peers do not share it."""
    agent_name: str = ""
    """The life of its process that `routed` leads to, or is being connected to."""
    routed: RoutedPeer | None = None
    is_gone: bool = False
    """Whether that life ended while it was being connected to."""


class EngineTransfers:
    """One engine's transfers; made by `open_engine_transfers`."""

    def __init__(
        self,
        engine_id: str,
        kv: KvCache,
        memory: RoutedMemory,
        router: TransferRouter,
        leases: BlockLeases,
        store: NixlMetadataStore,
        chain: TransferChain,
        *,
        section: TransferConfig,
    ) -> None:
        self.engine_id = engine_id
        """What peers know us by."""
        self.kv = kv
        self.memory = memory
        self.router = router
        self.leases = leases
        self.store = store
        self._chain = chain
        self._section = section
        self._peers: dict[str, _Peer] = {}
        self._is_draining = False

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
        agent_name = self.memory.description.incarnation
        metadata = NixlMetadata.of(self.engine_id, agent_name, {REGION: self.memory})
        return self.store.encode(self.engine_id, metadata)

    def grant(self, blocks: Sequence[int]) -> Grant:
        """Let one peer move these blocks of the pool; hand it `Grant.ticket`. Never waits.

        The caller owns the blocks, and ends the grant. Raises `RequestError` for blocks that are
        not there, `UnavailableError` while shutting down, and what the backends raise.
        """
        self._check_open()
        return self.leases.grant(self.memory, self.kv.memory.range_ids(blocks))

    async def receive(self) -> Notice:
        """The next peer's `notify`, heard once; see `TransferRouter.receive`."""
        return await self.router.receive()

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

    async def read(
        self,
        engine_id: str,
        blocks: Sequence[int],
        peer_blocks: Sequence[int],
        *,
        ticket: int,
        deadline_s: float | None = None,
        notify: bytes | None = None,
    ) -> list[TransferReport]:
        """Take `peer_blocks` of a peer into our `blocks`, as many, which the caller owns.

        See `move` for what it raises and what cancellation leaves behind.
        """
        return await self.move(
            Direction.READ, engine_id, blocks, peer_blocks, ticket, deadline_s, notify
        )

    async def write(
        self,
        engine_id: str,
        blocks: Sequence[int],
        peer_blocks: Sequence[int],
        *,
        ticket: int,
        deadline_s: float | None = None,
        notify: bytes | None = None,
    ) -> list[TransferReport]:
        """Put our `blocks` into as many `peer_blocks` of a peer; see `move`."""
        return await self.move(
            Direction.WRITE, engine_id, blocks, peer_blocks, ticket, deadline_s, notify
        )

    async def move(
        self,
        direction: Direction,
        engine_id: str,
        blocks: Sequence[int],
        peer_blocks: Sequence[int],
        ticket: int,
        deadline_s: float | None,
        notify: bytes | None,
    ) -> list[TransferReport]:
        """Move whole blocks; one report for each backend that moved a part of them.

        Connecting counts into `deadline_s` (None: `data_plane.transfer.timeout_s`). Our blocks are
        leased until nothing touches them any more, also if this is cancelled. Raises what
        `connect` and `TransferRouter.move` raise, and `UnavailableError` while shutting down.
        """
        self._check_open()
        ends_at = trio.current_time() + (
            self._section.timeout_s if deadline_s is None else deadline_s
        )
        ours = self.kv.memory.range_ids(blocks)
        with trio.move_on_at(ends_at) as scope:
            peer = await self.connect(engine_id)
        if scope.cancelled_caught:
            raise ConnectError(f"engine {engine_id} could not be connected to in time")
        described = peer.description
        theirs = self.kv.memory.range_ids(
            peer_blocks, described.block_count // self.kv.memory.ranges_per_block
        )
        return await self.router.move(
            direction,
            self.memory,
            ours,
            peer,
            theirs,
            deadline_s=ends_at - trio.current_time(),
            notify=notify,
            ticket=ticket,
        )

    async def connect(self, engine_id: str) -> RoutedPeer:
        """The peer with this engine id; from now on it is kept until it is gone.

        Raises `MetadataNotFoundError` if nobody has this id, `RequestError` if we have,
        `RemoteProtocolError` for metadata that is none, `ConnectError` if no backend reaches it,
        `StaleMemoryError` if it is not there any more, and what the control plane raises.
        """
        if engine_id == self.engine_id:
            raise RequestError("an engine does not transfer to itself")
        peer = self._peers.setdefault(engine_id, _Peer())
        try:
            async with peer.lock:
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

    async def _connected(self, engine_id: str, peer: _Peer) -> RoutedPeer | None:
        """One connection; None if the peer's life ended meanwhile, so there is news to read."""
        metadata = await self.store.get(engine_id)
        offer = metadata.memory_descriptors.get(REGION)
        if offer is None:
            raise StaleMemoryError(f"engine {engine_id} offers no memory called {REGION!r}")
        peer.agent_name, peer.is_gone = metadata.agent_name, False
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

    async def watch(self) -> None:
        """Forget peers that are gone, as `Farewells` says; runs until cancelled.

        What the store refuses is logged and tried again: a worker serves without transfers, too.
        """
        async with trio.open_nursery() as nursery:
            farewells = Farewells(
                nursery,
                grace_s=self._section.missing_grace_s,
                answers=self._answers,
                is_named=self._is_named,
                forget=self.forget,
            )
            while True:
                try:
                    await self.store.watch(farewells.begin)
                except TrinamoError as error:
                    text = "peers' memory is not watched: %s; again in %g s"
                    _log.error(text, error.message, _RETRY_S)
                await trio.sleep(_RETRY_S)

    async def _answers(self, agent_name: str) -> bool:
        """Whether we are connected to this life of a peer, and it says so itself."""
        for peer in self._peers.values():
            if peer.agent_name == agent_name and peer.routed is not None:
                return await self.router.probe(peer.routed)
        return False

    async def _is_named(self, agent_name: str) -> bool:
        """Whether the store names it now; False too if it cannot be asked."""
        for engine_id, peer in list(self._peers.items()):
            if peer.agent_name == agent_name:
                with suppress(TrinamoError):
                    return (await self.store.get(engine_id)).agent_name == agent_name
        return False

    async def forget(self, agent_name: str) -> None:
        """One life of a peer has ended: its transfers fail, and `connect` looks for a new one."""
        for engine_id, peer in list(self._peers.items()):
            if peer.agent_name != agent_name:
                continue
            peer.is_gone = True
            routed, peer.routed = peer.routed, None
            if routed is not None:
                if not peer.lock.locked():
                    del self._peers[engine_id]
                _log.info("engine %s is gone: its transfers end", engine_id)
                await self.router.forget(routed)


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

    Raises what the last backend says if none takes the memory. Leaving aborts what is under way,
    and quarantines blocks that are not settled by then; `drain` first to give them time.
    """
    section = config.data_plane.transfer
    for backend in chain.missing:
        metrics.opened(backend, is_open=False)
    options = RouterOptions(
        attempt_s=section.attempt_timeout_s,
        drain_s=section.settle_timeout_s,
        probe_s=section.probe_timeout_s,
        probe_interval_s=section.probe_interval_s,
    )
    async with (
        open_block_leases(
            kv.pool,
            drain_s=section.quarantine_after_s,
            on_quarantine=metrics.quarantined,
            dice=env.rng,
            block_of=kv.memory.block_of,
        ) as leases,
        open_transfer_router(
            chain.planes, metrics=metrics, leases=leases, options=options
        ) as router,
    ):
        memory = await router.register(
            kv.memory.buffer,
            block_bytes=kv.memory.range_bytes,
            fingerprint=kv.fingerprint,
            needs_ticket=True,
        )
        yield EngineTransfers(
            engine_id,
            kv,
            memory,
            router,
            leases,
            NixlMetadataStore(config.worker.namespace, control),
            chain,
            section=section,
        )
