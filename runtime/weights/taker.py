"""The taker: finds who has a file, reads it chunk by chunk, and goes on elsewhere after a break.

One holder at a time. Each session has memory of its own, given back before the next begins, so what a
backend may still write for a session that broke off lands nowhere that is read. A chunk counts once
it is on the disk and is what its digest says.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from ..caller.client import Client, Exchange
from ..config.config import Config
from ..config.worker import WeightsConfig
from ..errors import (
    ConfigError,
    CorruptedError,
    DeadlineError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    StalledError,
    TrinamoError,
    UnavailableError,
)
from ..kv.transfer.router import TransferRouter
from ..kv.transfer.routes import RoutedMemory, RoutedPeer
from ..planes import ControlPlane
from ..protocol.discovery.instances import EndpointName
from ..protocol.transfer.description import Direction
from .files import PartialFile
from .lender import WeightsMetrics
from .messages import (
    WEIGHTS_PREFIX,
    WINDOW,
    Ask,
    HolderOpened,
    Item,
    LentChunk,
    Manifest,
    Want,
    WeightsCard,
    decode_weights_card,
    region_fingerprint,
)

_log = logging.getLogger("trinamo.weights")
_PAUSE_MIN_S: Final = 0.2
_PAUSE_MAX_S: Final = 5.0
_SETTLE_S: Final = 5.0
_ITEM: Any = Item  # A union, which the checkers do not take for a type of items.


def weights_endpoint(namespace: str) -> EndpointName:
    """Where the holders of a namespace lend."""
    return EndpointName(namespace, "weights", "lend")


@attrs.frozen
class MissingFile:
    model: str
    namespace: str
    sha256: str | None = None
    """Pinned by whoever configured it; None: what the cluster's members call this model is taken."""


@attrs.frozen
class Offer:
    sha256: str
    instance_id: str
    card: WeightsCard


@attrs.frozen
class DownloadProgress:
    """How far it is."""

    done: int
    """Bytes that are here and right."""
    total: int
    holder: str


async def find_offers(control: ControlPlane, wanted: MissingFile) -> list[Offer]:
    """Who has the file, oldest first; what makes no sense is passed over.

    Raises `ConfigError` if several files go by the model's name and none is pinned, and what the
    control plane raises.
    """
    prefix = WEIGHTS_PREFIX if wanted.sha256 is None else f"{WEIGHTS_PREFIX}{wanted.sha256}/"
    found: list[Offer] = []
    for entry in (await control.range(prefix)).entries:
        try:
            offer = Offer(*decode_weights_card(entry.key, entry.value))
        except RemoteProtocolError as error:
            _log.warning("%s", error.message)
            continue
        is_it = wanted.sha256 is not None or offer.card.model == wanted.model
        if is_it and offer.card.namespace == wanted.namespace:
            found.append(offer)
    digests = sorted({each.sha256 for each in found})
    if len(digests) > 1:
        raise ConfigError(
            f"peers hold {len(digests)} different files of {wanted.model!r}; set"
            f" worker.model_sha256 to the one that is meant: {', '.join(digests[:4])}"
        )
    return found


