"""The holder: files that are offered to the cluster, and lent chunk by chunk.

A chunk is read into a block of registered memory, and the block is granted for READ to the one who
asked; bounded are the peers at once, the chunks each of them holds, and the bytes per second of all
together. A peer that only reads can harm nobody, so a block is used again as soon as its ticket is
revoked: who still reads it finds that it is not the chunk.
"""

from __future__ import annotations

import logging
import mmap
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from ..config.worker import WeightsConfig
from ..context import Context
from ..errors import (
    OverloadedError,
    RemoteProtocolError,
    TransferError,
    UnavailableError,
)
from ..kv.transfer.routes import RoutedMemory, register_with
from ..metrics.tallies import Registry
from ..planes import TransferPlane
from .files import Hop, read_chunk
from .messages import (
    WINDOW,
    Ask,
    HolderOpened,
    Item,
    LentChunk,
    Manifest,
    Want,
    WeightsCard,
    region_fingerprint,
)


class WeightsMetrics:
    def __init__(self, registry: Registry) -> None:
        self.bytes = registry.counts(
            "weights_bytes", "Bytes of model files, lent to peers or taken from them", "direction"
        )
        """A chunk is `lent` once it was staged for a peer, `taken` once it was right and is on the disk."""
        self.failures = registry.counts(
            "weights_failures",
            "Breaks while a file was taken, each gone on elsewhere or later",
            "reason",
        )
        """By the code of the error."""
        self.lending = registry.count(
            "weights_peers", "Peers that take a file from here", may_fall=True
        )
        self.duration = registry.count(
            "weights_fetch_seconds",
            "How long it took to take our own model's file, breaks included",
            may_fall=True,
        )


_BURST_S: Final = 0.1
"""What was not used is kept for so long, so that a late timer costs no bandwidth."""


