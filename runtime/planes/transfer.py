"""The transfer plane: blocks of registered memory move between two processes.

A process *registers* memory, *describes* a region as bytes and hands the description to its peer
by any other plane. The peer *connects* to what was described and then *starts* transfers: READ
takes blocks from there, WRITE puts blocks there; the other side's program is not asked each time.

A transfer has a lifecycle of its own, because some backends cannot stop one: it outlives the task
that waits for it. Two facts must never be mixed up:

* **done**: all blocks arrived, and were verified where the backend verifies; `wait` returns.
* **settled**: this transfer touches no byte of our memory any more, whatever came of it. Only then
  may our blocks of a failed or abandoned transfer be used again. `runtime/kv/transfer/leases.py`
  keeps them leased until then, and quarantines them if it takes too long.

There is one plane, which owns the regions and the transfers of a process. How bytes move is up to its
`Mover`, one for each technology. Each side frees only its own blocks. The descriptions and their
bounds are in `protocol/transfer/description.py`; a chain of planes with fallback is
`kv/transfer/router.py`.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Generic

import attrs
import trio
from typing_extensions import TypeVar

from ..errors import (
    DeadlineError,
    DisconnectedError,
    KilledError,
    StaleMemoryError,
    TrinamoError,
    error_from_wire,
)
from ..nurseries import open_nursery
from ..protocol.transfer.description import (
    Direction,
    MemoryDescription,
    check_transfer,
    decode_description,
)
from .regions import MemoryRegion, Registrable, RemoteMemory

_log = logging.getLogger("trinamo.transfer")
RegionT = TypeVar("RegionT", bound=MemoryRegion, default=Any)


@attrs.frozen(kw_only=True)
class TransferReport:
    """What a transfer that is done did."""

    backend: str
    """Such as `tcp`."""
    path: str
    """How the bytes went, such as `stream`; a backend names its own."""
    direction: Direction
    block_count: int
    """As who was asked counts them: planes the ranges, `EngineTransfers` the blocks it completed."""
    byte_count: int
    duration_s: float
    is_verified: bool
    """Whether a checksum of every block was compared, or the tag of all that went sealed."""


def _own(blocks: Sequence[int]) -> Sequence[int]:
    return tuple(blocks)


@attrs.define(kw_only=True, eq=False, slots=False)
class Transfer:
    """One transfer under way or over. Never cancelled by the end of a task that waits for it.

    Raises what `TransferPlane.start` says for what cannot be moved. Its mover calls `confirm` as
    blocks arrive, `succeed` or `fail`, and `settle`.
    """

    direction: Direction
    local: Any
    """The region of ours, of the mover's own kind."""
    local_blocks: Sequence[int] = attrs.field(converter=_own)
    remote: Any
    """The `RemoteMemory` that the mover has made of the peer's region."""
    remote_blocks: Sequence[int] = attrs.field(converter=_own)
    deadline_s: float
    notify: bytes | None = None
    ticket: int = 0
    backend: str = ""
    path: str = ""
    let_go: Callable[[], bool] = attrs.field(default=lambda: True, init=False)
    """Called once, when it is over: let go of our memory; whether that was all, and it is settled."""
    on_settled: Callable[[], None] = attrs.field(default=lambda: None, init=False)
    was_admitted: bool = attrs.field(default=True, init=False)
    """False until the peer has admitted the first block, where the mover waits for that: it has
    touched nothing before."""
    confirmed_count: int = attrs.field(default=0, init=False)
    """How many leading blocks of the list are certain, in the order given.

    A transfer that fails may be resumed by another one from there. A backend that learns nothing before the
    end says 0 until then."""
    _report: TransferReport | None = attrs.field(default=None, init=False)
    _error: TrinamoError | None = attrs.field(default=None, init=False)
    _over: trio.Event = attrs.field(factory=trio.Event, init=False)
    _settled: trio.Event = attrs.field(factory=trio.Event, init=False)
    _scope: trio.CancelScope | None = attrs.field(default=None, init=False)
    _started_at: float = attrs.field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        if self.local.access.is_withdrawn:
            raise StaleMemoryError("the local region was deregistered")
        check_transfer(
            self.direction,
            self.local.description,
            self.local_blocks,
            self.remote.description,
            self.remote_blocks,
            notify=self.notify,
            ticket=self.ticket,
        )

    @property
    def there(self) -> MemoryDescription:
        """What the peer said of its region."""
        described: MemoryDescription = self.remote.description
        return described

    @property
    def block_count(self) -> int:
        return len(self.local_blocks)

    @property
    def byte_count(self) -> int:
        return self.block_count * self.there.block_bytes

    @property
    def is_over(self) -> bool:
        """Whether `wait` has an answer. May be read from any thread."""
        return self._error is not None or self._report is not None

    @property
    def is_settled(self) -> bool:
        """Whether it touches no byte of our memory any more."""
        return self._settled.is_set()

    async def wait(self) -> TransferReport:
        """Return once it is done; raise the one error that ended it otherwise.

        `DeadlineError`, `DisconnectedError`, `ConnectError`, `CorruptedError` (a checksum did not
        match), `StaleMemoryError` (refused: generation, incarnation or ticket), `RequestError`
        (refused: blocks that are not there), `KilledError` (aborted by us), `TransferError` (the
        backend's own). It may raise before the transfer is settled. Cancellation leaves the
        transfer as it is; call `abort` to end it.
        """
        await self._over.wait()
        if self._report is not None:
            return self._report
        assert self._error is not None
        raise again(self._error)

    async def wait_over(self) -> None:
        """Return once `is_over`, whatever came of it."""
        await self._over.wait()

    async def wait_settled(self) -> None:
        """Return once `is_settled`. May take for ever if a peer hangs: use it with a timeout."""
        await self._settled.wait()

    def abort(self) -> None:
        """Ask it to end; no effect once it is over. `wait` raises `KilledError` from now on."""
        self.fail(KilledError("the transfer was aborted", reason="aborted"))

    # --- for the mover and the plane ---------------------------------------------------------------

    async def run(self, moving: Awaitable[bool] | None) -> None:
        """Wait for what `Mover.move` has begun, until it is over or its time is up."""
        with trio.CancelScope(deadline=self._started_at + self.deadline_s) as self._scope:
            if self.is_over:  # Aborted before its task began.
                self._scope.cancel()
            try:
                if moving is None:
                    await self._over.wait()
                else:
                    self.succeed(is_verified=await moving)
            except TrinamoError as error:
                self.fail(error)
        if not self.is_over:
            moved = f"{self.confirmed_count} of {self.block_count} blocks were moved"
            self.fail(DeadlineError(f"{moved} within {self.deadline_s:g} s"))

    def begin(self) -> None:
        self._started_at = trio.current_time()

    def confirm(self, count: int) -> bool:
        """So many leading blocks are certain; whether to go on. May be called from any thread."""
        if self.is_over:
            return False
        if self.confirmed_count < count <= self.block_count:
            self.confirmed_count = count
        return True

    def fail(self, error: TrinamoError) -> None:
        """End it with this error, unless it is over."""
        if not self.is_over:
            self._error = error
            self._end()

    def succeed(self, *, is_verified: bool) -> None:
        """It is done, unless it is over."""
        if not self.is_over:
            self.confirmed_count = self.block_count
            self._report = TransferReport(
                backend=self.backend,
                path=self.path,
                direction=self.direction,
                block_count=self.block_count,
                byte_count=self.byte_count,
                duration_s=trio.current_time() - self._started_at,
                is_verified=is_verified,
            )
            self._end()

    def _end(self) -> None:
        self._over.set()
        if self._scope is not None:
            self._scope.cancel()
        if self.let_go():
            self.settle()

    def settle(self) -> None:
        """It touches nothing any more. Again, it changes nothing."""
        if not self.is_settled:
            self._settled.set()
            self.on_settled()


