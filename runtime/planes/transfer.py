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

Each side frees only its own blocks. The descriptions and their bounds are in
`protocol/transfer/description.py`; a chain of planes with fallback is `kv/transfer/router.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
from typing_extensions import Buffer

from ..protocol.transfer.access import OnComplete, unheard
from ..protocol.transfer.description import Direction, MemoryDescription


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """Memory that is no Python buffer, such as a GPU's; backends that cannot move it refuse it.

    A backend calls `synchronize` before it starts to read or write, and again before it reports a
    transfer as done: kernels still running on a stream would otherwise be overtaken.
    """

    address: int
    length: int
    device: int
    """The device's number as the backend counts them."""
    synchronize: Callable[[], None]


Registrable = Buffer | DeviceMemory | Sequence[Buffer | DeviceMemory]
"""Memory to register: one buffer, or a list of as long ones, such as one for each layer."""


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
    """Whether a checksum of every block was compared."""


class MemoryRegion(Protocol):
    """Memory of ours that peers may move blocks to and from."""

    @property
    def description(self) -> MemoryDescription:
        """What peers must know; changes when `renew` counts the generation up."""
        ...

    def describe(self) -> bytes:
        """The description as bytes, at most `DESCRIPTION_BYTES_MAX`, for the peer's `connect`."""
        ...

    @property
    def is_fenced(self) -> bool:
        """Whether this backend checks generation and tickets on our side, for every slice.

        Where it does, no byte lands or leaves after `revoke` or `renew` has returned. Where it
        does not (RDMA), those only refuse new transfers, and blocks given to a peer may be used
        again only once the peer has said that its transfers are settled, or is gone.
        """
        ...

    def renew(self) -> int:
        """Count the generation up and return it: descriptions given out before are refused."""
        ...

    def grant(
        self,
        ticket: int,
        blocks: Sequence[int],
        on_complete: OnComplete = unheard,
        *,
        may_write: bool = True,
    ) -> None:
        """Let transfers that carry `ticket` (not 0) move these blocks, and no others.

        The blocks are numbered as the owner's pool numbers them: all `parts` of each are granted.
        Only for regions registered with `needs_ticket`. A ticket granted again gets more blocks.
        Without `may_write` peers may only read them.
        `on_complete` is called with the `notify` of each transfer with this ticket that is done,
        until the ticket is revoked; more than once where a peer could not know that it was heard.
        """
        ...

    def revoke(self, ticket: int) -> None:
        """Refuse the ticket from now on; transfers under way with it fail at their next slice."""
        ...


class RemoteMemory(Protocol):
    """A peer's region that we are connected to."""

    @property
    def description(self) -> MemoryDescription:
        """As the peer gave it, checked."""
        ...


class Transfer(Protocol):
    """One transfer under way or over. Never cancelled by the end of a task that waits for it."""

    @property
    def confirmed_count(self) -> int:
        """How many leading blocks of the list are certain, in the order given.

        A transfer that fails may be resumed by another one from there. A backend that learns
        nothing before the end says 0 until then.
        """
        ...

    @property
    def is_settled(self) -> bool:
        """Whether it touches no byte of our memory any more."""
        ...

    async def wait(self) -> TransferReport:
        """Return once it is done; raise the one error that ended it otherwise.

        `DeadlineError`, `DisconnectedError`, `ConnectError`, `CorruptedError` (a checksum did not
        match), `StaleMemoryError` (refused: generation, incarnation or ticket), `RequestError`
        (refused: blocks that are not there), `KilledError` (aborted by us), `TransferError` (the
        backend's own). It may raise before the transfer is settled. Cancellation leaves the
        transfer as it is; call `abort` to end it.
        """
        ...

    def abort(self) -> None:
        """Ask it to end; no effect once it is over. `wait` raises `KilledError` from now on."""
        ...

    async def wait_settled(self) -> None:
        """Return once `is_settled`. May take for ever if a peer hangs: use it with a timeout."""
        ...


class TransferPlane(Protocol):
    """One backend in one process: its memory, its peers, its transfers.

    Got from the transport's `open_...` context manager, whose nursery owns all its tasks; leaving
    it aborts what is under way, and returns when that is settled or its bounded time is up.
    """

    @property
    def backend(self) -> str:
        """Its name in configuration, descriptions and metrics, such as `tcp`."""
        ...

    @property
    def incarnation(self) -> str:
        """This plane in this process, new every time it is opened; part of every description."""
        ...

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
        memory).
        """
        ...

    async def deregister(self, region: MemoryRegion) -> None:
        """Give the memory back. Peers are refused at once; transfers with it are aborted.

        Returns once they are settled. The memory must stay alive until then.
        """
        ...

    async def connect(self, description: bytes) -> RemoteMemory:
        """Make a peer's region reachable; again for a region that is connected changes nothing.

        Raises `RemoteProtocolError` for bytes that are no description of this backend,
        `ConnectError` if the peer cannot be reached, `StaleMemoryError` if the peer that answers
        is not the incarnation described.
        """
        ...

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
        ...

    async def probe(self, remote: RemoteMemory) -> None:
        """Ask the peer for a sign of life, past all caches; raises what `wait` would raise.

        Bounded by the caller's timeout. A router asks before it uses a backend again.
        """
        ...

    async def forget(self, incarnation: str) -> None:
        """Drop a peer: abort its transfers, close its connections, let go of its memory.

        Called when discovery says that the peer is gone; no effect for one that is unknown.
        Returns once our side is settled.
        """
        ...
