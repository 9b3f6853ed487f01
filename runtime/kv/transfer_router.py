"""Which backend moves the blocks: a chain of transfer planes, and what happens when one fails.

`TransferRouter.move` tries the backends that both ends have in the order of the chain, and goes on
over the next one from the first block that is not confirmed. Nothing is reported as done until
every block is. A backend that failed with a peer is left alone until a probe says that it works
again. Blocks stay leased until every attempt has settled (`transfers.py`).

What the chain is comes from the configuration: `chain_of`. The backends themselves are made by
`trinamo.cli`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import attrs
import trio
from typing_extensions import Buffer

from ..config_planes import DataPlaneConfig
from ..errors import (
    ConnectError,
    DeadlineError,
    KilledError,
    OverloadedError,
    ProtocolError,
    RequestError,
    StaleMemoryError,
    TransferError,
    TransportError,
    TrinamoError,
)
from ..planes import DeviceMemory, MemoryRegion, Transfer, TransferPlane, TransferReport
from ..protocol.transfer import Direction, check_blocks, check_compatible
from ..protocol.transfer_offer import decode_offer
from ..transfer_metrics import TransferMetrics
from .transfer_routes import Route, RoutedMemory, RoutedPeer
from .transfers import BlockLeases

__all__ = ["RouterOptions", "TransferRouter", "chain_of", "open_transfer_router"]

_log = logging.getLogger("trinamo.transfer")


def chain_of(config: DataPlaneConfig) -> list[str]:
    """The names of the backends to try, in order; `tcp` is always the last."""
    chain: list[str] = []
    if config.nixl.enabled:
        chain += ["nixl", config.nixl.fallback]
    if config.mooncake.enabled:
        chain.append("mooncake_tcp" if config.mooncake.protocol == "tcp" else "mooncake")
    chain = [name for name in chain if name != "tcp"]
    return [*dict.fromkeys(chain), "tcp"]


@attrs.frozen(kw_only=True)
class RouterOptions:
    """How patient the router is."""

    attempt_s: float = 10.0
    """For one backend, while there is another one to fall back to."""
    drain_s: float = 5.0
    """How long a failed attempt may take to settle before its blocks may be moved again."""
    probe_s: float = 2.0
    """For one probe."""
    probe_interval_s: float = 5.0
    """Between two probes of a backend that failed."""


@attrs.define
class _Job:
    """What is left to move."""

    direction: Direction
    here: Sequence[int]
    there: Sequence[int]
    notify: bytes | None
    ticket: int
    done: int = 0
    """Leading blocks that are confirmed."""
    is_stuck: bool = False
    """Whether a failed attempt still touches the blocks, so that no other one may."""


class TransferRouter:
    """The transfer planes of one process as one. Made by `open_transfer_router`."""

    def __init__(
        self,
        chain: Sequence[TransferPlane],
        leases: BlockLeases | None,
        metrics: TransferMetrics,
        nursery: trio.Nursery,
        options: RouterOptions,
    ) -> None:
        self.chain = list(chain)
        self._leases = leases
        self._metrics = metrics
        self._nursery = nursery
        self._options = options

    # --- memory ----------------------------------------------------------------------------------

    async def register(
        self,
        memory: Buffer | DeviceMemory,
        *,
        block_bytes: int,
        fingerprint: str = "",
        needs_ticket: bool = False,
    ) -> RoutedMemory:
        """Register with every backend that takes it; raises the last one's error if none does."""
        regions: dict[str, MemoryRegion] = {}
        refused: TrinamoError | None = None
        for plane in self.chain:
            try:
                regions[plane.backend] = await plane.register(
                    memory,
                    block_bytes=block_bytes,
                    fingerprint=fingerprint,
                    needs_ticket=needs_ticket,
                )
            except TrinamoError as error:
                refused = error
                _log.warning("%s does not take the memory: %s", plane.backend, error)
        if not regions:
            raise refused or TransferError("there is no transfer backend")
        return RoutedMemory(regions)

    async def deregister(self, memory: RoutedMemory) -> None:
        """Give the memory back everywhere."""
        for plane in self.chain:
            region = memory.regions.get(plane.backend)
            if region is not None:
                await plane.deregister(region)

    # --- peers -----------------------------------------------------------------------------------

    async def connect(self, offer: bytes) -> RoutedPeer:
        """Take what a peer's `RoutedMemory.describe` says and probe every backend we share.

        Raises `RemoteProtocolError` for garbage and `ConnectError` if no backend reaches the peer
        (`StaleMemoryError` if it is not there any more).
        """
        descriptions = decode_offer(offer)
        shared = [plane for plane in self.chain if plane.backend in descriptions]
        peer = RoutedPeer([Route(plane, descriptions[plane.backend]) for plane in shared])
        async with trio.open_nursery() as nursery:
            for route in peer.routes:
                nursery.start_soon(self._try_out, route)
        if not any(route.is_usable for route in peer.routes):
            errors = [route.error for route in peer.routes if route.error is not None]
            if any(isinstance(error, StaleMemoryError) for error in errors):
                raise StaleMemoryError("the peer is not there any more")
            reasons = "; ".join(error.message for error in errors) or "no backend in common"
            raise ConnectError(f"no backend reaches the peer: {reasons}")
        return peer

    async def _try_out(self, route: Route) -> bool:
        """Connect and probe; whether the backend may be used from now on."""
        was_usable = route.is_usable
        try:
            with trio.fail_after(self._options.probe_s):
                await route.probe()
        except trio.TooSlowError:
            route.fail(DeadlineError(f"no answer within {self._options.probe_s:g} s"))
        except TrinamoError as error:
            route.fail(error)
        if route.is_usable != was_usable:
            state = "works" if route.is_usable else f"does not work: {route.error}"
            _log.info("transfers by %s with %s: it %s", route.backend, route.incarnation, state)
        self._metrics.usable(route.backend, route.incarnation, is_usable=route.is_usable)
        if not route.is_usable and not route.is_stale:
            self._watch(route)
        return route.is_usable

    def _watch(self, route: Route) -> None:
        if not route.is_watched:
            route.is_watched = True
            self._nursery.start_soon(self._probe_again, route)

    async def _probe_again(self, route: Route) -> None:
        try:
            while not route.is_usable and not route.is_stale and not route.is_forgotten:
                await trio.sleep(self._options.probe_interval_s)
                if not route.is_forgotten:
                    await self._try_out(route)
        finally:
            route.is_watched = False

    async def forget(self, peer: RoutedPeer) -> None:
        """Discovery says that the peer is gone: its transfers fail, its connections close."""
        for route in peer.routes:
            route.is_forgotten = True
            await route.plane.forget(route.incarnation)
            self._metrics.peer_gone(route.backend, route.incarnation)

    # --- moving ----------------------------------------------------------------------------------

    async def move(
        self,
        direction: Direction,
        memory: RoutedMemory,
        blocks: Sequence[int],
        peer: RoutedPeer,
        peer_blocks: Sequence[int],
        *,
        deadline_s: float,
        notify: bytes | None = None,
        ticket: int = 0,
    ) -> list[TransferReport]:
        """Move the blocks; one report for each backend that moved a part of them.

        Our blocks are leased until nothing touches them any more, also if this is cancelled: then
        the transfer is aborted and drained behind the caller's back. `notify` reaches the peer at
        least once, and never before all blocks have arrived. Raises what the last backend raised;
        `StaleMemoryError` and `RequestError` are the same on every backend and end it at once.
        """
        job = _Job(direction, tuple(blocks), tuple(peer_blocks), notify, ticket)
        check_compatible(memory.description, peer.description)
        check_blocks(job.here, memory.description.block_count, whose="local")
        reports: list[TransferReport] = []
        error: TrinamoError | None = None
        failed: str | None = None
        ends_at = trio.current_time() + deadline_s
        routes = peer.in_order(memory)
        for number, route in enumerate(routes):
            left_s = ends_at - trio.current_time()
            if left_s <= 0:
                break
            if failed is not None:
                self._metrics.fell_back(failed, route.backend)
                _log.warning(
                    "the transfer falls back from %s to %s at block %d of %d: %s",
                    *(failed, route.backend, job.done, len(job.here), error),
                )
            has_other = any(other.is_usable for other in routes[number + 1 :])
            attempt_s = min(left_s, self._options.attempt_s) if has_other else left_s
            try:
                reports.append(await self._attempt(route, memory, job, attempt_s))
                return reports
            except (RequestError, StaleMemoryError, KilledError):
                raise
            except (TransportError, ProtocolError, DeadlineError, OverloadedError) as found:
                if job.is_stuck:
                    raise
                error, failed = found, route.backend
                route.fail(found)
                self._metrics.usable(route.backend, route.incarnation, is_usable=False)
                self._watch(route)
        raise error or ConnectError("no backend reaches the peer")

    async def _attempt(
        self, route: Route, memory: RoutedMemory, job: _Job, attempt_s: float
    ) -> TransferReport:
        """Move what is left over one backend; counts what is confirmed if it fails."""
        with trio.move_on_after(attempt_s) as scope:
            remote = await route.connected()
        if scope.cancelled_caught:
            raise DeadlineError(f"{route.backend} did not connect within {attempt_s:g} s")
        backend, here = route.backend, job.here[job.done :]
        transfer = route.plane.start(
            job.direction,
            memory.regions[backend],
            here,
            remote,
            job.there[job.done :],
            deadline_s=max(0.001, scope.deadline - trio.current_time()),
            notify=job.notify,
            ticket=job.ticket,
        )
        self._metrics.started(backend)
        if self._leases is not None:
            self._leases.follow(transfer, here)
        outcome = "cancelled"
        try:
            report = await transfer.wait()
            outcome = ""
        except TrinamoError as error:
            outcome = error.code
            await self._settle(transfer, route, job)
            job.done += transfer.confirmed_count
            raise
        finally:
            if outcome:
                transfer.abort()
                self._metrics.failed(backend, job.direction, outcome)
        self._metrics.done(report)
        return report

    async def _settle(self, transfer: Transfer, route: Route, job: _Job) -> None:
        """Before blocks are moved again, the attempt that failed must not touch them any more."""
        transfer.abort()
        with trio.move_on_after(self._options.drain_s):
            await transfer.wait_settled()
        if not transfer.is_settled:
            job.is_stuck = True
            raise TransferError(
                f"a failed transfer by {route.backend} has not settled within "
                f"{self._options.drain_s:g} s, so its blocks cannot be moved again"
            )


@asynccontextmanager
async def open_transfer_router(
    chain: Sequence[TransferPlane],
    *,
    metrics: TransferMetrics,
    leases: BlockLeases | None = None,
    options: RouterOptions | None = None,
) -> AsyncIterator[TransferRouter]:
    """Route over `chain` until the block is left. `leases` follow our blocks, if they have a pool.

    The planes and the leases must be open longer than the router.
    """
    async with trio.open_nursery() as nursery:
        try:
            yield TransferRouter(
                chain,
                leases,
                metrics,
                nursery,
                RouterOptions() if options is None else options,
            )
        finally:
            nursery.cancel_scope.cancel()