class _Pausing:
    """Whom to ask next: a holder that failed after all others, and not again at once."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._liars: set[str] = set()

    def failed(self, instance_id: str, error: TrinamoError, now: float) -> None:
        count = self._failures[instance_id] = self._failures.get(instance_id, 0) + 1
        pause_s = min(_PAUSE_MAX_S, _PAUSE_MIN_S * 2**count)
        self._not_before[instance_id] = now + pause_s
        if isinstance(error, (CorruptedError, RemoteProtocolError)):
            self._liars.add(instance_id)

    def choose(self, offers: list[Offer], now: float) -> Offer | None:
        """The one with the fewest failures whose pause is over; None if there is none."""
        ready = [
            each
            for each in offers
            if each.instance_id not in self._liars
            and self._not_before.get(each.instance_id, now) <= now
        ]
        return min(ready, key=lambda each: self._failures.get(each.instance_id, 0), default=None)

    def has_hope(self, offers: list[Offer]) -> bool:
        """Whether anybody but liars offers it."""
        return any(each.instance_id not in self._liars for each in offers)


@attrs.define(eq=False, kw_only=True)
class Taker:
    """Takes one file; `router` is over the backends of this process. Owns no task."""

    control: ControlPlane
    client: Callable[[EndpointName], Awaitable[Client]]
    router: TransferRouter
    config: Config
    metrics: WeightsMetrics
    who: str = ""
    """For the holder's people."""
    report: Callable[[DownloadProgress], None] = lambda _: None

    @property
    def _section(self) -> WeightsConfig:
        return self.config.weights

    async def take(self, wanted: MissingFile, partial: PartialFile) -> None:
        """Fill `partial` and commit it.

        Raises `UnavailableError` once nobody has brought a chunk for `weights.patience_s`,
        `CorruptedError` if all who offer it lend something else, `ConfigError` for a file that is
        too large or does not fit on the disk. Whatever it raises, and cancelled, what is on the disk
        stays for the next attempt.
        """
        client = await self.client(weights_endpoint(self.config.worker.namespace))
        pausing = _Pausing()
        began_at = gained_at = trio.current_time()
        error: TrinamoError | None = None
        while True:
            count = partial.byte_count
            offers: list[Offer] = []
            try:
                offers = await find_offers(self.control, wanted)
            except ConfigError:
                raise
            except TrinamoError as away:
                _log.warning("the control plane does not say who has weights: %s", away)
            offer = pausing.choose(offers, trio.current_time())
            if offer is not None:
                error = await self._try(client, offer, partial)
                if error is None:
                    self.metrics.duration.value = trio.current_time() - began_at
                    return
                pausing.failed(offer.instance_id, error, trio.current_time())
                self.metrics.failures.tally(error.code).value += 1
                _log.warning("weights from %s: %s; going on elsewhere", offer.instance_id, error)
            if partial.byte_count > count or (offers and isinstance(error, OverloadedError)):
                # A holder that is there and busy is waited for.
                gained_at = trio.current_time()
            if offers and not pausing.has_hope(offers) and error is not None:
                raise CorruptedError(f"nobody lends what {wanted.model!r} should be: {error}")
            if trio.current_time() - gained_at >= self._section.patience_s:
                raise UnavailableError(
                    f"no peer lends the weights of {wanted.model!r}: {error or 'nobody has them'}"
                )
            if offer is None:
                await trio.sleep(_PAUSE_MIN_S)

    async def _try(self, client: Client, offer: Offer, partial: PartialFile) -> TrinamoError | None:
        """Take what is left from one holder; what went wrong, or None if the file is complete."""
        error: TrinamoError | None = None
        try:
            ask = Ask(sha256=offer.sha256, taker=self.who)
            async with client.exchange(ask, _ITEM, instance_id=offer.instance_id) as exchange:
                await self._take_all(exchange, offer, partial)
                await exchange.finish()
                with trio.move_on_after(self._section.stall_timeout_s):
                    async for _ in exchange:
                        raise RemoteProtocolError("the holder lends what nobody wants")
        except ConfigError:
            raise
        except TrinamoError as found:
            error = found
        if not partial.is_complete:
            return error
        # However its holder has ended: all of it is here.
        try:
            await partial.commit()
        except CorruptedError as found:
            return found
        return None

    async def _take_all(self, exchange: Exchange[Item], offer: Offer, partial: PartialFile) -> None:
        opened = await self._next(exchange)
        if not isinstance(opened, HolderOpened):
            raise RemoteProtocolError("the holder lends before it says what")
        manifest = Manifest.of(offer.sha256, opened)
        if manifest.byte_count > self._section.file_bytes_max:
            raise ConfigError(
                f"the weights of {offer.card.model!r} are {manifest.byte_count} bytes;"
                f" weights.file_bytes_max is {self._section.file_bytes_max}"
            )
        await partial.begin(manifest)
        async with (
            self._memory_of(manifest) as (memory, window),
            self._connected(opened.memory) as peer,
        ):
            asked = partial.count
            while not partial.is_complete:
                # So many chunks ahead of those that are done.
                while asked < min(manifest.count, partial.count + WINDOW):
                    await exchange.send(Want(asked, partial.count))
                    asked += 1
                lent = await self._next(exchange)
                if not isinstance(lent, LentChunk) or lent.chunk != partial.count:
                    raise RemoteProtocolError("the holder lends another chunk than was wanted")
                block = lent.chunk % WINDOW
                await self._read(memory, block, peer, lent)
                start = block * manifest.chunk_bytes
                length = manifest.length(lent.chunk)
                await partial.append(window[start : start + length])
                self.metrics.bytes.tally("taken").value += length
                self.report(
                    DownloadProgress(partial.byte_count, manifest.byte_count, offer.instance_id)
                )

    async def _next(self, exchange: Exchange[Item]) -> Item:
        with trio.move_on_after(self._section.stall_timeout_s):
            try:
                return await exchange.__anext__()
            except StopAsyncIteration:
                raise RemoteProtocolError("the holder ended before the file was complete") from None
        raise StalledError(f"no chunk came for {self._section.stall_timeout_s:g} s")

    async def _read(
        self, memory: RoutedMemory, block: int, peer: RoutedPeer, lent: LentChunk
    ) -> None:
        try:
            await self.router.move(
                Direction.READ,
                memory,
                [block],
                peer,
                [lent.block],
                deadline_s=self._section.stall_timeout_s,
                ticket=lent.ticket,
            )
        except RequestError as error:
            raise RemoteProtocolError(f"what was lent cannot be read: {error}") from error
        except DeadlineError as error:
            raise StalledError(f"a chunk was not read in time: {error}") from error

    @asynccontextmanager
    async def _memory_of(
        self, manifest: Manifest
    ) -> AsyncIterator[tuple[RoutedMemory, memoryview]]:
        """Memory for the chunks of one session, registered until it is left."""
        window = memoryview(mmap.mmap(-1, manifest.chunk_bytes * WINDOW))
        memory = await self.router.register(
            window,
            block_bytes=manifest.chunk_bytes,
            fingerprint=region_fingerprint(manifest.chunk_bytes),
            needs_ticket=True,
        )
        try:
            yield memory, window
        finally:
            # What was abandoned may go on for a moment; nobody reads this memory again.
            with trio.move_on_after(_SETTLE_S):
                await self.router.deregister(memory)

    @asynccontextmanager
    async def _connected(self, offer: bytes) -> AsyncIterator[RoutedPeer]:
        peer = await self.router.connect(offer)
        try:
            yield peer
        finally:
            with trio.move_on_after(_SETTLE_S):
                await self.router.forget(peer)
