"""The peers of one engine, by engine id: found in the control plane, connected to, forgotten.

A peer is connected to when it is first needed, and again after it was forgotten. One is forgotten
that is gone: not in discovery any more, and not answering either, for a lease that was lost while
the store was away says nothing about its holder. What is moved is `engine.py`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import attrs
import trio

from ...config.planes import TransferConfig
from ...errors import ConnectError, RequestError, StaleMemoryError, TrinamoError
from ...nurseries import open_nursery
from ...protocol.transfer.description import (
    check_compatible,
    decode_description,
    decode_descriptions,
)
from ...protocol.transfer.settlement import PeerDescriptor
from ...retries import Retries
from .metadata import NixlMetadataStore
from .router import TransferRouter
from .routes import RoutedMemory, RoutedPeer

_log = logging.getLogger("trinamo.transfer")
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


class EnginePeers:
    """Whom one engine moves blocks to and from: that part of `EngineTransfers`. Owns no task."""

    def __init__(
        self,
        engine_id: str,
        memory: RoutedMemory,
        router: TransferRouter,
        store: NixlMetadataStore,
        section: TransferConfig,
    ) -> None:
        self.engine_id = engine_id
        """What peers know us by."""
        self.memory = memory
        self.router = router
        self.store = store
        self._section = section
        self._peers: dict[str, _Engine] = {}
        self._missing: dict[str, int] = {}
        """By incarnation, how often it was said to be missing since it is being asked."""

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

    def count(self, engine_id: str, byte_count: int) -> None:
        """So many bytes have been moved from or to that peer."""
        peer = self._peers.get(engine_id)
        if peer is not None:
            peer.moved_bytes += byte_count

    @property
    def moved_bytes(self) -> dict[str, int]:
        """By engine id, as long as the peer is there."""
        return {engine_id: peer.moved_bytes for engine_id, peer in self._peers.items()}

    async def watch(self) -> None:
        """Forget peers that are gone; runs until cancelled.

        What the store refuses is logged and tried again: a worker serves without transfers, too.
        """
        async with open_nursery() as nursery:

            async def attempt(begun: Callable[[], None]) -> None:
                await self.store.watch(lambda peer: self._missed(peer, nursery), begun)

            await Retries(_log, "peers' memory is not watched").run(attempt)

    def _missed(self, incarnation: str, nursery: trio.Nursery) -> None:
        """Discovery does not name this incarnation any more."""
        count = self._missing[incarnation] = self._missing.get(incarnation, 0) + 1
        if count == 1:
            nursery.start_soon(self._reap, incarnation)

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