class Pace:
    """Lets `bytes_per_s` pass, and a tenth of a second's worth at once after a pause."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def reserve(self, byte_count: int, now: float) -> float:
        """Take the next place; the time from which these bytes may pass. Never waits."""
        at = max(self._free_at, now - _BURST_S)
        self._free_at = at + byte_count / self._bytes_per_s
        return at

    async def take(self, byte_count: int) -> None:
        """Wait until these bytes may pass. Cancelled, their time is lost to the others."""
        await trio.sleep_until(self.reserve(byte_count, trio.current_time()))


_log = logging.getLogger("trinamo.weights")
_TICKET_BITS: Final = 62


@attrs.frozen
class HeldFile:
    path: Path
    model: str


@attrs.define(eq=False)
class _Loan:
    """One peer that takes a file now."""

    taker: str
    manifest: Manifest
    held: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    """By chunk, the block that has it and the ticket for it."""
    done: int = 0


async def register_window(
    planes: Sequence[TransferPlane], section: WeightsConfig
) -> tuple[RoutedMemory, memoryview]:
    """The memory that chunks are lent through: a block for each chunk that may be lent at once.

    Raises `TransferError` if no backend takes it.
    """
    # Not touched before it is used, so that a holder whom nobody asks pays nothing.
    window = memoryview(mmap.mmap(-1, section.chunk_bytes * WINDOW * section.peers_max))
    memory, _ = await register_with(
        planes,
        window,
        block_bytes=section.chunk_bytes,
        fingerprint=region_fingerprint(section.chunk_bytes),
        needs_ticket=True,
    )
    if not memory.regions:
        raise TransferError("no transfer backend takes memory for weights")
    return memory, window


class Lender:
    """Lends the files that are `add`ed, once it is `open_with` memory. Owns no task."""

    def __init__(
        self,
        section: WeightsConfig,
        metrics: WeightsMetrics,
        rng: random.Random,
        *,
        hop: Hop,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._section, self._metrics, self._rng = section, metrics, rng
        self._hop, self._is_draining = hop, is_draining
        self._pace = Pace(section.bytes_per_second_max)
        self._files: dict[str, tuple[HeldFile, Manifest]] = {}
        self._loans: dict[str, _Loan] = {}
        self._free = list(range(WINDOW * section.peers_max))
        self._memory: RoutedMemory | None = None
        self._window = memoryview(b"")

    def open_with(self, memory: RoutedMemory, window: memoryview) -> None:
        """Lend through this memory, as `register_window` made it."""
        self._memory, self._window = memory, window

    def add(self, file: HeldFile, manifest: Manifest) -> None:
        self._files[manifest.sha256] = (file, manifest)

    def cards(self, namespace: str) -> list[tuple[str, WeightsCard]]:
        """What to publish: each file's digest and card."""
        return [
            (
                sha256,
                WeightsCard(model=file.model, byte_count=manifest.byte_count, namespace=namespace),
            )
            for sha256, (file, manifest) in self._files.items()
        ]

    def describe(self) -> Mapping[str, Any]:
        """What is held, and who takes it: for `/health` and `trinamo status`."""
        return {
            "held": [
                {"model": file.model, "sha256": sha256, "byte_count": manifest.byte_count}
                for sha256, (file, manifest) in self._files.items()
            ],
            "lent": [
                {
                    "taker": loan.taker,
                    "sha256": loan.manifest.sha256,
                    "done": loan.done,
                    "count": loan.manifest.count,
                }
                for loan in self._loans.values()
            ],
        }

    async def lend(
        self, ask: Ask, context: Context, wants: AsyncIterator[Want]
    ) -> AsyncGenerator[Item, None]:
        """One exchange, for `Runtime.serve_bidirectional`: what was lent is taken back at its end.

        Raises `OverloadedError` at `weights.peers_max`, `UnavailableError` for a file that is not
        held, and while shutting down, `RemoteProtocolError` for a taker that asks for what it may not.
        """
        self._check_stays()
        found = self._files.get(ask.sha256)
        if found is None or self._memory is None:
            raise UnavailableError("this worker does not hold these weights")
        if len(self._loans) >= self._section.peers_max:
            raise OverloadedError(
                "as many peers as may are taking weights from here",
                bound="weights.peers_max",
                value=self._section.peers_max,
            )
        file, manifest = found
        loan = self._loans[context.id] = _Loan(ask.taker, manifest)
        self._metrics.lending.value = len(self._loans)
        try:
            yield HolderOpened(
                byte_count=manifest.byte_count,
                chunk_bytes=manifest.chunk_bytes,
                digests=manifest.digests,
                memory=self._memory.describe(),
            )
            async for want in wants:
                self._check_stays()
                if (
                    want.chunk >= manifest.count
                    or want.chunk < want.done
                    or want.chunk in loan.held
                ):
                    raise RemoteProtocolError(
                        f"chunk {want.chunk} after {want.done} makes no sense"
                    )
                loan.done = max(loan.done, want.done)
                # Those that are done are free before the next one.
                self._take_back(loan, want.done, self._memory)
                if len(loan.held) >= WINDOW:
                    raise RemoteProtocolError(f"more than {WINDOW} chunks are wanted at once")
                block = self._free.pop()
                loan.held[want.chunk] = (block, 0)
                length = manifest.length(want.chunk)
                await self._pace.take(length)
                start = block * manifest.chunk_bytes
                offset = want.chunk * manifest.chunk_bytes
                into = self._window[start : start + length]
                await self._hop(partial(read_chunk, file.path, offset, into))
                ticket = self._rng.getrandbits(_TICKET_BITS) + 1
                loan.held[want.chunk] = (block, ticket)
                self._memory.grant(ticket, [block], may_write=False)
                self._metrics.bytes.tally("lent").value += length
                yield LentChunk(chunk=want.chunk, block=block, ticket=ticket)
        finally:
            del self._loans[context.id]
            self._metrics.lending.value = len(self._loans)
            self._take_back(loan, manifest.count, self._memory)

    def _check_stays(self) -> None:
        if self._is_draining():
            raise UnavailableError("this worker is shutting down")

    def _take_back(self, loan: _Loan, before: int, memory: RoutedMemory) -> None:
        for chunk in [each for each in loan.held if each < before]:
            block, ticket = loan.held.pop(chunk)
            if ticket:
                memory.revoke(ticket)
            self._free.append(block)
