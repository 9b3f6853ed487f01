"""The peers of one engine, by engine id: found in the control plane, connected to, forgotten.

A peer is connected to when it is first needed, and again after it was forgotten. One is forgotten
that is gone: not in discovery any more, and not answering either, for a lease that was lost while
the store was away says nothing about its holder. What is moved is `engine.py`'s business.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import attrs
import trio

from ...config.planes import TransferConfig
from ...errors import ConnectError, RequestError, StaleMemoryError, TrinamoError
from ...nurseries import open_nursery
from ...protocol.transfer.settlement import PeerCard
from .farewells import Farewells
from .metadata import NixlMetadataStore
from .router import TransferRouter
from .routes import RoutedPeer

__all__ = ["REGION", "EnginePeers"]

_log = logging.getLogger("trinamo.transfer")
REGION: Final = "kv"
"""What an engine's cache is called in its metadata."""
_CONNECTS_MAX: Final = 3
_PATIENCE_S: Final = 1.0
"""For a peer that was named to us to be in discovery, again after an outage."""
_RETRY_S: Final = 5.0
_FORGET_S: Final = 10.0


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


class EnginePeers:
    """Whom one engine moves blocks to and from: that part of `EngineTransfers`. Owns no task."""

    def __init__(
        self,
        engine_id: str,
        router: TransferRouter,
        store: NixlMetadataStore,
        section: TransferConfig,
    ) -> None:
        self.engine_id = engine_id
        """What peers know us by."""
        self.router = router
        self.store = store
        self._section = section
        self._peers: dict[str, _Peer] = {}

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
        metadata = await self.store.find(engine_id, patience_s=_PATIENCE_S)
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
        async with open_nursery() as nursery:
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

    async def bury(self, card: PeerCard) -> None:
        """The life on the card has ended, which is proven: close what we have open to it."""
        await trio.lowlevel.checkpoint()
        peer = self._peers.get(card.engine_id)
        routes = peer.routed.routes if peer is not None and peer.routed is not None else ()
        if peer is not None and any(route.incarnation == card.life for route in routes):
            with trio.move_on_after(_FORGET_S), suppress(TrinamoError):
                await self.forget(peer.agent_name)

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
