"""Which backend moves the blocks: a chain of transfer planes, and what happens when one fails.

`TransferRouter.move` tries the backends that both ends have in the order of the chain, and goes on
over the next one from the first block that is not confirmed. Nothing is reported as done until
every block is. A backend that failed with a peer, or stands still, is left alone until a probe says
that it works again; a caller's own time that is up says nothing about the backend. Blocks stay leased until every attempt has settled (`leases.py`).

How patient it is stands in `data_plane.transfer`. Peers are found and kept by
`engine.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from ...config.planes import TransferConfig
from ...errors import (
    ConnectError,
    DeadlineError,
    KilledError,
    OverloadedError,
    ProtocolError,
    RequestError,
    StaleMemoryError,
    StalledError,
    TransferError,
    TransportError,
    TrinamoError,
)
from ...nurseries import open_nursery
from ...planes import (
    Registrable,
    RemoteMemory,
    Transfer,
    TransferPlane,
    TransferReport,
)
from ...protocol.transfer.description import (
    BLOCKS_MAX,
    Direction,
    check_blocks,
    check_compatible,
    decode_descriptions,
)
from .leases import BlockLeases
from .metrics import TransferMetrics
from .routes import (
    BackendStatistics,
    Route,
    RoutedMemory,
    RoutedPeer,
    TransferStatistics,
    register_with,
)

HEAD_START_SHARE: Final = 0.25
_log = logging.getLogger("trinamo.transfer")
_LOOKS: Final = 8
"""How often a transfer is looked at before it counts as hanging."""


@attrs.define
class RemainingMove:
    """What is left of one move."""

    direction: Direction
    here: Sequence[int]
    there: Sequence[int]
    notify: bytes | None
    ticket: int
    ends_at: float
    """When the caller's time is up."""
    has_other: bool = False
    """Whether there is a backend to fall back to that works."""
    done: int = 0
    """Leading blocks that are confirmed."""
    is_stuck: bool = False
    """Whether a failed attempt still touches the blocks, so that no other one may."""


async def reached(route: Route, job: RemainingMove, stall_s: float) -> RemoteMemory:
    """The peer's memory over one backend, waited for as `progressing` waits for blocks."""
    began_at = trio.current_time()
    with trio.move_on_at(min(job.ends_at, began_at + stall_s) if job.has_other else job.ends_at):
        return await route.connected()
    now = trio.current_time()
    has_stalled = now < job.ends_at or now - began_at >= stall_s
    kind = StalledError if has_stalled else DeadlineError
    raise kind(f"{route.backend} did not connect within {now - began_at:g} s")


async def progressing(
    transfer: Transfer, route: Route, job: RemainingMove, stall_s: float
) -> TransferReport:
    """The report; `StalledError` if no block was newly confirmed for about `stall_s` seconds.

    What still moves must not be given up for its size: a fallback is for backends that hang. Where
    there is none, the attempt ends before the caller's time is up only if its connection brought
    nothing either, and was closed: the next attempt has a new one. Another transfer may have found
    that out, whose `StalledError` then ends this attempt too.
    """
    confirmed, since = transfer.confirmed_count, trio.current_time()
    while (now := trio.current_time()) < job.ends_at:
        if now - since >= stall_s and (route.hang_up(stall_s) or job.has_other):
            break
        with trio.move_on_at(min(job.ends_at, now + stall_s / _LOOKS)):
            try:
                return await transfer.wait()
            except StalledError:
                raise
            except DeadlineError:
                break  # The plane's own timer, at the same time as ours.
        if transfer.confirmed_count > confirmed:
            confirmed, since = transfer.confirmed_count, trio.current_time()
    left = len(job.here) - job.done - transfer.confirmed_count
    if trio.current_time() - since >= stall_s:
        raise StalledError(f"{route.backend} confirmed no block for {stall_s:g} s; {left} are left")
    raise DeadlineError(f"{left} blocks were not moved in time")


