"""The books of a pool say what its own counts cannot: who owns a block, and who may still touch it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.sim.cluster.audit import BlockAudit, Landings, WatchedPlane
from trinamo.sim.errors import Violation


class Moving:
    """As much of a transfer as the audit looks at."""

    is_settled = False
    was_admitted = True


class Plane:
    """A plane that starts whatever it is given last."""

    backend = "stub"

    def __init__(self, incarnation: str = "here") -> None:
        self.incarnation = incarnation
        self.started: list[Moving] = []

    def start(self, *_: object, **__: object) -> Moving:
        self.started.append(Moving())
        return self.started[-1]


def moving(audit: BlockAudit, blocks: Sequence[int], *, is_target: bool = False) -> Moving:
    transfer: Any = Moving()
    audit.moves(transfer, blocks, is_target=is_target)
    return transfer  # type: ignore[no-any-return]


def region(life: str, *, is_fenced: bool = False) -> Any:
    """As much of memory, ours or a peer's, as the audit looks at."""
    return SimpleNamespace(is_fenced=is_fenced, description=SimpleNamespace(incarnation=life))


def watched(plane: Plane, audit: BlockAudit) -> WatchedPlane:
    stub: Any = plane
    return WatchedPlane(stub, audit)


def lent(audit: BlockAudit, owner: str, count: int = 2) -> list[int]:
    blocks = audit.pool.take(count)
    assert blocks is not None
    audit.taken(blocks, owner)
    return blocks


def test_a_block_that_a_transfer_may_touch_must_not_be_lent() -> None:
    audit = BlockAudit("a", BlockPool(4))
    blocks = lent(audit, "first")
    transfer = moving(audit, blocks)
    audit.pool.give_back(blocks)
    audit.returned(blocks)
    with pytest.raises(Violation, match="while the transfer of first may touch it") as caught:
        lent(audit, "second")
    assert caught.value.invariant == "I9"
    assert not transfer.is_settled


def test_a_settled_transfer_forbids_nothing() -> None:
    audit = BlockAudit("a", BlockPool(2))
    blocks = lent(audit, "first")
    transfer = moving(audit, blocks)
    audit.pool.give_back(blocks)
    audit.returned(blocks)
    transfer.is_settled = True
    assert sorted(lent(audit, "second")) == sorted(blocks)


def test_two_transfers_must_not_write_one_block() -> None:
    audit = BlockAudit("a", BlockPool(4))
    blocks = lent(audit, "first")
    transfer = moving(audit, blocks, is_target=True)
    with pytest.raises(Violation, match="written by two transfers"):
        moving(audit, blocks[:1], is_target=True)
    transfer.is_settled = True
    moving(audit, blocks, is_target=True)


def test_two_transfers_may_read_one_block() -> None:
    audit = BlockAudit("a", BlockPool(4))
    blocks = lent(audit, "first")
    moving(audit, blocks)
    moving(audit, blocks)


def test_the_parts_of_a_block_are_one_block() -> None:
    audit = BlockAudit("a", BlockPool(2), block_of=lambda part: part % 2)
    told: list[tuple[str, str, int]] = []
    audit.on_move = lambda *what: told.append(what)
    blocks = lent(audit, "first", 1)
    moving(audit, [blocks[0], blocks[0] + 2])
    assert told == [("first", "", 1)]


def test_a_block_with_two_owners_is_a_violation() -> None:
    audit = BlockAudit("a", BlockPool(4))
    blocks = lent(audit, "first")
    with pytest.raises(Violation, match="of first is lent to second"):
        audit.taken(blocks, "second")


def test_free_blocks_that_somebody_owns_are_a_violation() -> None:
    audit = BlockAudit("a", BlockPool(4))
    blocks = lent(audit, "first", 3)
    audit.pool.give_back(blocks)
    with pytest.raises(Violation, match="4 are free, but 3 have owners"):
        audit.count()


def test_a_watched_plane_tells_of_every_start_and_is_the_plane_otherwise() -> None:
    audit, plane = BlockAudit("a", BlockPool(4)), Plane()
    told: list[tuple[str, str, int]] = []
    audit.on_move = lambda *what: told.append(what)
    blocks = lent(audit, "first")
    there = watched(plane, audit)
    there.start(Direction.READ, region("here"), blocks, region("there"), blocks, deadline_s=1)
    assert there.backend == "stub"
    assert audit.incarnation == "here"
    assert told == [("first", "stub", 2)]
    assert len(plane.started) == 1


class Writing:
    """Process `a` writes the blocks of `b` that were lent there and have been given back."""

    def __init__(self, *, is_fenced: bool = False) -> None:
        landings = Landings()
        self.is_alive = True
        self.writer = BlockAudit(
            "a", BlockPool(4), landings=landings, is_alive=lambda: self.is_alive
        )
        self.is_owner_alive = True
        self.owner = BlockAudit(
            "b", BlockPool(2), landings=landings, is_alive=lambda: self.is_owner_alive
        )
        self.owner.opened("there")
        self.plane = Plane()
        self.fence = is_fenced
        self.blocks = lent(self.owner, "first")
        self.write()
        (self.transfer,) = self.plane.started
        self.owner.pool.give_back(self.blocks)
        self.owner.returned(self.blocks)

    def write(self) -> None:
        ours = lent(self.writer, "writer")
        here = region("here", is_fenced=self.fence)
        watched(self.plane, self.writer).start(
            Direction.WRITE, here, ours, region("there"), self.blocks, deadline_s=1
        )


def test_a_block_that_a_peer_still_writes_must_not_be_lent() -> None:
    writing = Writing()
    with pytest.raises(Violation, match="is lent to second while the transfer of writer"):
        lent(writing.owner, "second")


def test_two_peers_must_not_write_one_block() -> None:
    writing = Writing()
    with pytest.raises(Violation, match="and so may writer"):
        writing.write()


def test_blocks_of_a_process_that_has_died_may_be_written_by_anybody() -> None:
    writing = Writing()
    writing.is_owner_alive = False
    writing.write()


@pytest.mark.parametrize(
    "why", ["fenced", "settled", "dead", "not admitted", "another incarnation"]
)
def test_a_write_that_cannot_land_forbids_nothing(why: str) -> None:
    writing = Writing(is_fenced=why == "fenced")
    writing.transfer.is_settled = why == "settled"
    writing.transfer.was_admitted = why != "not admitted"
    writing.is_alive = why != "dead"
    if why == "another incarnation":
        writing.owner.incarnation = "there again"
    lent(writing.owner, "second")
