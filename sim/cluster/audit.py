"""I9, watched while it happens: who owns which block, and which transfers may still touch it.

The books are kept beside the pool's own, from what is asked of it and of the planes, so that a pool
or a lease that is wrong does not hide it. Wrong bytes show in the answer (`checks/streams.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs

from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.planes import MemoryRegion, RemoteMemory, Transfer, TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction

from ..errors import Violation


@attrs.define
class _Landing:
    """A transfer that writes blocks of another process, and that nobody there can stop."""

    into: str
    """The incarnation of the process that has the blocks."""
    blocks: frozenset[int]
    transfer: Transfer
    owner: str
    is_alive: Callable[[], bool]
    """Whether the process that started it still is; what a dead one has sent lands soon."""

    @property
    def may_land(self) -> bool:
        return self.transfer.was_admitted and self.is_alive() and not self.transfer.is_settled


class Landings:
    """The transfers of all processes that write memory of others without a fence."""

    def __init__(self) -> None:
        self._all: list[_Landing] = []
        self._targets: dict[str, Callable[[], bool]] = {}

    def admit(self, incarnation: str, is_alive: Callable[[], bool]) -> None:
        """A process has opened a plane, and may be written to as long as it lives."""
        self._targets[incarnation] = is_alive

    def add(self, landing: _Landing) -> None:
        """One more has been started."""
        self._all = [each for each in self._all if not each.transfer.is_settled]
        self._all.append(landing)

    def into(self, incarnation: str, block: int) -> Iterator[str]:
        """Whose transfers may write this block of a process."""
        for each in self._all:
            is_meant = (
                each.into == incarnation and block in each.blocks and self._targets[each.into]()
            )
            if is_meant and each.may_land:
                yield each.owner


@attrs.define
class BlockAudit:
    """The books of one pool."""

    host: str
    pool: BlockPool
    block_of: Callable[[int], int] = lambda part: part
    """Which block of the pool a plane's block is a part of."""
    on_move: Callable[[str, str, int], None] = lambda *_: None
    """Called when a transfer begins: whose blocks, by which backend, how many."""
    landings: Landings = attrs.Factory(Landings)
    """Shared by the audits of all processes."""
    is_alive: Callable[[], bool] = lambda: True
    """Whether this process is; a paused one is."""
    on_broken: Callable[[str], None] | None = None
    """Called with what is wrong; None: it is raised."""
    incarnation: str = attrs.field(default="", init=False)
    """Of its process, once a plane is open."""
    owners: dict[int, str] = attrs.Factory(dict)
    """Whose each block is that somebody has taken."""
    _sharers: Counter[int] = attrs.Factory(Counter)
    """How many have it beside the first."""
    _moves: list[tuple[Transfer, tuple[int, ...], str]] = attrs.Factory(list)

    def follow(self) -> None:
        """Hear of all that the pool lends and gets back from now on, whoever asks it."""
        take, share, give_back = self.pool.take, self.pool.share, self.pool.give_back

        def taken(count: int) -> list[int] | None:
            blocks = take(count)
            if blocks:
                self.taken(blocks, "a sequence")
            return blocks

        def shared(block_ids: Iterable[int]) -> None:
            blocks = list(block_ids)
            share(blocks)
            self.shared(blocks, "a sequence")

        def returned(block_ids: Sequence[int]) -> None:
            give_back(block_ids)
            self.returned(block_ids)

        for name, heard in (("take", taken), ("share", shared), ("give_back", returned)):
            setattr(self.pool, name, heard)

    def taken(self, blocks: Sequence[int], owner: str) -> None:
        """The pool lends blocks; raises `Violation` if they are not free to be lent."""
        for block in blocks:
            if block in self.owners:
                self._tell(f"block {block} of {self.owners[block]} is lent to {owner}")
            for name in self._touching(block):
                self._tell(
                    f"block {block} is lent to {owner} while the transfer of {name} may touch it"
                )
            self.owners[block] = owner
        self.count()

    def returned(self, blocks: Sequence[int]) -> None:
        """One owner gives blocks back."""
        for block in blocks:
            if self._sharers[block]:
                self._sharers[block] -= 1
            else:
                del self.owners[block]
        self.count()

    def shared(self, blocks: Sequence[int], owner: str) -> None:
        """One more owner reads blocks; whoever reads them too does no harm."""
        for block in blocks:
            for name in self.landings.into(self.incarnation, block):
                self._tell(f"block {block} is shared while the transfer of {name} may write it")
            if block in self.owners:
                self._sharers[block] += 1
            else:
                self.owners[block] = owner
        self.count()

    def moves(
        self,
        transfer: Transfer,
        parts: Sequence[int],
        backend: str = "",
        *,
        is_target: bool = False,
    ) -> str:
        """A transfer that we started may touch these blocks until it is settled; whose they are.

        Raises `Violation` if it writes blocks that another one still may write, or read.
        """
        blocks = tuple(dict.fromkeys(map(self.block_of, parts)))
        owner = self.owners.get(blocks[0], "nobody") if blocks else "nobody"
        if is_target:
            for name in itertools.chain.from_iterable(map(self._touching, blocks)):
                self._tell(
                    f"blocks {blocks} of {owner} are written by two transfers, the first of {name}"
                )
        self._moves.append((transfer, blocks, owner))
        self.on_move(owner, backend, len(blocks))
        return owner

    def opened(self, incarnation: str) -> None:
        """A plane of this process is open."""
        self.incarnation = incarnation
        self.landings.admit(incarnation, self.is_alive)

    def writes(
        self, transfer: Transfer, remote: RemoteMemory, parts: Sequence[int], owner: str
    ) -> None:
        """A transfer that we started may write these blocks of a peer until it is settled.

        Raises `Violation` if another one still may.
        """
        blocks = frozenset(map(self.block_of, parts))
        into = remote.description.incarnation
        for block in blocks:
            for name in self.landings.into(into, block):
                self._tell(f"{owner} writes block {block} of {into}, and so may {name}")
        self.landings.add(_Landing(into, blocks, transfer, owner, self.is_alive))

    def count(self) -> None:
        """Free, used, in flight and quarantined blocks are all there are, and none is two."""
        pool = self.pool
        counts = (pool.free_count, pool.used_count, pool.in_flight_count, pool.quarantined_count)
        if min(counts) < 0 or sum(counts) != pool.block_count:
            self._tell(f"free, used, in flight, quarantined are {counts}")
        if pool.free_count + len(self.owners) > pool.block_count:
            self._tell(f"{pool.free_count} are free, but {len(self.owners)} have owners")
        self._moves = [move for move in self._moves if not move[0].is_settled]

    def _touching(self, block: int) -> list[str]:
        ours = [
            name
            for transfer, blocks, name in self._moves
            if block in blocks and not transfer.is_settled
        ]
        return [*ours, *self.landings.into(self.incarnation, block)]

    def _tell(self, text: str) -> None:
        text = f"{self.host}: {text}"
        if self.on_broken is None:
            raise Violation("I9", text)
        self.on_broken(text)


class WatchedPlane:
    """A transfer plane whose transfers are told to the audit; everything else is the plane's."""

    def __init__(self, plane: TransferPlane, audit: BlockAudit) -> None:
        self._plane, self._audit = plane, audit
        audit.opened(plane.incarnation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def start(
        self,
        direction: Direction,
        local: MemoryRegion,
        local_blocks: Sequence[int],
        remote: RemoteMemory,
        remote_blocks: Sequence[int],
        **options: Any,
    ) -> Transfer:
        """See `TransferPlane.start`."""
        plane, audit = self._plane, self._audit
        transfer = plane.start(direction, local, local_blocks, remote, remote_blocks, **options)
        is_target = direction is Direction.READ
        owner = audit.moves(transfer, local_blocks, plane.backend, is_target=is_target)
        if not is_target and not local.is_fenced:
            audit.writes(transfer, remote, remote_blocks, owner)
        return transfer
