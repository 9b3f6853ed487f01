"""The KV transfers of one engine: its memory, offered to peers, and peers' memory, by engine id.

`open_engine_transfers` registers the engine's cache with every backend of the chain. `publish` puts
the offer into the control plane, where peers find it by the engine's id. Peers are found and
forgotten by `peers.py`.

What may be touched is still said block by block: the owner `grant`s blocks and hands the ticket to
its peer by any other plane, and only with that ticket the peer's `read` or `write` gets anywhere.
The peer's request brings its `card`, so that it can be asked whether it has let go (`grants.py`).
Which backend moves the blocks is decided in `router.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import attrs
import trio

from ...config.config import Config
from ...config.planes import TransferConfig
from ...env import Env
from ...errors import ConnectError, UnavailableError
from ...metrics.transfers import TransferMetrics
from ...planes import ControlPlane, TransferReport
from ...protocol.transfer.description import Direction
from ...protocol.transfer.settlement import PeerCard, decode_card, encode_card
from ...worker.registration import Registrar
from ..cache import KvCache
from .chain import RouterOptions
from .grants import Grant, Inquiries
from .leases import BlockLeases, open_block_leases
from .metadata import NixlMetadata, NixlMetadataStore
from .peers import REGION, EnginePeers
from .router import TransferRouter, open_transfer_router
from .routes import RoutedMemory
from .statistics import BackendStatistics, TransferStatistics

if TYPE_CHECKING:
    from ...planes.transports import TransferChain

__all__ = ["REGION", "EngineTransfers", "open_engine_transfers"]

_log = logging.getLogger("trinamo.transfer")
_OFFER_S: Final = 5.0


class EngineTransfers(EnginePeers):
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
        super().__init__(engine_id, router, store, section)
        self.kv = kv
        self.memory = memory
        self.leases = leases
        self._chain = chain
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

    def card(self) -> bytes | None:
        """Who we are, for whoever grants us blocks; None where nobody could ask us.

        It belongs into the very request for the blocks, so that the life which gets the ticket is
        the life that is asked about.
        """
        plane = self._chain.settlement
        if plane is None:
            return None
        return encode_card(PeerCard(self.engine_id, plane.address, plane.incarnation))

    async def meet(self, card: bytes) -> bool:
        """Whether what is granted to the peer with this card will come back, should it die.

        False over an unfenced backend if that life does not answer at its address, as one that has
        died since it asked: granted blocks could stay in quarantine then. Await it when the blocks
        are about to be granted, and rather refuse. Takes `data_plane.transfer.probe_timeout_s` or a
        little more. Raises `RemoteProtocolError` for a card that is none.
        """
        whom = decode_card(card)
        if self.memory.is_fenced:
            await trio.lowlevel.checkpoint()
            return True
        return await self.leases.meet(whom)

    def grant(self, blocks: Sequence[int], card: bytes | None = None) -> Grant:
        """Let one peer move these blocks of the pool; hand it `Grant.ticket`. Never waits.

        The caller owns the blocks, and ends the grant. `card` is what the peer's request brought of
        its `card`: without one a withdrawn grant over an unfenced backend ends in quarantine unless
        it is acknowledged. Raises `RequestError` for blocks that are not there, `UnavailableError`
        while shutting down, `RemoteProtocolError` for a card that is none, and what the backends
        raise.
        """
        self._check_open()
        whom = None if card is None else decode_card(card)
        return self.leases.grant(self.memory, self.kv.memory.range_ids(blocks), whom)

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
        try:
            with trio.fail_at(ends_at):
                peer = await self.connect(engine_id)
        except trio.TooSlowError:
            raise ConnectError(f"engine {engine_id} could not be connected to in time") from None
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
    inquiries: Inquiries | None = None
    if chain.settlement is not None:
        inquiries = Inquiries(
            chain.settlement, timeout_s=section.probe_timeout_s, on_standing=metrics.inquired
        )
    async with (
        open_block_leases(
            kv.pool,
            drain_s=section.quarantine_after_s,
            on_quarantine=metrics.quarantined,
            on_readmit=metrics.readmitted,
            dice=env.rng,
            block_of=kv.memory.block_of,
            inquiries=inquiries,
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
        transfers = EngineTransfers(
            engine_id,
            kv,
            memory,
            router,
            leases,
            NixlMetadataStore(config.worker.namespace, control),
            chain,
            section=section,
        )
        if inquiries is not None:
            inquiries.on_gone = transfers.bury
        yield transfers