class TransferRouter:
    """The transfer planes of one process as one. Made by `open_transfer_router`."""

    def __init__(
        self,
        chain: Sequence[TransferPlane],
        leases: BlockLeases | None,
        metrics: TransferMetrics,
        nursery: trio.Nursery,
        section: TransferConfig,
    ) -> None:
        self.chain = list(chain)
        self._leases = leases
        self._metrics = metrics
        self._nursery = nursery
        self._section = section
        self._peers: dict[RoutedPeer, None] = {}
        self._refused: dict[str, str] = {}
        for plane in self.chain:
            metrics.opened(plane.backend, is_open=True)

    # --- memory ----------------------------------------------------------------------------------

    async def register(
        self,
        memory: Registrable,
        *,
        block_bytes: int,
        fingerprint: str = "",
        needs_ticket: bool = False,
        parts: int = 1,
    ) -> RoutedMemory:
        """Register with every backend that takes it; `RequestError` says why none does."""
        found, refused = await register_with(
            self.chain,
            memory,
            block_bytes=block_bytes,
            fingerprint=fingerprint,
            needs_ticket=needs_ticket,
            parts=parts,
        )
        self._refused |= refused
        if not found.regions:
            why = "; ".join(f"{name} {told}" for name, told in self._refused.items())
            raise RequestError(f"no transfer backend takes the memory: {why or 'there is none'}")
        return found

    async def deregister(self, memory: RoutedMemory) -> None:
        for plane in self.chain:
            region = memory.regions.get(plane.backend)
            if region is not None:
                await plane.deregister(region)

    # --- peers -----------------------------------------------------------------------------------

    async def connect(self, offer: bytes) -> RoutedPeer:
        """Take what a peer's `RoutedMemory.describe` says and probe every backend we share.

        The peer is kept, and backends that failed are probed again, until `forget`; if this fails
        or is cancelled, nothing of it is kept. Raises `RemoteProtocolError` for garbage and
        `ConnectError` if no backend reaches the peer (`StaleMemoryError` if it is not there any
        more).
        """
        descriptions = decode_descriptions(offer)
        shared = [plane for plane in self.chain if plane.backend in descriptions]
        peer = RoutedPeer([Route(plane, descriptions[plane.backend]) for plane in shared])
        self._peers[peer] = None
        is_kept = False
        try:
            is_kept = await self.probe(peer)
            errors = [route.error for route in peer.routes if route.error is not None]
        finally:
            if not is_kept:
                self._drop(peer)
                self._nursery.start_soon(self._leave, peer)
        if is_kept:
            return peer
        if any(isinstance(error, StaleMemoryError) for error in errors):
            raise StaleMemoryError("the peer is not there any more")
        reasons = "; ".join(error.message for error in errors)
        raise ConnectError(f"no backend reaches the peer: {reasons}")

    async def probe(self, peer: RoutedPeer) -> bool:
        """Whether the peer answers over any backend now; takes `probe_timeout_s` at most.

        Once one does, those before it in the chain have `HEAD_START_SHARE` of that left, and those behind it nothing,
        as addresses have in RFC 8305. Who has not answered by then is probed behind the caller's back.
        """
        pending = list(peer.routes)
        async with open_nursery() as nursery:

            async def try_out(route: Route) -> None:
                await self._try_out(route)
                pending.remove(route)
                left = [each for each in peer.routes if each in pending or each.is_usable]
                if len(left) > len(pending):
                    share = HEAD_START_SHARE if left[0] in pending else 0.0
                    ends_at = trio.current_time() + share * self._section.probe_timeout_s
                    nursery.cancel_scope.deadline = min(nursery.cancel_scope.deadline, ends_at)

            for route in peer.routes:
                nursery.start_soon(try_out, route)
        for route in pending:
            self._tell(route)
        return any(route.is_usable for route in peer.routes)

    async def _try_out(self, route: Route) -> bool:
        was_usable = route.is_usable
        try:
            with trio.fail_after(self._section.probe_timeout_s):
                await route.probe()
        except trio.TooSlowError:
            route.fail(DeadlineError(f"no answer within {self._section.probe_timeout_s:g} s"))
        except TrinamoError as error:
            route.fail(error)
        if route.is_usable != was_usable:
            state = "works" if route.is_usable else f"does not work: {route.error}"
            _log.info("transfers by %s with %s: it %s", route.backend, route.incarnation, state)
        self._tell(route)
        return route.is_usable

    def _tell(self, route: Route) -> None:
        """Whether it is usable may have changed; probe it again and again if it is not."""
        if route.is_forgotten:  # While we waited. Its series have ended and must not come back.
            route.is_usable = False
            return
        self._metrics.usable(route.backend, route.incarnation, is_usable=route.is_usable)
        if not (route.is_usable or route.is_stale or route.probing):
            scope = route.probing = trio.CancelScope()

            async def probe_again() -> None:
                with scope:
                    while not (route.is_usable or route.is_stale):
                        if route.error is not None:  # Else its first probe was not waited for.
                            await trio.sleep(self._section.probe_interval_s)
                        await self._try_out(route)
                route.probing = None

            self._nursery.start_soon(probe_again)

    async def forget(self, peer: RoutedPeer) -> None:
        """Discovery says that the peer is gone: its transfers fail, its connections close."""
        self._drop(peer)
        for route in peer.routes:
            await route.plane.forget(route.incarnation)

    async def _leave(self, peer: RoutedPeer) -> None:
        """Close what the planes have open to a peer that was dropped, unless another one uses it."""
        for route in peer.routes:
            if not self._is_used(route):
                await route.plane.forget(route.incarnation)

    def _is_used(self, route: Route) -> bool:
        return any(route.is_same_way(other) for peer in self._peers for other in peer.routes)

    def _drop(self, peer: RoutedPeer) -> None:
        """Its routes are not used or probed any more, from now on."""
        self._peers.pop(peer, None)
        for route in peer.routes:
            route.is_forgotten = True
            if route.probing:
                route.probing.cancel()
            route.fail(ConnectError(f"peer {route.incarnation} was forgotten"))
            if not self._is_used(route):
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
        """Move the blocks, in transfers of at most `BLOCKS_MAX`; one report for each that moved any.

        Our blocks are leased until nothing touches them any more, also if this is cancelled: then
        the transfer is aborted and drained behind the caller's back, as it is when `deadline_s` are
        over, which is a `DeadlineError` and no fault of a backend's. `notify`, at most
        `NOTIFY_BYTES_MAX`, reaches the peer's `Grant.completed`, never before all blocks have
        arrived. Raises what the last backend raised;
        `StaleMemoryError` and `RequestError` are the same on every backend and end it at once.
        """
        ends_at = trio.current_time() + deadline_s
        job = RemainingMove(direction, tuple(blocks), tuple(peer_blocks), notify, ticket, ends_at)
        check_compatible(memory.description, peer.description)
        check_blocks(job.here, memory.description.block_count, whose="local", blocks_max=None)
        reports: list[TransferReport] = []
        failed: str | None = None
        routes = peer.in_order(memory)
        error: TrinamoError | None
        error = None if routes else ConnectError("no backend reaches the peer")
        for number, route in enumerate(routes):
            if trio.current_time() >= ends_at:
                break
            if failed is not None:
                self._metrics.fell_back(failed, route.backend)
                again = failed == route.backend
                way = "connects again by" if again else f"falls back from {failed} to"
                text = "the transfer %s %s at block %d of %d: %s"
                _log.warning(text, way, route.backend, job.done, len(job.here), error)
            job.has_other = any(other.is_usable for other in routes[number + 1 :])
            try:
                # All that is left over this backend, be it the notification alone.
                reports.append(await self._attempt(route, memory, job))
                while job.done < len(job.here):
                    reports.append(await self._attempt(route, memory, job))
                return reports
            except (RequestError, StaleMemoryError, KilledError):
                raise
            except (TransportError, ProtocolError, DeadlineError, OverloadedError) as found:
                if isinstance(found, DeadlineError) and not isinstance(found, StalledError):
                    raise
                error, failed = found, route.backend
                route.fail(found)
                self._tell(route)
                if job.is_stuck:
                    raise
                if isinstance(found, StalledError) and not job.has_other:
                    # The same backend again, over a new connection: the old one was closed. This
                    # cannot go round quickly, for an attempt that stalls takes `attempt_timeout_s`.
                    routes.insert(number + 1, route)
        raise error or DeadlineError(f"nothing was moved within {deadline_s:g} s")

    def statistics(self) -> TransferStatistics:
        metrics, chain = self._metrics, list[BackendStatistics]()
        for backend in (plane.backend for plane in self.chain):
            routes = [r for peer in self._peers for r in peer.routes if r.backend == backend]
            errors = [r.error.message for r in routes if r.error is not None and not r.is_usable]
            chain.append(
                BackendStatistics(
                    backend=backend,
                    peers=len(routes),
                    usable_peers=sum(route.is_usable for route in routes),
                    in_flight=metrics.in_flight.get(backend, 0),
                    done=metrics.done_count[backend],
                    done_bytes=metrics.done_bytes[backend],
                    problem=self._refused.get(backend, errors[0] if errors else ""),
                )
            )
        return TransferStatistics(
            chain=chain,
            peers=len(self._peers),
            fallbacks=metrics.fallback_count,
            leased=0 if self._leases is None else self._leases.in_flight_count,
            quarantined_blocks=metrics.quarantined_count,
        )

    async def _attempt(
        self, route: Route, memory: RoutedMemory, job: RemainingMove
    ) -> TransferReport:
        """Move what is left, or as much as one transfer may; counts what is confirmed."""
        backend, until = route.backend, job.done + BLOCKS_MAX
        here, there = job.here[job.done : until], job.there[job.done : until]
        is_last = until >= len(job.here)
        remote = await reached(route, job, self._section.attempt_timeout_s)

        def start() -> Transfer:
            return route.plane.start(
                job.direction,
                memory.regions[backend],
                here,
                remote,
                there,
                deadline_s=max(0.001, job.ends_at - trio.current_time()),
                notify=job.notify if is_last else None,
                ticket=job.ticket,
            )

        transfer = start() if self._leases is None else self._leases.start(start, here, job.ticket)
        self._metrics.started(backend)
        outcome = "cancelled"
        try:
            report = await progressing(transfer, route, job, self._section.attempt_timeout_s)
            outcome = ""
            job.done += len(here)
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

    async def _settle(self, transfer: Transfer, route: Route, job: RemainingMove) -> None:
        """Before blocks are moved again, the attempt that failed must not touch them any more.

        When the caller's time is up they are not, and whoever leased them waits for it.
        """
        transfer.abort()
        with trio.move_on_at(
            min(job.ends_at, trio.current_time() + self._section.settle_timeout_s)
        ):
            await transfer.wait_settled()
        job.is_stuck = not transfer.is_settled
        if job.is_stuck and trio.current_time() < job.ends_at:
            raise TransferError(
                f"a failed transfer by {route.backend} has not settled within "
                f"{self._section.settle_timeout_s:g} s, so its blocks cannot be moved again"
            )


@asynccontextmanager
async def open_transfer_router(
    chain: Sequence[TransferPlane],
    *,
    metrics: TransferMetrics,
    leases: BlockLeases | None = None,
    section: TransferConfig | None = None,
) -> AsyncIterator[TransferRouter]:
    """Route over `chain` until the block is left. `leases` follow our blocks, if they have a pool.

    The planes and the leases must be open longer than the router.
    """
    async with open_nursery() as nursery:
        try:
            yield TransferRouter(chain, leases, metrics, nursery, section or TransferConfig())
        finally:
            nursery.cancel_scope.cancel()