def again(error: TrinamoError) -> TrinamoError:
    """The same error to raise in one more task."""
    if isinstance(error, KilledError):
        return KilledError(error.message, reason=error.reason)
    return error_from_wire(error.code, error.message, definite=error.definite)


class Mover(abc.ABC, Generic[RegionT]):
    """What moves the blocks of one plane, by one technology in one process.

    `TransferPlane` has the regions, the transfers and their ends; a mover knows how a byte gets from
    here to there. Its own connections and threads belong to whoever opens it.
    """

    backend: str
    """Its name in configuration, descriptions and metrics, such as `tcp`."""
    path: str
    """How the bytes go, for reports."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.regions: dict[int, RegionT] = {}
        """What is registered now, by number."""

    def region(self, number: int) -> RegionT:
        """A region that a peer names; `StaleMemoryError` if it is not there."""
        region = self.regions.get(number)
        if region is None:
            raise StaleMemoryError(f"there is no region {number}")
        return region

    @abc.abstractmethod
    async def register(
        self, memory: Registrable, draft: MemoryDescription, *, needs_ticket: bool
    ) -> RegionT:
        """The region of this memory, described as `draft` with what is only known here.

        Raises what `TransferPlane.register` says. Cancelled, it leaves nothing registered.
        """

    async def deregister(self, region: RegionT) -> None:  # noqa: ARG002 -- for those who pin it
        """Give the memory back: nothing of ours moves it any more."""
        await trio.lowlevel.checkpoint()

    @abc.abstractmethod
    async def ask(self, described: MemoryDescription) -> RemoteMemory:
        """Reach the peer and see that it lives, past all caches; what `move` must know of it.

        Bounded by the caller's timeout. Raises what `TransferPlane.connect` says.
        """

    @abc.abstractmethod
    def move(self, transfer: Transfer) -> Awaitable[bool] | None:
        """Begin. Never waits, and raises nothing.

        Returns what moves the blocks when it is awaited, in a task of the transfer's own, which is
        cancelled when the transfer is over; its result is whether they were verified. None if other
        threads or events move them, and call `succeed` or `fail`. A mover that does not stop at once
        when the transfer is over sets `let_go`, and calls `settle` when it has.
        """

    def hang_up(self, incarnation: str, silent_s: float) -> bool:  # noqa: ARG002 -- see below
        """Close the connection to a peer if it brought nothing for `silent_s`; whether it was closed.

        Called for a transfer that confirms nothing. All transfers over that connection fail with
        `StalledError`, and the next ones connect again. False where there is no such connection.
        """
        return False

    @abc.abstractmethod
    async def close(self, incarnation: str) -> None:
        """Close what is open to a peer, whose transfers have ended; no effect for one unknown."""


AnyMover = TypeVar("AnyMover", bound="Mover[Any]")
MoverT = TypeVar("MoverT", bound="Mover[Any]", default="Mover[Any]", covariant=True)  # noqa: PLC0105


class TransferPlane(Generic[MoverT]):
    """One backend in one process: its memory, and its transfers. Made by `open_plane`.

    Got from the transport's `open_...` context manager, whose nursery owns all its tasks; leaving
    it aborts what is under way, and returns when that is settled or its bounded time is up.
    """

    def __init__(self, mover: MoverT, nursery: trio.Nursery, *, drain_s: float) -> None:
        self.mover: Final = mover
        self.backend: Final = mover.backend
        """Its name in configuration, descriptions and metrics, such as `tcp`."""
        self.incarnation: Final = mover.incarnation
        """This process, new every time one is opened; part of every description."""
        self._nursery, self._drain_s = nursery, drain_s
        self._numbers = 0
        self._transfers: dict[int, Transfer] = {}

    # --- memory ----------------------------------------------------------------------------------

    async def register(
        self,
        memory: Registrable,
        *,
        block_bytes: int,
        fingerprint: str = "",
        needs_ticket: bool = False,
        parts: int = 1,
    ) -> MemoryRegion:
        """Register writable, contiguous memory as blocks of `block_bytes` each.

        A tail shorter than a block is left out. Several buffers, all as long and on one device, are
        one region: its blocks are numbered through them in their order. If what the caller lends is
        made of several `parts`, these are the blocks whose numbers are `block_count / parts` apart,
        and are granted together. `fingerprint` is what must be equal on both sides for the bytes to
        mean the same (`kv.memory.fingerprint`). With `needs_ticket` only blocks that were granted
        to a transfer's ticket may be moved by peers. Raises `RequestError` for memory that is
        read-only, empty, or of a kind the backend cannot move, and for buffers that differ in
        length or device; `TransferError` if the backend refuses it (such as for the limit of locked
        memory). Cancelled, it is given back.
        """
        self._numbers += 1
        draft = MemoryDescription(
            backend=self.backend,
            incarnation=self.incarnation,
            region=self._numbers,
            generation=1,
            fingerprint=fingerprint,
            length=block_bytes,
            block_bytes=block_bytes,
            parts=parts,
        )
        region: MemoryRegion = await self.mover.register(memory, draft, needs_ticket=needs_ticket)
        self.mover.regions[draft.region] = region
        return region

    async def deregister(self, region: MemoryRegion) -> None:
        """Give the memory back. Peers are refused at once; transfers with it are aborted.

        Returns once they are settled, within the drain time. What a transfer has not let go of by
        then stays registered and in place until it does, also if this is cancelled: the memory
        must stay alive until then.
        """
        number = region.description.region
        if self.mover.regions.get(number) is not region:
            await trio.lowlevel.checkpoint()
            return
        del self.mover.regions[number]
        ours = [each for each in self._transfers.values() if each.local is region]
        for transfer in ours:
            transfer.fail(StaleMemoryError("the region was deregistered"))
        region.withdraw()
        is_back = trio.Event()

        async def give_back() -> None:
            for transfer in ours:
                await transfer.wait_settled()
            await self.mover.deregister(region)
            is_back.set()

        self._nursery.start_soon(give_back)
        with trio.move_on_after(self._drain_s) as scope:
            await is_back.wait()
        if scope.cancelled_caught:
            _log.error("memory that transfers have not let go of stays registered until they do")

    # --- peers -----------------------------------------------------------------------------------

    async def connect(self, description: bytes) -> RemoteMemory:
        """Make a peer's region reachable; again for a region that is connected changes nothing.

        Raises `RemoteProtocolError` for bytes that are no description of this backend,
        `ConnectError` if the peer cannot be reached, `StaleMemoryError` if the peer that answers
        is not the incarnation described.
        """
        return await self.mover.ask(decode_description(description, backend=self.backend))

    async def probe(self, remote: RemoteMemory) -> None:
        """Ask the peer for a sign of life, past all caches; raises what `wait` would raise.

        Bounded by the caller's timeout. A router asks before it uses a backend again.
        """
        await self.mover.ask(remote.description)

    async def forget(self, incarnation: str) -> None:
        """Drop a peer: abort its transfers, close its connections, let go of its memory.

        Called when discovery says that the peer is gone; no effect for one that is unknown.
        Returns once our side is settled, within twice the drain time.
        """
        theirs = [e for e in self._transfers.values() if e.there.incarnation == incarnation]
        for transfer in theirs:
            transfer.fail(DisconnectedError(f"peer {incarnation} was forgotten"))
        with trio.move_on_after(self._drain_s):
            await self.mover.close(incarnation)
        await self._settle(theirs, self._drain_s)

    async def _settle(self, transfers: Sequence[Transfer], drain_s: float) -> None:
        with trio.move_on_after(drain_s) as scope:
            for transfer in transfers:
                await transfer.wait_settled()
        if scope.cancelled_caught:
            _log.error("transfers by %s did not settle within %g s", self.backend, drain_s)

    # --- transfers -------------------------------------------------------------------------------

    def start(
        self,
        direction: Direction,
        local: MemoryRegion,
        local_blocks: Sequence[int],
        remote: RemoteMemory,
        remote_blocks: Sequence[int],
        *,
        deadline_s: float,
        notify: bytes | None = None,
        ticket: int = 0,
    ) -> Transfer:
        """Start to move `len(local_blocks)` blocks, the first with the first, and so on.

        Never waits. The lists are taken at once, the memory of the blocks must not be freed before
        the transfer is settled. After `deadline_s` seconds it fails with `DeadlineError`. `notify`
        (at most `NOTIFY_BYTES_MAX`) reaches who granted the blocks once the transfer is done, and
        only then; it needs the `ticket` that the peer granted them to. Raises `RequestError` at once
        for lists of different lengths, longer than `BLOCKS_MAX` or with blocks that are not there
        or named twice at the receiving end, and `StaleMemoryError` for regions whose block size
        or fingerprint differ and for a local region that is deregistered.
        """
        transfer = Transfer(
            direction=direction,
            local=local,
            local_blocks=local_blocks,
            remote=remote,
            remote_blocks=remote_blocks,
            deadline_s=deadline_s,
            notify=notify,
            ticket=ticket,
            backend=self.backend,
            path=self.mover.path,
        )
        number = id(transfer)
        self._transfers[number] = transfer

        def settled() -> None:
            del self._transfers[number]

        transfer.on_settled = settled
        transfer.begin()
        moving = self.mover.move(transfer)
        if moving is not None or not transfer.is_over:
            self._nursery.start_soon(transfer.run, moving)
        return transfer

    # --- the end ---------------------------------------------------------------------------------

    async def close(self, close_s: float) -> None:
        """Refuse all memory and end all transfers; wait `close_s` seconds for those that move on."""
        unsettled = list(self._transfers.values())
        for transfer in unsettled:
            transfer.fail(KilledError("the plane is closed", reason="closed"))
        for region in self.mover.regions.values():
            region.withdraw()
        self.mover.regions.clear()
        if close_s and unsettled:
            await self._settle(unsettled, close_s)


@asynccontextmanager
async def open_plane(
    mover: AnyMover, *, drain_s: float = 10.0, close_s: float = 0.0, is_shielded: bool = False
) -> AsyncIterator[TransferPlane[AnyMover]]:
    """The plane over an open mover, until the block is left.

    Deregistering memory and forgetting peers take `drain_s` seconds at most for transfers that the
    mover cannot stop; leaving takes `close_s`, which with `is_shielded` no cancellation cuts short:
    a library that still moves bytes must not lose the memory under it.
    """
    async with open_nursery() as nursery:
        plane = TransferPlane(mover, nursery, drain_s=drain_s)
        try:
            yield plane
        finally:
            with trio.CancelScope(shield=is_shielded):
                await plane.close(close_s)
            nursery.cancel_scope.cancel()
